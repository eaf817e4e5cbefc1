"""Splices the embeddings of media tokens into the rows of a batch."""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, Int64, Output, Rows, Struct
from localllm.backends.cpu.kernels.common import PlanKernel, Step, f32x16, kernel, own_rows
from localllm.backends.cpu.simd import F32, LANES, Function, Value


class SpliceArguments(Struct):
    step: Address
    x: Rows
    media: Rows
    y: Output  # may be the same memory as x
    width: Int64
    start: Int64  # bytes from the start of a media row to its columns


def splice(add: bool) -> PlanKernel[SpliceArguments]:
    """Emit y = x for tokens of the text; for media tokens, y = media, or x + media if `add`."""

    def body(f: Function, a: SpliceArguments, thread: Value, threads: Value) -> None:
        step, whole = Step.at(a.step), a.width // LANES * LANES
        with own_rows(f, step.rows, thread, threads) as row:
            x, y, media = a.x.row(row), a.y.row(row), a.media.row(row) + a.start
            of_text = f.load_i32(step.tokens, row) >= 0
            with f.when(of_text), f.loop(0, a.width, LANES) as i:
                f.store(y + i * 4, f.load(x + i * 4, f32x16))
            with f.when(of_text.equals(0)):
                for begin, end, lanes, kind in ((f.i64(0), whole, LANES, f32x16), (whole, a.width, 1, F32)):
                    with f.loop(begin, end, lanes) as i:
                        own = f.load(media + i * 4, kind)
                        f.store(y + i * 4, f.load(x + i * 4, kind) + own if add else own)

    return kernel(f"splice{'_add' * add}", SpliceArguments, body)
