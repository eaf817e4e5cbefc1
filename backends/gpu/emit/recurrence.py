"""Emitters of recurrent layers."""

from __future__ import annotations

from localllm.backends.gpu.kernels import recurrence as kernels
from localllm.backends.gpu.kernels.kernel import by_row, by_value
from localllm.backends.gpu.lowering import Lowering
from localllm.backends.gpu.references import CacheOf, Fixed
from localllm.plan import Convolve, LinearAttention, Pool, SelectiveScan, Wkv


def _stored(low: Lowering, layer: int) -> tuple[kernels.Stored, Fixed]:
    tables, slots_at, stride_at = low.tables(layer)
    return kernels.Stored(MAX_ROWS=low.limits.rows, SLOTS_AT=slots_at, TABLE_STRIDE_AT=stride_at), tables


def convolve(low: Lowering, op: Convolve) -> None:
    x, y, (stored, tables) = low.floats(op.x), low.make(op.out), _stored(low, op.layer)
    kernel = kernels.Convolve(
        stored=stored, WIDTH=op.x.width, SIZE=op.weight.shape[1], X_STRIDE=x.stride, Y_STRIDE=y.stride,
        HAS_BIAS=op.bias is not None,
    )  # fmt: skip
    launch = kernel.launch(
        by_value(op.x.width, "batch"), x=x, tables=tables, weight=low.vector(op.weight), bias=low.vector(op.bias),
        rows=CacheOf(op.layer, "keys"), y=y,
    )  # fmt: skip
    low.dispatch("convolve", "batch", [launch])


def linear_attention(low: Lowering, op: LinearAttention) -> None:
    q, k, v, *_ = map(low.floats, op.inputs)
    # a kernel does not read a None input
    steps, strengths = (q if x is None else low.floats(x) for x in (op.step, op.strength))
    y, of, (stored, tables) = low.make(op.out), op.store, _stored(low, op.layer)
    rows = CacheOf(op.layer, "keys")
    heads = kernels.LinearHeads(
        HEADS=of.heads, KEY_HEADS=of.key_heads, KEY_DIM=of.key_dim, VALUE_DIM=of.value_dim,
        DECAYS=of.key_dim if of.channels else 1,
    )  # fmt: skip
    append = kernels.AppendKeys(stored=stored, heads=heads, K_STRIDE=k.stride)
    attend = (kernels.ChannelAttention if of.channels else kernels.LinearAttention)(
        stored=stored, heads=heads, DELTA=op.delta, TILED=op.tiled, HAS_SKIP=op.skip is not None,
        HAS_STEPS=op.step is not None, HAS_STRENGTHS=op.strength is not None, Q_STRIDE=q.stride, K_STRIDE=k.stride,
        V_STRIDE=v.stride, G_STRIDE=steps.stride, B_STRIDE=strengths.stride, Y_STRIDE=y.stride,
    )  # fmt: skip
    launches = [
        append.launch(by_value(of.key_heads * of.key_dim, "batch"), k=k, rows=rows),
        attend.launch(
            by_row(of.heads, "batch"), q=q, k=k, v=v, steps=steps, strengths=strengths, tables=tables,
            rates=low.vector(op.rate), skips=low.vector(op.skip), rows=rows, states=CacheOf(op.layer, "values"), y=y,
        ),
    ]  # fmt: skip
    low.dispatch("linear attention", "batch", launches)


def selective_scan(low: Lowering, op: SelectiveScan) -> None:
    x, dt, b, c = map(low.floats, op.inputs)
    y, (stored, tables) = low.make(op.out), _stored(low, op.layer)
    kernel = kernels.SelectiveScan(
        stored=stored, WIDTH=op.x.width, STATE_DIM=op.b.width, X_STRIDE=x.stride, DT_STRIDE=dt.stride,
        B_STRIDE=b.stride, C_STRIDE=c.stride, Y_STRIDE=y.stride,
    )  # fmt: skip
    launch = kernel.launch(
        by_value(op.x.width, "batch"), x=x, dt=dt, b=b, c=c, tables=tables, a=low.vector(op.a), d=low.vector(op.d),
        rows=CacheOf(op.layer, "keys"), states=CacheOf(op.layer, "values"), y=y,
    )  # fmt: skip
    low.dispatch("selective scan", "batch", [launch])


def wkv(low: Lowering, op: Wkv) -> None:
    q, v, k, decay, *erasing = map(low.floats, op.inputs)
    probe, erase = erasing or (k, k)
    y, of, (stored, tables) = low.make(op.out), op.store, _stored(low, op.layer)
    kernel = kernels.WkvRows(
        stored=stored, HEADS=of.heads, KEY_DIM=of.key_dim, VALUE_DIM=of.value_dim, ERASES=of.erases, BEFORE=op.before,
        K_STRIDE=k.stride, V_STRIDE=v.stride,
    )  # fmt: skip
    launch = kernel.launch(
        by_value(op.v.width, "batch"), q=q, k=k, v=v, decay=decay, probe=probe, erase=erase, tables=tables,
        rows=CacheOf(op.layer, "keys"), states=CacheOf(op.layer, "values"), y=y,
    )  # fmt: skip
    low.dispatch("matrix scan", "batch", [launch])


def pool(low: Lowering, op: Pool) -> None:
    x, scores, y, (stored, tables) = low.floats(op.x), low.floats(op.scores), low.make(op.out), _stored(low, op.layer)
    rows, columns, width = CacheOf(op.layer, "keys"), op.x.width, op.out.width
    append = kernels.AppendPooled(stored=stored, WIDTH=columns, X_STRIDE=x.stride, S_STRIDE=scores.stride)
    kernel = kernels.PoolRows(stored=stored, WIDTH=width, PARTS=op.parts, SIZE=op.size, Y_STRIDE=y.stride)
    launches = [
        append.launch(by_value(columns, "batch"), x=x, scores=scores, rows=rows),
        kernel.launch(by_value(width, "batch"), tables=tables, bias=low.vector(op.bias), rows=rows, y=y),
    ]
    low.dispatch("pool", "batch", launches)
