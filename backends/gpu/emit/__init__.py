"""The operations that a GPU runs: one emitter per operation turns it into launches.

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
    Columns,
    Connect,
    Convolve,
    Embed,
    EmbedNgrams,
    Excess,
    Experts,
    Glu,
    HeadLinear,
    HeadsAppend,
    Join,
    Linear,
    LinearAdd,
    LinearAttention,
    LinearGlu,
    LinearGroup,
    Match,
    MatrixScan,
    Mix,
    Norm,
    Operation,
    Pool,
    Receive,
    Rotate,
    Scale,
    SelectiveScan,
    SelectPositions,
    SelectRows,
    Send,
    Softcap,
    Weigh,
    Xielu,
)
from localllm.plan.rewrites.fusion import fuse_additions, fuse_heads, fuse_linears

REWRITES = (fuse_additions, fuse_linears, fuse_heads)  # passes for which there are fused kernels

EMITTERS: dict[type[Operation], Callable[[Lowering, Any], None]] = {
    Activate: rowwise.activate,
    Add: rowwise.add,
    Append: attention.append,
    Attention: attention.attention,
    Clamp: rowwise.clamp,
    Columns: columns.columns,
    Connect: streams.connect,
    Convolve: recurrence.convolve,
    Embed: rowwise.embed,
    EmbedNgrams: boundaries.look_up,
    Excess: streams.excess,
    Experts: experts.experts,
    Glu: rowwise.glu,
    HeadLinear: products.head_linear,
    HeadsAppend: attention.heads_append,
    Join: columns.join,
    Linear: products.linear,
    LinearAdd: products.linear_add,
    LinearGlu: products.linear_glu,
    LinearGroup: products.linear_group,
    Blend: streams.blend,
    Match: streams.match,
    MatrixScan: recurrence.matrix_scan,
    Mix: streams.mix,
    Norm: rowwise.norm,
    Pool: recurrence.pool,
    Receive: boundaries.receive,
    Rotate: rowwise.rotate,
    Scale: rowwise.scale,
    LinearAttention: recurrence.linear_attention,
    SelectiveScan: recurrence.selective_scan,
    SelectPositions: attention.select_positions,
    SelectRows: rowwise.select,
    Send: boundaries.send,
    Softcap: rowwise.softcap,
    Xielu: rowwise.xielu,
    Weigh: streams.weigh,
}
