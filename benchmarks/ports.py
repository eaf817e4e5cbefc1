"""Count the instructions of decode products by the execution pipes of Zen 4, and compare the bound with the speed.

    python benchmarks/ports.py [--formats IQ2_XXS,IQ3_XXS] [--gigahertz 3.69]

Counts are 512-bit operations per 64 weights (16 rows x 4 values) of a product with one row; narrower ones count half.
Zen 4 has four vector pipes of 256 bits, and a 512-bit operation takes two slots. Timing pairs of instructions showed
which pipes they use (PIPES). The speed is measured with one panel whose weights stay in the L1 and L2 caches. One JSON
line per format goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import sys
from collections import Counter
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from time import perf_counter

import numpy as np
from compare import RESULTS, ROOT, machine
from numpy.typing import NDArray

sys.path.insert(0, str(ROOT))

from localllm.backends.cpu import isa, jit
from localllm.backends.cpu.arguments import Output, Rows, RowsOrNone
from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.kernels import linear
from localllm.backends.cpu.kernels.common import kernel
from localllm.backends.cpu.memory import address
from localllm.backends.cpu.unpack import INTEGER_PANELS

COLUMNS, PANELS, RUNS, CORE_BANDWIDTH = 2048, 64, 600, 8e9
FORMATS = "IQ2_XXS,IQ2_XS,IQ2_S,IQ3_XXS,IQ3_S,IQ1_S,IQ1_M,Q4_0,Q4_K,Q6_K,Q8_0"
# Instructions by the pipes that run them. All other vector instructions run in every pipe.
PIPES = {
    (0, 1): r"vpmultishift|vpdp|vgf2p8|vpmulld|vmulps|vf[n]?m|vptest|vpcmp|vpmovb2m|kmov|vpmadd",
    (1, 2): r"vperm|vpshuf|vpbroadcast\w\s+%(?!zmm|ymm)|vinsert|vextract|vpmov|vshuf",
    (1, 2, 3): r"vpunpck",
    (2, 3): r"vps[rl]|vcvt",
}
MOVES = re.compile(r"vmov|vbroadcast|vpbroadcast\w\s+\S*\(")  # loads, stores and copies take no pipe, unless masked


def mat_mul(name: str, rows: int = 1) -> Kernel:
    """Return a kernel that multiplies a matrix with packed bytes by `rows` vectors, in one pass."""

    def body(f, a, thread, threads) -> None:  # type: ignore[no-untyped-def]
        place = linear.Operands(a.weights, a.x.row, a.y.row, a.scale, a.bias)
        linear.direct_pass(f, a, INTEGER_PANELS[name], place, f.i64(0), rows, f.i64(0), a.panels)

    return kernel(f"ports_{name}_{rows}", linear.LinearArguments, body)


def counted(assembly: str) -> tuple[Counter[tuple[int, ...]], float, int]:
    """Return 512-bit operations by pipes, cycles of vector loads, and products, of the loop over blocks."""
    loops = re.split(r"^\.?\w+:.*$", assembly, flags=re.MULTILINE)
    loop = max(loops, key=lambda text: len(re.findall("vpdpbusd", text)))
    found: Counter[tuple[int, ...]] = Counter()
    loads = 0.0
    for line in loop.splitlines():
        if not re.match(r"\s+[vk]", line):
            continue
        size = 2 if "%zmm" in line or "%k" in line else 1
        if re.search(r"\([^)]*%r", line) and not re.search(r"%[xyz]mm\d+, \S*\(", line):
            loads += 1.0 if size == 2 and "{1to" not in line and "broadcast" not in line else 0.5
        if MOVES.match(line.strip()) and "{%k" not in line:
            continue
        pipes = next((pipes for pipes, names in PIPES.items() if re.match(rf"\s+(?:{names})", line)), (0, 1, 2, 3))
        found[pipes] += size
    return found, loads, len(re.findall("vpdpbusd", loop))


def bound(slots: Counter[tuple[int, ...]], loads: float) -> float:
    """Return the least cycles: no set of pipes runs more than one slot per pipe and cycle."""
    sets = [chosen for size in range(1, 5) for chosen in combinations(range(4), size)]
    busy = (sum(n for pipes, n in slots.items() if set(pipes) <= set(chosen)) / len(chosen) for chosen in sets)
    return max(*busy, loads)


def aligned(size: int) -> NDArray[np.uint8]:
    data = np.zeros(size + 64, np.uint8)
    return data[-data.ctypes.data % 64 :][:size]


def seconds(library: jit.Library, product: Kernel, name: str) -> float:
    panel = INTEGER_PANELS[name]
    library.load([product])
    call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(library.address(product.name))
    weights, x, y = aligned(panel.panel_bytes(COLUMNS) + 8192), aligned(4 * COLUMNS), aligned(64 * PANELS)
    weights[:] = np.random.default_rng(0).integers(0, 64, weights.size)  # finite scales
    x[:] = 0x3F
    arguments = linear.LinearArguments(
        weights=address(weights), blocks=COLUMNS // panel.block_values, panels=PANELS, panel_bytes=0, chunk=PANELS,
        x=Rows(address=address(x), stride=0), y=Output(address=address(y), stride=0), bias=0, counter=address(y),
        scratch=Rows(address=address(y), stride=0), tile_chunk=0, residual=RowsOrNone(address=0, stride=0), scale=1.0,
        rows=address(y),
    ).pack()  # fmt: skip
    times = []
    for _ in range(RUNS):
        start = perf_counter()
        call(address(arguments), 0, 1)
        times.append(perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--gigahertz", type=float, default=3.69)
    parser.add_argument("--out", type=Path, default=RESULTS / "ports.jsonl")
    options = parser.parse_args()
    library = jit.Library(isa.host(), None)
    print("| format | 0-1 | 1-2 | 1-3 | 2-3 | any | loads | bound, cycles | bound | measured | at 8 GB/s |")
    print(f"|---|{'---:|' * 10}")
    for name in options.formats.split(","):
        product = mat_mul(name)
        slots, loads, steps = counted(jit.assembly(product, library.isa))
        cycles = bound(slots, loads) / steps
        rate = PANELS * 16 * COLUMNS / seconds(library, product, name) / 1e9
        panel = INTEGER_PANELS[name]
        roof = CORE_BANDWIDTH / (panel.block_bytes / 16 / panel.block_values) / 1e9
        row = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "format": name,
            "isa": f"{library.isa.cpu}, {library.isa.name}",
            "operations_by_pipes": {"".join(map(str, pipes)): n / 2 / steps for pipes, n in slots.items()},
            "load_cycles": loads / steps,
            "bound_cycles": cycles,
            "bound_gweights_per_s": 64 * options.gigahertz / cycles,
            "measured_gweights_per_s": rate,
            "roof_gweights_per_s": roof,
            "machine": machine(),
        }
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        counts = [f"{slots[pipes] / 2 / steps:.2f}" for pipes in [*PIPES, (0, 1, 2, 3)]]
        limits = [f"{loads / steps:.2f}", f"{cycles:.2f}", f"{64 * options.gigahertz / cycles:.0f}"]
        print(f"| {' | '.join([name, *counts, *limits, f'{rate:.1f}', f'{roof:.1f}'])} |", flush=True)


if __name__ == "__main__":
    main()
