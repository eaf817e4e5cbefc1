"""Emitters, which turn each operation of a plan into GPU launches.

An emitter allocates buffers for the operation's results, and launches kernels on the buffers of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localllm.backends.gpu.emit import attention, boundaries, columns, experts, products, recurrence, rowwise, streams
from localllm.backends.gpu.lowering import Lowering
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
    EmbedNgrams,
    Experts,
    GaussianTopK,
    Glu,
    HeadLinear,
    HeadsAppend,
    HyperConnection,
    IndexerTopK,
    Linear,
    LinearAdd,
    LinearAttention,
    LinearGlu,
    LinearGroup,
    Match,
    Mix,
    Mul,
    Norm,
    Operation,
    Pool,
    Receive,
    Rotate,
    Scale,
    SelectiveScan,
    SelectRows,
    Send,
    Slice,
    Softcap,
    Wkv,
    Xielu,
)
from localllm.plan.rewrites.fusion import fuse_additions, fuse_heads, fuse_linears

REWRITES = (fuse_additions, fuse_linears, fuse_heads)  # plan rewrites for which there are fused kernels

EMITTERS: dict[type[Operation], Callable[[Lowering, Any], None]] = {
    Activate: rowwise.activate,
    Add: rowwise.add,
    Append: attention.append,
    Attention: attention.attention,
    Clamp: rowwise.clamp,
    Slice: columns.slice_columns,
    HyperConnection: streams.hyper_connection,
    Convolve: recurrence.convolve,
    Embed: rowwise.embed,
    EmbedNgrams: boundaries.look_up,
    GaussianTopK: streams.gaussian_top_k,
    Experts: experts.experts,
    Glu: rowwise.glu,
    HeadLinear: products.head_linear,
    HeadsAppend: attention.heads_append,
    Concat: columns.concat,
    Linear: products.linear,
    LinearAdd: products.linear_add,
    LinearGlu: products.linear_glu,
    LinearGroup: products.linear_group,
    Blend: streams.blend,
    Match: streams.match,
    Wkv: recurrence.wkv,
    Mix: streams.mix,
    Norm: rowwise.norm,
    Pool: recurrence.pool,
    Receive: boundaries.receive,
    Rotate: rowwise.rotate,
    Scale: rowwise.scale,
    LinearAttention: recurrence.linear_attention,
    SelectiveScan: recurrence.selective_scan,
    IndexerTopK: attention.indexer_top_k,
    SelectRows: rowwise.select_rows,
    Send: boundaries.send,
    Softcap: rowwise.softcap,
    Xielu: rowwise.xielu,
    Mul: streams.mul,
}
