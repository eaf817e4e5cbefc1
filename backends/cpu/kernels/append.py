"""Append: writes the keys and values of every row to their cache slots, in the format of the cache."""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, Int64, Rows, Struct, Target
from localllm.backends.cpu.cache import CACHE
from localllm.backends.cpu.cache_rows import head_bytes, write_key_row, write_value_row
from localllm.backends.cpu.kernels.common import PlanKernel, Step, kernel, own_rows
from localllm.backends.cpu.simd import Function, Value
from localllm.plan import BLOCK, rows_of_block


class AppendArguments(Struct):
    step: Address
    k: Rows
    v: Rows
    k_cache: Target  # the layer's cache blocks (blocks, KV heads), in the layout of `backends.cpu.cache`
    v_cache: Target
    heads: Int64


def append(
    head_dim: int, value_dim: int, key_type: str, value_type: str, rows: bool = False, every: int = 1
) -> PlanKernel[AppendArguments]:
    """Write keys and values to their slots.

    With `every`, store one of `every` positions; with `rows`, one row per position.
    """
    keys, values = CACHE[key_type], CACHE[value_type]
    key_bytes, value_bytes = head_bytes(keys, values, head_dim, value_dim, rows, every)

    def body(f: Function, a: AppendArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with own_rows(f, step.rows, thread, threads) as row:
            slot, heads = f.load_i32(step.slots, row), a.heads
            block, position = slot // BLOCK, slot % BLOCK
            if every > 1:
                position = position // every % rows_of_block(every)
                last = (f.load_i32(step.positions, row) + 1) % every
                heads = f.select(last.equals(0), a.heads, f.i64(0))
            with f.loop(0, heads) as head:
                at = block * heads + head
                k = a.k.address + (row * a.k.stride + head * (4 * head_dim))
                v = a.v.address + (row * a.v.stride + head * (4 * value_dim))
                k_to, v_to = a.k_cache + at * key_bytes, a.v_cache + at * value_bytes
                if rows:
                    write_key_row(f, keys, k, k_to, head_dim, position)
                    write_value_row(f, values, v, v_to, value_dim, position)
                else:
                    keys.write_key(f, k, k_to, head_dim, position)
                    values.write_value(f, v, v_to, value_dim, position)

    kind = ("append_rows" if rows else "append") + (f"_every_{every}" if every > 1 else "")
    return kernel(f"{kind}_{head_dim}_{value_dim}_{key_type}_{value_type}", AppendArguments, body)
