"""Emitters, which turn each operation of a plan into GPU launches.

An emitter allocates buffers for the operation's results, and launches kernels on the buffers of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localllm import plan
from localllm.backends.gpu.emit import attention, boundaries, experts, products, recurrence, rowwise, streams
from localllm.backends.gpu.lowering import Lowering
from localllm.plan.rewrites.fusion import fuse_additions, fuse_heads, fuse_linears

REWRITES = (fuse_additions, fuse_linears, fuse_heads)  # plan rewrites for which there are fused kernels

EMITTERS: dict[type[plan.Operation], Callable[[Lowering, Any], None]] = {
    plan.Activate: rowwise.activate,
    plan.Add: rowwise.add,
    plan.Append: attention.append,
    plan.Attention: attention.attention,
    plan.Clamp: rowwise.clamp,
    plan.Slice: rowwise.slice_columns,
    plan.HyperConnection: streams.hyper_connection,
    plan.Convolve: recurrence.convolve,
    plan.Embed: rowwise.embed,
    plan.EmbedMedia: boundaries.look_up,
    plan.EmbedNgrams: boundaries.look_up,
    plan.GaussianTopK: streams.gaussian_top_k,
    plan.Experts: experts.experts,
    plan.Glu: rowwise.glu,
    plan.HeadLinear: products.head_linear,
    plan.HeadsAppend: attention.heads_append,
    plan.Concat: rowwise.concat,
    plan.Linear: products.linear,
    plan.LinearAdd: products.linear_add,
    plan.LinearGlu: products.linear_glu,
    plan.LinearGroup: products.linear_group,
    plan.Blend: streams.blend,
    plan.Match: streams.match,
    plan.Wkv: recurrence.wkv,
    plan.Mix: streams.mix,
    plan.Norm: rowwise.norm,
    plan.Pool: recurrence.pool,
    plan.Receive: boundaries.receive,
    plan.Rotate: rowwise.rotate,
    plan.Scale: rowwise.scale,
    plan.LinearAttention: recurrence.linear_attention,
    plan.SelectiveScan: recurrence.selective_scan,
    plan.IndexerTopK: attention.indexer_top_k,
    plan.SelectRows: rowwise.select_rows,
    plan.Send: boundaries.send,
    plan.Softcap: rowwise.softcap,
    plan.Splice: rowwise.splice,
    plan.Xielu: rowwise.xielu,
    plan.Mul: streams.mul,
}
