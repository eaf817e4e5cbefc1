"""The plan: a forward pass as a flat list of operations over named values.

`models` walks an architecture and records it with a `Recorder`, which returns a `Plan`. A backend binds the plan once
and replays it for every `Batch`. This package executes nothing.

A value is a float32 matrix with one row per token of the batch ("batch", T rows) or per token whose logits are
requested ("logits", L rows). Values are single-assignment: each is computed by one operation and never modified.

May import: quant.
Begin with: plan.py and operations.py, then recorder.py, which builds a plan.
"""

from __future__ import annotations

from localllm.plan.attention import Append, Attention, IndexerTopK, Rotate
from localllm.plan.batch import BLOCK, Batch
from localllm.plan.connections import HyperConnection
from localllm.plan.experts import Experts, Gating, Stack
from localllm.plan.fused import Fused, Heads, HeadsAppend, LinearAdd, LinearGlu, LinearGroup, RotateEnds, flattened
from localllm.plan.media import EmbedMedia, Splice
from localllm.plan.ngrams import EmbedNgrams
from localllm.plan.operation import Operation, Read
from localllm.plan.operations import (
    Activate,
    Activation,
    Add,
    Blend,
    Clamp,
    Concat,
    Embed,
    GaussianTopK,
    Glu,
    GluActivation,
    HeadLinear,
    Linear,
    Match,
    Mix,
    Mul,
    Norm,
    NormKind,
    Receive,
    Scale,
    SelectRows,
    Send,
    Slice,
    Softcap,
    Xielu,
)
from localllm.plan.plan import CacheLayer, DraftHead, Plan, Store, rows_of_block
from localllm.plan.pooling import Pool
from localllm.plan.recorder import Recorder
from localllm.plan.recurrence import Convolve, LinearAttention, RowLayer, ScanLayer, SelectiveScan, StateLayer
from localllm.plan.summary import Summary, summarize
from localllm.plan.values import F32, Rope, RopeStyle, Rows, Value, rope_table
from localllm.plan.weights import Tensor, Weight
from localllm.plan.wkv import Wkv, WkvLayer

__all__ = [
    "BLOCK",
    "F32",
    "Activate",
    "Activation",
    "Add",
    "Append",
    "Attention",
    "Batch",
    "Blend",
    "CacheLayer",
    "Clamp",
    "Concat",
    "Convolve",
    "DraftHead",
    "Embed",
    "EmbedMedia",
    "EmbedNgrams",
    "Experts",
    "Fused",
    "Gating",
    "GaussianTopK",
    "Glu",
    "GluActivation",
    "HeadLinear",
    "Heads",
    "HeadsAppend",
    "HyperConnection",
    "IndexerTopK",
    "Linear",
    "LinearAdd",
    "LinearAttention",
    "LinearGlu",
    "LinearGroup",
    "Match",
    "Mix",
    "Mul",
    "Norm",
    "NormKind",
    "Operation",
    "Plan",
    "Pool",
    "Read",
    "Receive",
    "Recorder",
    "Rope",
    "RopeStyle",
    "Rotate",
    "RotateEnds",
    "RowLayer",
    "Rows",
    "Scale",
    "ScanLayer",
    "SelectRows",
    "SelectiveScan",
    "Send",
    "Slice",
    "Softcap",
    "Splice",
    "Stack",
    "StateLayer",
    "Store",
    "Summary",
    "Tensor",
    "Value",
    "Weight",
    "Wkv",
    "WkvLayer",
    "Xielu",
    "flattened",
    "rope_table",
    "rows_of_block",
    "summarize",
]
