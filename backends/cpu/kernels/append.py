"""Append: keys and values of every row to their cache slots, in the format of the cache."""

from __future__ import annotations

from enum import IntEnum

from localllm.backends.cpu.cache import CACHE
from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.kernels.common import Arguments, Step, kernel, own_rows
from localllm.backends.cpu.simd import Function, Value
from localllm.plan import BLOCK


class AppendArg(IntEnum):
    STEP = 0
    K = 1
    K_STRIDE = 2
    V = 3
    V_STRIDE = 4
    K_CACHE = 5  # for this layer: (blocks, kv heads) in the layout of `backends.cpu.cache`
    V_CACHE = 6
    HEADS = 7
    SIZE = 8


def append(head_dim: int, key_type: str, value_type: str) -> Kernel:
    keys, values = CACHE[key_type], CACHE[value_type]

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        step = a.pointer(AppendArg.STEP)
        heads = a.i64(AppendArg.HEADS)
        with own_rows(f, f.load_int(step, Step.ROWS), thread, threads) as row:
            slot = f.load_i32(f.pointer(f.load_int(step, Step.SLOTS)), row)
            block, position = slot // BLOCK, slot % BLOCK
            with f.loop(0, heads) as head:
                at = block * heads + head
                k = a.pointer(AppendArg.K) + (row * a.i64(AppendArg.K_STRIDE) + head * (4 * head_dim))
                v = a.pointer(AppendArg.V) + (row * a.i64(AppendArg.V_STRIDE) + head * (4 * head_dim))
                k_to = a.pointer(AppendArg.K_CACHE) + at * keys.key_bytes(head_dim)
                v_to = a.pointer(AppendArg.V_CACHE) + at * values.value_bytes(head_dim)
                keys.write_key(f, k, k_to, head_dim, position)
                values.write_value(f, v, v_to, head_dim, position)

    return kernel(f"append_{head_dim}_{key_type}_{value_type}", body)
