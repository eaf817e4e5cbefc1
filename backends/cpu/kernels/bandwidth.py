"""Read memory and nothing else: the roof for decoding."""

from __future__ import annotations

from enum import IntEnum

from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.kernels.common import Arguments, kernel, read_ahead, tasks
from localllm.backends.cpu.memory import LINE
from localllm.backends.cpu.simd import I64, Function, Value, vector

PIECE = 1 << 18  # bytes per task, fewer if there are fewer
STEP = 256  # a piece is a multiple of this
LEAST = 1 << 16  # minimum bytes for a useful measurement


class ReadArg(IntEnum):
    START = 0
    PIECES = 1
    COUNTER = 2
    SINK = 3  # 64 bytes a thread, so that the reads are not optimized away
    PIECE = 4  # bytes
    SIZE = 5


def read() -> Kernel:
    """Loads PIECES * PIECE bytes from START, shared between the threads."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        line = vector(I64, 8)
        sums = [f.var(f.zeros(line)) for _ in range(4)]
        with tasks(f, a.pointer(ReadArg.COUNTER), a.i64(ReadArg.PIECES), thread, threads) as task:
            start = a.pointer(ReadArg.START) + task * a.i64(ReadArg.PIECE)
            with f.loop(0, a.i64(ReadArg.PIECE), STEP) as at:
                read_ahead(f, [start + (at + line) for line in range(0, STEP, LINE)])
                for i, total in enumerate(sums):
                    total.set(total.get() ^ f.load(start + at + 64 * i, line))
        everything = sums[0].get() ^ sums[1].get() ^ sums[2].get() ^ sums[3].get()
        f.store(a.pointer(ReadArg.SINK) + thread * 64, everything)

    return kernel("read", body)
