"""RoPE: rotates every head of queries or keys by the position of its row."""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, AddressOrZero, Int64, Output, Rows, Struct
from localllm.backends.cpu.kernels.common import PlanKernel, Step, f32x16, kernel, own_rows
from localllm.backends.cpu.simd import F32, LANES, Function, Value, vector
from localllm.plan import RopeStyle


class RotateArguments(Struct):
    step: Address
    x: Rows
    y: Output  # may be the same memory as x
    heads: Int64
    table: Address  # float32 (positions, 2, n_rot / 2): cosines, sines
    axes: AddressOrZero  # int32 (n_rot / 2,): the axis of each pair; 0: all pairs have the row's position


def rotate(
    style: RopeStyle, head_dim: int, n_rot: int, start: int = 0, copied: bool = True, axes: bool = False
) -> PlanKernel[RotateArguments]:
    """Emit (a, b) -> (a cos - b sin, a sin + b cos) for each pair among `n_rot` dimensions of a head from `start` on.

    The other dimensions are copied, unless y is known to be the same memory as x. With `axes`, the cosines and sines of
    a row are first gathered from the table rows of its positions; all heads share them.
    """
    half = n_rot // 2
    others = [(begin, end) for begin, end in ((0, start), (start + n_rot, head_dim)) if copied and begin < end]
    lanes = next(n for n in (16, 8, 4, 2, 1) if half % n == 0)

    def body(f: Function, a: RotateArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        row_type = vector(F32, lanes)
        own = f.array(F32, 2 * half) if axes else None
        with own_rows(f, step.rows, thread, threads) as row:
            if own is None:
                table = a.table + f.load_i32(step.positions, row) * (8 * half)
            else:
                table, positions, of_pairs = own, step.axes + row * step.axes_row, f.pointer(a.axes)
                with f.loop(0, half) as pair:
                    axis = f.load_i32(of_pairs, pair)
                    of_pair = a.table + f.load_i32(positions + axis * step.axes_stride) * (8 * half) + pair * 4
                    for part in (0, 4 * half):
                        f.store(own + (pair * 4 + part), f.load(of_pair + part, F32))
            with f.loop(0, a.heads) as head:
                of_x, of_y = (to.row(row) + head * (4 * head_dim) for to in (a.x, a.y))
                x, y = of_x + 4 * start, of_y + 4 * start
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
                for begin, end in others:
                    whole = begin + (end - begin) // LANES * LANES
                    with f.loop(begin, whole, LANES) as i:
                        f.store(of_y + i * 4, f.load(of_x + i * 4, f32x16))
                    with f.loop(whole, end) as i:
                        f.store(of_y + i * 4, f.load(of_x + i * 4, F32))

    extras = f"_from_{start}" * (start > 0) + "_kept" * (not copied) + "_axes" * axes
    return kernel(f"rotate_{style}_{head_dim}_{n_rot}{extras}", RotateArguments, body)
