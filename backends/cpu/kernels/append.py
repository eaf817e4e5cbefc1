"""Append: write keys and values of every row to their cache slots, in the format of the cache."""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, Int64, Rows, Struct, Target
from localllm.backends.cpu.cache import CACHE
from localllm.backends.cpu.cache_rows import row_bytes, write_key_row, write_value_row
from localllm.backends.cpu.kernels.common import PlanKernel, Step, kernel, own_rows
from localllm.backends.cpu.simd import Function, Value
from localllm.plan import BLOCK


class AppendArguments(Struct):
    step: Address
    k: Rows
    v: Rows
    k_cache: Target  # of the layer: (blocks, kv heads) in the layout of `backends.cpu.cache`
    v_cache: Target
    heads: Int64


def append(head_dim: int, value_dim: int, key_type: str, value_type: str) -> PlanKernel[AppendArguments]:
    keys, values = CACHE[key_type], CACHE[value_type]

    def body(f: Function, a: AppendArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        heads = a.heads
        with own_rows(f, step.rows, thread, threads) as row:
            slot = f.load_i32(step.slots, row)
            block, position = slot // BLOCK, slot % BLOCK
            with f.loop(0, heads) as head:
                at = block * heads + head
                k = a.k.address + (row * a.k.stride + head * (4 * head_dim))
                v = a.v.address + (row * a.v.stride + head * (4 * value_dim))
                k_to = a.k_cache + at * keys.key_bytes(head_dim)
                v_to = a.v_cache + at * values.value_bytes(value_dim)
                keys.write_key(f, k, k_to, head_dim, position)
                values.write_value(f, v, v_to, value_dim, position)

    return kernel(f"append_{head_dim}_{value_dim}_{key_type}_{value_type}", AppendArguments, body)


def append_rows(head_dim: int, value_dim: int, key_type: str, value_type: str) -> PlanKernel[AppendArguments]:
    """Append to a layer that selections read: a row per position and head."""
    keys, values = CACHE[key_type], CACHE[value_type]

    def body(f: Function, a: AppendArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        heads = a.heads
        with own_rows(f, step.rows, thread, threads) as row:
            slot = f.load_i32(step.slots, row)
            block, position = slot // BLOCK, slot % BLOCK
            with f.loop(0, heads) as head:
                at = (block * heads + head) * BLOCK
                k = a.k.address + (row * a.k.stride + head * (4 * head_dim))
                v = a.v.address + (row * a.v.stride + head * (4 * value_dim))
                write_key_row(f, keys, k, a.k_cache + at * row_bytes(keys, head_dim), head_dim, position)
                write_value_row(f, values, v, a.v_cache + at * row_bytes(values, value_dim), value_dim, position)

    return kernel(f"append_rows_{head_dim}_{value_dim}_{key_type}_{value_type}", AppendArguments, body)
