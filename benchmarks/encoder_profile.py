"""Measure the processor time of each operation of an encoder, the float32 peak, and llama.cpp's time.

    python benchmarks/encoder_profile.py --shape qwen3vl-2b --size 448 [--peer /tmp/oracle] [--format Q8_0]

One thread, in seconds of processor time, so that other programs disturb little: the minimum of a kernel over the
rounds. `of peak` compares float32 products and attention with a loop of fused multiply-adds in registers. With
`--peer`, llama.cpp with flash attention encodes the same picture in turn. `--layers N` keeps only the first layers.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import thread_time

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.encoder_files import SHAPES, write_files
from benchmarks.encoders import Ours, Peer, build, picture
from localllm.backends.cpu.backend import CpuBackend, CpuExecutable
from localllm.backends.cpu.kernels.common import f32x16, kernel
from localllm.backends.cpu.kernels.executor import Entry
from localllm.backends.cpu.kernels.peak import PeakArguments
from localllm.backends.cpu.memory import address
from localllm.backends.cpu.simd import LANES, Function, Value
from localllm.plan import Attention, Linear, LinearAdd

CHAINS, TURNS = 16, 20000


def peak(backend: CpuBackend) -> float:
    """Return the float32 operations per second of one thread that only multiplies and adds in registers."""

    def body(f: Function, a: PeakArguments, thread: Value, threads: Value) -> None:
        sums = [f.var(f.zeros(f32x16) + float(number)) for number in range(CHAINS)]
        x = f.load(a.data, f32x16)
        with f.loop(0, a.turns):
            for total in sums:
                total.set(f.fma(x, x, total.get()))
        everything = sums[0].get()
        for total in sums[1:]:
            everything = everything + total.get()
        f.store(a.sink, everything)

    backend.library.load([kernel("float_products", PeakArguments, body)])
    data, sink, counters = np.full(LANES, 1e-9, np.float32), np.zeros(64, np.uint8), np.zeros((1, 8), np.int64)
    arguments = PeakArguments(data=address(data), turns=TURNS, sink=address(sink)).pack()
    code = backend.library.address("float_products")
    entry = Entry.whole(code, address(arguments))[None]
    return max(2 * LANES * CHAINS * TURNS / timed(backend, entry, counters) for _ in range(20))


def timed(backend: CpuBackend, entry: NDArray[np.int64], counters: NDArray[np.int64]) -> float:
    began = thread_time()
    backend.pool.run(entry, counters, 1)
    return thread_time() - began


class Profile:
    """Runs the kernels of an encoder one by one; `seconds` holds the minimum of each, `operations` what it computed."""

    def __init__(self, ours: Ours) -> None:
        self._backend = ours.backend
        self.seconds: dict[tuple[str, int], float] = {}
        self.operations: dict[tuple[str, int], int] = {}
        for part, executable in ours.encoder._bound.items():
            assert isinstance(executable, CpuExecutable)
            executable._run = self._runner(part, executable)  # type: ignore[method-assign]

    def _runner(self, part: str, executable: CpuExecutable):  # type: ignore[no-untyped-def]
        def run(number: int, entries: NDArray[np.int64], counters: NDArray[np.int64]) -> None:
            first = (entries.ctypes.data - executable.entries.ctypes.data) // entries.strides[0]
            counters[:] = 0
            for own in range(len(entries)):
                entry = entries[own : own + 1].copy()
                entry[:, Entry.barrier] = 1
                key = (part, first + own)
                seconds = timed(self._backend, entry, counters[own : own + 1])
                self.seconds[key] = min(seconds, self.seconds.get(key, seconds))
                operation, before = executable.operations[first + own], executable.operations[max(first + own - 1, 0)]
                again = own > 0 and operation is before  # the second kernel of an operation
                self.operations[key] = 0 if again else count(operation, executable._counts["batch"])

        return run


def count(operation: object, rows: int) -> int:
    """Return the float32 operations of a product, or of attention among all rows; 0 for others."""
    if isinstance(operation, LinearAdd):
        operation = operation.linear
    if isinstance(operation, Linear):
        return 2 * rows * int(np.prod(operation.weight.shape))
    return 4 * rows * rows * operation.out.width if isinstance(operation, Attention) else 0


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3vl-2b", choices=SHAPES)
    parser.add_argument("--size", default="448", help="side of a square, or WIDTHxHEIGHT")
    parser.add_argument("--format", default="F16", choices=("F16", "Q8_0"))
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", type=Path, help="a folder with llama.cpp's source and build")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "encoders")
    arguments = parser.parse_args()
    name, folder = arguments.shape, arguments.folder
    if arguments.layers:
        folder = folder / f"{arguments.layers}-layers"
        shape = SHAPES[name]
        deep = tuple([number for number in shape.deep if number < arguments.layers])
        SHAPES[name] = replace(shape, layers=arguments.layers, deep=deep)
    folder.mkdir(parents=True, exist_ok=True)
    projector, text = write_files(name, folder, arguments.format)
    ours, pixels = Ours(name, projector, 1), picture(arguments.size)
    peer = Peer(build(arguments.peer, folder), projector, text, 1, True) if arguments.peer else None
    profile = Profile(ours)
    for _ in range(arguments.rounds):
        began = thread_time()
        ours.encode(pixels)
        own = thread_time() - began
        line = f"preparing and encoding: {own:.2f} s"
        if peer is not None:
            before = cpu_seconds(peer.process)
            peer.encode(pixels)
            theirs = cpu_seconds(peer.process) - before
            line += f", llama.cpp with flash attention {theirs:.2f} s, {theirs / own:.2f}x"
        print(line, flush=True)
    report(ours, profile)


def report(ours: Ours, profile: Profile) -> None:
    most, total = peak(ours.backend), sum(profile.seconds.values())
    seconds, operations = Counter[str](), Counter[str]()
    for (part, number), took in profile.seconds.items():
        label = re.sub(r"\d+", "#", ours.encoder._bound[part].labels[number])  # type: ignore[attr-defined]
        seconds[label] += took  # type: ignore[assignment]
        operations[label] += profile.operations[part, number]
    print(f"\nkernels {total:.2f} s, float32 peak {most / 1e9:.1f} G operations/s\n")
    print("| operation | seconds | share | of peak |\n|---|---:|---:|---:|")
    for label, took in seconds.most_common():
        share = f"{operations[label] / took / most:.0%}" if operations[label] else ""
        print(f"| {label} | {took:.4f} | {took / total:.1%} | {share} |")
    least = sum(operations.values()) / most
    print(f"\nproducts and attention at the peak, and nothing else: {least:.2f} s")


if __name__ == "__main__":
    main()
