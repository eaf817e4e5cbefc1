"""Recurrent layers: causal convolutions, as `plan.Convolve` defines them, and the keys of linear attention.

Every value has one chain of operations, and neighbouring outputs are the lanes. So a row's result depends neither on
the other rows of a step nor on the threads.
"""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, AddressOrZero, Output, Rows, Struct, Target
from localllm.backends.cpu.kernels.common import PlanKernel, Step, f32x16, kernel, own_rows
from localllm.backends.cpu.simd import F32, LANES, Function, Value
from localllm.backends.cpu.stores import whole_strips
from localllm.plan import BLOCK


class ConvolveArguments(Struct):
    step: Address
    x: Rows
    y: Output
    weight: Address  # float32 (K, width), rows padded to whole vectors
    bias: AddressOrZero
    store: Target
    zeros: Address  # float32 (width,)


def convolve(width: int, size: int) -> PlanKernel[ConvolveArguments]:
    """Emit `plan.Convolve` for K = `size`. Rows of the batch are read from x, older rows from the store."""
    row_bytes = 4 * whole_strips(width)

    def body(f: Function, a: ConvolveArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        positions, sequence = step.positions, step.sequence
        bias = a.bias
        with own_rows(f, step.rows, thread, threads) as row:
            position, own = f.load_i32(positions, row), f.load_i32(sequence, row)
            table = step.tables + own * step.table_stride
            sources: list[Value] = []
            for back in range(size - 1, 0, -1):
                found = f.var(a.zeros)
                with f.when(position >= back):
                    at = position - back
                    block = f.load_i32(table, at // BLOCK)
                    found.set(a.store + (block * BLOCK + at % BLOCK) * row_bytes)
                with f.when(row >= back):
                    before = row - back
                    here = f.load_i32(sequence, before).equals(own) & f.load_i32(positions, before).equals(
                        position - back
                    )
                    with f.when(here):
                        found.set(a.x.row(before))
                sources.append(found.get())
            x, y = a.x.row(row), a.y.row(row)
            sources.append(x)
            to = a.store + f.load_i32(step.slots, row) * row_bytes
            with f.loop(0, whole_strips(width), LANES) as i:
                total = f.var(f.zeros(f32x16))
                with f.when(bias.differs(0)):
                    total.set(f.load(f.pointer(bias) + i * 4, f32x16))
                for j, source in enumerate(sources):
                    w = f.load(a.weight + (i * 4 + j * row_bytes), f32x16)
                    total.set(f.fma(w, f.load(source + i * 4, f32x16), total.get()))
                f.store(y + i * 4, total.get())
                f.store(to + i * 4, f.load(x + i * 4, f32x16))

    return kernel(f"convolve_{width}_{size}", ConvolveArguments, body)


class KeysArguments(Struct):
    step: Address
    k: Rows
    keys: Target  # (blocks, key heads, key_dim, 64)


def append_keys(key_heads: int, key_dim: int) -> PlanKernel[KeysArguments]:
    """Write the keys of every row, with positions as lanes."""

    def body(f: Function, a: KeysArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with own_rows(f, step.rows, thread, threads) as row:
            slot, k = f.load_i32(step.slots, row), a.k.row(row)
            to = a.keys + (slot // BLOCK * (4 * BLOCK * key_heads * key_dim) + slot % BLOCK * 4)
            with f.loop(0, key_heads * key_dim) as d:
                f.store(to + d * (4 * BLOCK), f.load(k + d * 4, F32))

    return kernel(f"append_keys_{key_heads}_{key_dim}", KeysArguments, body)
