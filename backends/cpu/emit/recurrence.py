"""Emitters of recurrent layers.

The kernels first write a row to the store, then compute the row's output from the store.
"""

from __future__ import annotations

from localllm.backends.cpu.arguments import Rows
from localllm.backends.cpu.kernels import channels, pooling, scan, state_heads
from localllm.backends.cpu.kernels import recurrence as kernels
from localllm.backends.cpu.kernels import wkv as matrices
from localllm.backends.cpu.kernels.linear_attention import linear_attention as attending
from localllm.backends.cpu.lowering import Lowering, vector_of
from localllm.backends.cpu.places import COUNTER, CacheOf, ColumnsOf, StepOf, VectorOf, output_to, rows_in
from localllm.backends.cpu.simd import LANES
from localllm.backends.cpu.stores import whole_strips
from localllm.plan import Convolve, LinearAttention, Pool, SelectiveScan, Wkv


def _step(low: Lowering, layer: int) -> StepOf:
    return StepOf(low.limits.own_blocks(low.plan.layers[layer]))


def convolve(low: Lowering, op: Convolve) -> None:
    x, width = low.floats(op.x), op.x.width
    arguments = kernels.ConvolveArguments(
        step=_step(low, op.layer), x=rows_in(x), y=output_to(low.make(op.out)), weight=ColumnsOf(op.weight, LANES),
        bias=vector_of(op.bias), store=CacheOf(op.layer, "keys"), zeros=low.list(4 * whole_strips(width)),
    )  # fmt: skip
    # Domain "select", because a row reads rows that other threads wrote.
    low.call(kernels.convolve(width, op.weight.shape[1]), arguments, "select", "convolve")


def linear_attention(low: Lowering, op: LinearAttention) -> None:
    q, k, v, *_ = map(low.floats, op.inputs)
    # a kernel does not read a None input
    sizes, strength = (q if x is None else low.floats(x) for x in (op.step, op.strength))
    step, of, keys = _step(low, op.layer), op.store, CacheOf(op.layer, "keys")
    emits = channels.ChannelHead if of.channels else state_heads.RecurrenceHead
    append = kernels.KeysArguments(step=step, k=rows_in(k), keys=keys)
    stores = channels.append_key_rows(of) if of.channels else kernels.append_keys(of.key_heads, of.key_dim)
    low.call(stores, append, "batch", "append keys")
    size = emits.scratch_bytes(of)
    arguments = state_heads.AttendArguments(
        step=step, q=rows_in(q), k=rows_in(k), v=rows_in(v), step_sizes=rows_in(sizes), strength=rows_in(strength),
        y=output_to(low.make(op.out)), keys=keys, states=CacheOf(op.layer, "values"), rate=VectorOf(op.rate, LANES),
        skip=vector_of(op.skip), counter=COUNTER, scratch=Rows(address=low.list(size * low.threads), stride=size),
    )  # fmt: skip
    kind = state_heads.Attending(of, op.delta, op.tiled, op.step is not None, op.strength is not None)
    low.call(attending(kind, emits), arguments, "tasks", "linear attention")


def selective_scan(low: Lowering, op: SelectiveScan) -> None:
    x, dt, b, c = map(low.floats, op.inputs)
    arguments = scan.ScanArguments(
        step=_step(low, op.layer), x=rows_in(x), dt=rows_in(dt), b=rows_in(b), c=rows_in(c),
        y=output_to(low.make(op.out)), a=ColumnsOf(op.a, LANES), d=VectorOf(op.d, LANES),
        rows=CacheOf(op.layer, "keys"), states=CacheOf(op.layer, "values"), counter=COUNTER,
    )  # fmt: skip
    low.call(scan.append_scanned(op.store), arguments, "batch", "append scanned")
    low.call(scan.selective_scan(op.store), arguments, "tasks", "selective scan")


def wkv(low: Lowering, op: Wkv) -> None:
    q, v, k, decay, *erasing = map(low.floats, op.inputs)
    probe, erase = erasing or (k, k)
    arguments = matrices.WkvArguments(
        step=_step(low, op.layer), q=rows_in(q), k=rows_in(k), v=rows_in(v), decay=rows_in(decay), probe=rows_in(probe),
        erase=rows_in(erase), y=output_to(low.make(op.out)), rows=CacheOf(op.layer, "keys"),
        states=CacheOf(op.layer, "values"), counter=COUNTER,
    )  # fmt: skip
    low.call(matrices.append_matrices(op.store), arguments, "batch", "append scanned")
    low.call(matrices.wkv(op.store, op.before), arguments, "tasks", "matrix scan")


def pool(low: Lowering, op: Pool) -> None:
    x, scores, step, store = low.floats(op.x), low.floats(op.scores), _step(low, op.layer), CacheOf(op.layer, "keys")
    append = pooling.AppendPooledArguments(step=step, x=rows_in(x), scores=rows_in(scores), store=store)
    low.call(pooling.append_pooled(op.x.width), append, "batch", "append pooled")
    arguments = pooling.PoolArguments(
        step=step, y=output_to(low.make(op.out)), bias=VectorOf(op.bias, LANES), store=store, count=op.size
    )
    # Domain "select", because the kernel reads rows that other threads appended.
    low.call(pooling.pool(op.out.width, op.parts), arguments, "select", "pool")
