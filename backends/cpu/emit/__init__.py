"""Emitters, which turn each operation of a plan into CPU kernel calls.

An emitter allocates buffers for the results of its operation, and calls kernels on the buffers of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localllm.backends.cpu.emit import (
    attention,
    boundaries,
    columns,
    experts,
    media,
    products,
    recurrence,
    rowwise,
    streams,
)
from localllm.backends.cpu.lowering import Lowering
from localllm.plan import (
    Activate,
    Add,
    Append,
    Attention,
    Blend,
    Clamp,
    Concat,
    Convolve,
    Embed,
    EmbedMedia,
    EmbedNgrams,
    Experts,
    GaussianTopK,
    Glu,
    HeadLinear,
    HyperConnection,
    IndexerTopK,
    Linear,
    LinearAdd,
    LinearAttention,
    Match,
    Mix,
    Mul,
    Norm,
    Operation,
    Pool,
    Receive,
    Rotate,
    RotateEnds,
    Scale,
    SelectiveScan,
    SelectRows,
    Send,
    Slice,
    Softcap,
    Splice,
    Wkv,
    Xielu,
)
from localllm.plan.rewrites.fusion import fuse_additions, fuse_ends

REWRITES = (fuse_additions, fuse_ends)  # plan rewrites for which there are fused kernels

EMITTERS: dict[type[Operation], Callable[[Lowering, Any], None]] = {
    Activate: rowwise.activate,
    Add: rowwise.add,
    Append: rowwise.append_,
    Attention: attention.attention,
    Clamp: rowwise.clamp,
    Slice: columns.slice_columns,
    HyperConnection: streams.hyper_connection,
    Convolve: recurrence.convolve,
    Embed: products.embed,
    EmbedMedia: boundaries.look_up,
    EmbedNgrams: boundaries.look_up,
    GaussianTopK: streams.gaussian_top_k,
    Experts: experts.experts,
    Glu: rowwise.glu,
    HeadLinear: products.head_linear,
    Concat: columns.concat,
    Linear: products.linear_,
    LinearAdd: products.linear_add,
    LinearAttention: recurrence.linear_attention,
    Blend: streams.blend,
    Match: streams.match,
    Wkv: recurrence.wkv,
    Mix: streams.mix,
    Norm: rowwise.norm,
    Pool: recurrence.pool,
    Receive: boundaries.receive,
    Rotate: rowwise.rotate,
    RotateEnds: rowwise.rotate_ends,
    Scale: rowwise.scale,
    SelectiveScan: recurrence.selective_scan,
    IndexerTopK: attention.indexer_top_k,
    SelectRows: rowwise.select,
    Send: boundaries.send,
    Softcap: rowwise.softcap,
    Splice: media.splice,
    Xielu: rowwise.xielu,
    Mul: streams.mul,
}
