"""A kernel that only reads memory. Its bandwidth is the upper limit of decode speed."""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, Int64, Struct, Target
from localllm.backends.cpu.kernels.common import PlanKernel, kernel, lines_ahead, read_ahead, tasks
from localllm.backends.cpu.memory import LINE
from localllm.backends.cpu.simd import I64, Function, Value, vector

PIECE = 1 << 18  # maximum bytes per task
STEP = 256  # pieces are multiples of this size
LEAST = 1 << 16  # minimum bytes for a meaningful measurement


class ReadArguments(Struct):
    start: Address
    pieces: Int64
    counter: Address
    sink: Target  # 64 bytes per thread, so that the reads are not optimized away
    piece: Int64  # size in bytes


def read_memory() -> PlanKernel[ReadArguments]:
    """Load pieces * piece bytes from `start`. The threads share the pieces."""

    def body(f: Function, a: ReadArguments, thread: Value, threads: Value) -> None:
        line = vector(I64, 8)
        sums = [f.var(f.zeros(line)) for _ in range(4)]
        with tasks(f, a.counter, a.pieces, thread, threads) as task:
            start = a.start + task * a.piece
            with f.loop(0, a.piece, STEP) as at:
                read_ahead(f, lines_ahead(f, [start + (at + line) for line in range(0, STEP, LINE)]))
                for i, total in enumerate(sums):
                    total.set(total.get() ^ f.load(start + at + 64 * i, line))
        everything = sums[0].get() ^ sums[1].get() ^ sums[2].get() ^ sums[3].get()
        f.store(a.sink + thread * 64, everything)

    return kernel("read", ReadArguments, body)
