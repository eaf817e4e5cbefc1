"""Time only the attention of a decode step, at one context depth, with the cache types in alternation.

    python benchmarks/attention.py [--types f16,q8_0] [--depth 16384] [-t 2] [--rounds 3] [--heads 32,8,64]

The plan holds only attention, in more layers than the processor's caches can hold. It is bound once per cache type;
every round times one step with each type. GB/s count the keys and values read, next to the bandwidth of a read-only
loop in the same round. One JSON line per type goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
from compare import RESULTS, ROOT, machine
from numpy.typing import NDArray

sys.path.insert(0, str(ROOT))

from kernels import Random, best

from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cpu.backend import CpuBackend, CpuExecutable
from localllm.plan import BLOCK, Batch, Recorder

TOKENS = 512
LEAST_BYTES = 256 << 20  # minimum bytes of an F16 cache, over all layers
ROOF_ROWS = 1 << 17  # rows of the matrix that is read to measure the roofline


class Table:
    """A weight of random rows that serves as token embeddings."""

    format = "F32"

    def __init__(self, name: str, width: int) -> None:
        self.name, self.shape = name, (TOKENS, width)
        self._rows = np.random.default_rng(0).standard_normal(self.shape, np.float32)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        return self._rows[start:stop].view(np.uint8)


@dataclass(frozen=True, slots=True)
class Heads:
    """Number of query heads, number of KV heads, and the head dimension."""

    query: int
    kv: int
    dim: int


def bind(backend: CpuBackend, heads: Heads, layers: int, depth: int, type_name: str) -> CpuExecutable:
    """Bind layers of attention, each with a cache of `depth` tokens that holds copies of one random block."""
    recorder = Recorder()
    q, k, v = (
        recorder.embed(Table(name, n * heads.dim)) for name, n in (("q", heads.query), ("k", heads.kv), ("v", heads.kv))
    )
    for _ in range(layers):
        layer = recorder.append(k, v, heads.kv)
        q = recorder.attention(q, layer, heads.query, heads.dim**-0.5)
    blocks = -(-depth // BLOCK)
    types = CacheTypes(type_name, type_name)
    executable = backend.bind(recorder.finish(q), Limits(BLOCK, BLOCK, blocks, blocks * BLOCK), types)
    first = np.arange(BLOCK, dtype=np.int32)
    executable.step(
        Batch(first, first, first, np.zeros(BLOCK, np.int32), np.arange(blocks, dtype=np.int32)[None], first)
    )
    everywhere = np.arange(1, blocks)
    for at in range(0, len(everywhere), 64):
        here = everywhere[at : at + 64]
        executable.copy_blocks(np.zeros(len(here), np.int64), here)
    last = np.array([depth - 1], np.int32)
    executable.step(
        Batch(last % TOKENS, last, last, np.zeros(1, np.int32), np.arange(blocks, dtype=np.int32)[None], last * 0)
    )
    return executable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="f16,q8_0")
    parser.add_argument("--heads", default="32,8,64", help="query heads, key-value heads, values of a head")
    parser.add_argument("--depth", type=int, default=16384)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.jsonl")
    arguments = parser.parse_args()
    heads = Heads(*map(int, arguments.heads.split(",")))
    layers = -(-LEAST_BYTES // (arguments.depth * heads.kv * heads.dim * 4))
    backend = CpuBackend(arguments.threads)
    recorder = Recorder()
    w = Random("w", "Q8_0", ROOF_ROWS)
    reader = backend.bind(
        recorder.finish(recorder.linear(recorder.embed(Random("e", "F32", 1)), w)), Limits(1, 1, 1, BLOCK)
    )
    types = arguments.types.split(",")
    bound = {name: bind(backend, heads, layers, arguments.depth, name) for name in types}
    samples: dict[str, list[float]] = {name: [] for name in types}
    roofs = []
    for _ in range(arguments.rounds):
        roofs.append(reader.read_bandwidth())
        for name, executable in bound.items():
            samples[name].append(best(executable.replay, 5))
    print(f"| cache | bytes | ms | GB/s | of roof | times as fast as {types[0]} |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, executable in bound.items():
        size = arguments.depth * executable.memory.cache_per_token
        share = median(size / s / roof for s, roof in zip(samples[name], roofs, strict=True))
        faster = median(a / b for a, b in zip(samples[types[0]], samples[name], strict=True))
        seconds = median(samples[name])
        row = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "cache": name,
            "heads": [heads.query, heads.kv, heads.dim],
            "depth": arguments.depth,
            "layers": layers,
            "threads": arguments.threads,
            "device": backend.describe(),
            "bytes": size,
            "ms": [s * 1e3 for s in samples[name]],
            "roof_gb_per_s": [roof / 1e9 for roof in roofs],
            "roof_share": share,
            "faster": faster,
            "than": types[0],
            "machine": machine(),
        }
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        cells = (name, f"{size / 1e6:.0f} M", f"{seconds * 1e3:.2f}", f"{size / seconds / 1e9:.1f}", f"{share:.0%}")
        print(f"| {' | '.join(cells)} | {faster:.2f} |")
        executable.close()
    reader.close()
    backend.close()


if __name__ == "__main__":
    main()
