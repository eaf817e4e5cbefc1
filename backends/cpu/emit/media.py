"""Emitter of the operation that splices media embeddings into a batch's rows."""

from __future__ import annotations

from localllm.backends.cpu.kernels import media
from localllm.backends.cpu.lowering import Lowering
from localllm.backends.cpu.places import StepOf, output_to, rows_in
from localllm.plan import Splice


def splice(low: Lowering, op: Splice) -> None:
    x, embeddings = low.floats(op.x), low.floats(op.media)
    low.values.release(op.x)  # each element is read before it is overwritten
    arguments = media.SpliceArguments(
        step=StepOf(rows=op.x.rows), x=rows_in(x), media=rows_in(embeddings), y=output_to(low.make(op.out)),
        width=op.out.width, start=4 * op.start,
    )  # fmt: skip
    low.call(media.splice(op.add), arguments, op.x.rows, "splice")
