"""Rotary embedding: rotate every head of queries or keys by the position of its row."""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, Int64, Output, Rows, Struct
from localllm.backends.cpu.kernels.common import PlanKernel, Step, kernel, own_rows
from localllm.backends.cpu.simd import F32, Function, Value, vector
from localllm.plan import RopeStyle


class RotateArguments(Struct):
    step: Address
    x: Rows
    y: Output  # may be x
    heads: Int64
    table: Address  # float32 (positions, 2, n_rot / 2): cosines, sines


def rotate(style: RopeStyle, head_dim: int, n_rot: int) -> PlanKernel[RotateArguments]:
    """Emit (a, b) -> (a cos - b sin, a sin + b cos) for each pair among the first `n_rot` dimensions of a head."""
    half = n_rot // 2
    lanes = next(n for n in (16, 8, 4, 2, 1) if half % n == 0)

    def body(f: Function, a: RotateArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        row_type = vector(F32, lanes)
        with own_rows(f, step.rows, thread, threads) as row:
            position = f.load_i32(step.positions, row)
            table = a.table + position * (8 * half)
            with f.loop(0, a.heads) as head:
                x = a.x.address + (row * a.x.stride + head * (4 * head_dim))
                y = a.y.address + (row * a.y.stride + head * (4 * head_dim))
                with f.loop(0, half, lanes) as i:
                    cosine = f.load(table + i * 4, row_type)
                    sine = f.load(table + (i + half) * 4, row_type)
                    if style == "neox":
                        p, q = f.load(x + i * 4, row_type), f.load(x + (i + half) * 4, row_type)
                    else:
                        pairs = f.load(x + i * 8, vector(F32, 2 * lanes))
                        p, q = (f.shuffle(pairs, pairs, range(odd, 2 * lanes, 2)) for odd in (0, 1))
                    minus = f.constant(row_type, 0.0) - q
                    first = f.fma(p, cosine, minus * sine)
                    second = f.fma(p, sine, q * cosine)
                    if style == "neox":
                        f.store(y + i * 4, first)
                        f.store(y + (i + half) * 4, second)
                    else:
                        order = [lane // 2 + (lane % 2) * lanes for lane in range(2 * lanes)]
                        f.store(y + i * 8, f.shuffle(first, second, order))
                if n_rot < head_dim:
                    with f.loop(n_rot, head_dim) as i:
                        f.store(y + i * 4, f.load(x + i * 4, F32))

    return kernel(f"rotate_{style}_{head_dim}_{n_rot}", RotateArguments, body)
