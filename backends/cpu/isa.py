"""The instruction sets, one table row each, and the choice of an instruction set for this machine or by name.

A row defines how LLVM generates code, how four int8 products are summed, and the size of register tiles in the mat-mul.
Results are bitwise identical on all instruction sets, with one exception: AVX512-BF16 treats values below 2^-126 as
zero in products with BF16 weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

Dot = Literal["vnni512", "vnni256", "maddubs", "sdot", "plain"]


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How a product of few rows prefetches packed weights."""

    distance: int  # bytes; 0 disables prefetching
    level: int = 1  # level of the cache that receives the lines
    rows: int = 1  # the fewest rows of a pass that prefetches
    dense: tuple[int, int] = (1, 1)  # the fewest rows that prefetch all lines of values below one byte, and of others
    sparse: int = 0  # with fewer rows, one of this number of lines is prefetched; 0: none
    without: tuple[str, ...] = ()  # formats that prefetch nothing

    def every(self, value_bytes: float, rows: int, name: str = "") -> int:
        """Return n if a pass of `rows` over weights with `value_bytes` per value prefetches each n-th line, or 0."""
        if not self.distance or rows < self.rows or name in self.without:
            return 0
        return 1 if rows >= self.dense[value_bytes >= 1] else self.sparse


@dataclass(frozen=True, slots=True)
class Isa:
    """A target of code generation."""

    name: str
    cpu: str  # LLVM's processor name
    features: str  # LLVM's feature string
    triple: str  # LLVM's target triple; "" for this machine
    dot: Dot
    half_conversion: bool  # float16 <-> float32 in hardware
    pause: str  # LLVM intrinsic of the spin-wait hint; "" without one
    int_tile: tuple[int, int]  # tokens x panels held in registers by the integer mat-mul
    float_tile: tuple[int, int]
    query_rows: int  # query rows that share one read of the keys in attention
    read_ahead: ReadAhead = ReadAhead(0)
    direct_rows: int = 8  # up to this number of rows, products use packed weights, unless the format says otherwise

    @property
    def registers(self) -> int:
        """Number of vector registers, of any width."""
        return 32 if self.dot in ("vnni512", "sdot") else 16

    @property
    def direct_tile(self) -> int:
        """Maximum rows per pass over packed weights."""
        return 8 if self.dot == "vnni512" else min(self.int_tile[0], 3)

    @property
    def super_tile(self) -> tuple[int, int]:
        """The `int_tile` of formats that are summed in integers. Their float32 sums stay in memory."""
        return (3, 1) if self.dot == "maddubs" else self.int_tile

    @property
    def byte_permute(self) -> bool:
        """Whether bytes can be permuted across a 512-bit register and shifted by individual bit counts (VBMI)."""
        return self.dot == "vnni512" and "+avx512vbmi," in self.features + ","

    @property
    def bfloat_dot(self) -> bool:
        """Whether one instruction multiplies pairs of BF16 values and adds the products to float32 (AVX512-BF16)."""
        return self.dot == "vnni512" and "+avx512bf16," in self.features + ","

    @property
    def bfloat_tile(self) -> tuple[int, int]:
        """The `float_tile` of BF16 weights."""
        return (6, 2) if self.bfloat_dot else self.float_tile

    @property
    def biased_needs_offset(self) -> bool:
        """Whether the caller must subtract 128 * sum(x) from a dot product of bytes stored as q + 128."""
        return self.dot in ("vnni512", "vnni256")


X86_PAUSE = "llvm.x86.sse2.pause"

# name: (required features, dot, tile of the integer mat-mul, tile of the float mat-mul, query rows)
X86_ROWS: dict[str, tuple[tuple[str, ...], Dot, tuple[int, int], tuple[int, int], int]] = {
    "avx512-vnni": (("avx512f", "avx512bw", "avx512vl", "avx512vnni", "fma", "f16c"), "vnni512", (6, 2), (8, 1), 8),
    "avx-vnni": (("avx2", "avxvnni", "fma", "f16c"), "vnni256", (3, 1), (3, 1), 4),
    "avx2": (("avx2", "fma", "f16c"), "maddubs", (2, 1), (3, 1), 4),
}


def _parse(features: str) -> dict[str, bool]:
    return {part[1:]: part[0] == "+" for part in features.split(",") if part[:1] in "+-" and len(part) > 1}


def _flatten(features: dict[str, bool]) -> str:
    return ",".join(("+" if on else "-") + name for name, on in sorted(features.items()))


# Share of the memory bandwidth reached in Q4_K decode: Cascade Lake 0.87 with prefetch, 0.69 without; Zen 4 0.82 with,
# 0.98 without. AMD's hardware prefetcher follows the panels better than explicit prefetches, which occupy its few miss
# buffers. That changes with more rows: they fill the reorder buffer, so loads no longer run ahead, and a pass of 4 rows
# of Q4_K takes 1.7 times as long without prefetches. Into L1, they would gain only half of that. All lines are worth a
# prefetch from 3 rows on, and from 5 with 8.5 bits. Fewer rows gain by one line of nine, which seems to keep the
# hardware prefetcher on the stream: 2 rows of Q4_0 take 1.08 of one row (all lines: 1.45, none: 1.11), of Q4_K 0.94
# (1.22, 0.99), 2 and 4 rows of Q8_0 1.02 and 1.24 (none: 1.08 and 1.29).
#
# With AVX2, a pass has at most 2 rows, and prefetches of all lines gain: 8 rows of Q8_0 take 39 ms instead of 51, of
# Q5_0 34 instead of 38, of Q4_0 26.3 instead of 28.0, of Q4_K 50.0 instead of 51.3. 8 rows of Q6_K take 61.7 instead of
# 51.8, and 2 rows 22.7 instead of 14.8, at any distance and with half of the lines. One line of nine gains nothing.
ZEN, READ_AHEAD = "znver", ReadAhead(4608)
ZEN_READ_AHEAD, ZEN_AVX2 = ReadAhead(9216, 2, 2, (3, 5), 9), ReadAhead(9216, 2, 2, without=("Q6_K",))
# On Zen 4, packed products are faster up to 16 rows. A step of 16 rows of a 1B model takes 108 ms with packed and 141
# ms with unpacked products in Q4_K_M (Q4_0: 99 and 115 ms), a step of 9 rows 80 and 125 ms (Q4_0: 58 and 94 ms).
# Emerald Rapids unpacks faster: 16 rows take 105 ms, and twice 8 rows would take 130 ms.
ZEN_DIRECT_ROWS = 16


def for_cpu(cpu: str, features: dict[str, bool], machine: str) -> Isa:
    """Return the best instruction set for LLVM's processor name `cpu`, its features, and a `machine` such as x86_64."""
    if machine in ("aarch64", "arm64"):
        # macOS reports no features. All Apple M processors have dotprod.
        dot: Dot = "sdot" if features.get("dotprod") or cpu.startswith("apple-m") else "plain"
        name = "arm-dotprod" if dot == "sdot" else "arm"
        return Isa(name, cpu, _flatten(features), "", dot, True, "", (4, 1), (4, 1), 4)
    if machine in ("x86_64", "AMD64"):
        for name, (needed, dot, int_tile, float_tile, rows) in X86_ROWS.items():
            if all(features.get(feature) for feature in needed):
                zen, shape = cpu.startswith(ZEN), (int_tile, float_tile, rows)
                flags, direct, ahead = features, 8, ZEN_AVX2 if zen else READ_AHEAD
                if dot == "vnni512":
                    # Without this feature flag, LLVM splits 512-bit values in two on processors that lower their clock
                    # for AVX-512.
                    flags = flags | {"prefer-256-bit": False}
                    if zen:  # with GFNI, LLVM shifts bytes by an instruction of the two pipes that products need
                        flags, direct, ahead = flags | {"gfni": False}, ZEN_DIRECT_ROWS, ZEN_READ_AHEAD
                return Isa(name, cpu, _flatten(flags), "", dot, True, X86_PAUSE, *shape, ahead, direct)
        return Isa("generic", cpu, _flatten(features), "", "plain", False, X86_PAUSE, (2, 1), (2, 1), 4)
    return Isa("generic", cpu, _flatten(features), "", "plain", False, "", (2, 1), (2, 1), 4)


def isa_named(name: str) -> Isa:
    """Return an instruction set by name, on any machine, to run or inspect the code of a smaller instruction set."""
    row = X86_ROWS.get(name)
    if row is not None:
        cpu = {"avx512-vnni": "cascadelake", "avx-vnni": "alderlake", "avx2": "haswell"}[name]
        return for_cpu(cpu, dict.fromkeys(row[0], True), "x86_64")
    if name == "arm-dotprod":
        features = {"dotprod": True, "neon": True, "fullfp16": True}
        isa = for_cpu("neoverse-n1", features, "aarch64")
        return Isa(**{**{f: getattr(isa, f) for f in isa.__slots__}, "triple": "aarch64-unknown-linux-gnu"})
    if name == "generic":
        return for_cpu("x86-64", {}, "x86_64")
    raise ValueError(f"unknown instruction set '{name}'; known: {', '.join(X86_ROWS)}, arm-dotprod, generic")


def host() -> Isa:
    """Return the instruction set of this machine.

    As in Numba, NUMBA_CPU_NAME and NUMBA_CPU_FEATURES override LLVM's detection.
    """
    import platform

    import llvmlite.binding as llvm

    cpu = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    given = os.environ.get("NUMBA_CPU_FEATURES")
    if given is not None:
        features = _parse(given)
    elif "NUMBA_CPU_NAME" in os.environ:
        features = dict.fromkeys(KNOWN_CPUS.get(cpu, ()), True)
    else:
        try:
            features = dict(llvm.get_host_cpu_features())
        except RuntimeError:  # LLVM cannot detect features on this system
            features = {}
    return for_cpu(cpu, features, platform.machine())


# The features assumed if NUMBA_CPU_NAME is set without features.
KNOWN_CPUS: dict[str, tuple[str, ...]] = {
    "generic": (),
    "x86-64": (),
    "haswell": X86_ROWS["avx2"][0],
    "skylake": X86_ROWS["avx2"][0],
    "znver3": X86_ROWS["avx2"][0],
    "alderlake": X86_ROWS["avx-vnni"][0],
    "cascadelake": X86_ROWS["avx512-vnni"][0],
    "znver4": X86_ROWS["avx512-vnni"][0],
}
