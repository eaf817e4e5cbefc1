"""The kernels by name: which source files they are made of, their work-groups, their local memory, their constants.

A `Kernel` is all that decides what is compiled; equal ones are compiled once. Sources stand in `kernels/*.cl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError, Limits
from localllm.backends.gpu import formats

COLUMNS = 8  # activation rows of one work-group of the mat-vec, where there are several
PARTITION = 256  # positions of one work-group of attention
GROUPED = 8  # query heads of it
TILE_ROWS = 32  # rows of a tile of prefill's attention
FEW_ROWS = 16  # rows up to which sums have an order that depends on nothing else in the batch
# Values of a head at most -> rows and keys of a work-group of prefill's attention, so that it stays within 48 KiB of
# local memory, and every how many dimensions its work-items have.
TILES = {64: (32, 64, 4), 128: (32, 32, 8), 192: (16, 32, 12), 256: (16, 16, 16), 512: (8, 8, 32)}
HEADER = 8  # ints before the rows in the step buffer
WIDE = 1024  # numbers of a group of a row from which on more work-items norm it
SORTED = 4096  # logits that a work-group of the search for the largest sorts

# What differs from model to model and may be given at run time: widths, strides, counts, factors.
_NAMES = """K N N1 N2 X_STRIDE Y_STRIDE RESIDUAL_STRIDE GROUP_STRIDE STRIDE Q_STRIDE WIDTH HEAD HEADS KV_HEADS N_ROT
    WINDOW SOFTCAP PARTITIONS MAX_ROWS COUNT_AT FACTOR FACTOR1 FACTOR2 EPS EXPERTS USED PER_ROW SLOTS_AT
    TABLE_STRIDE_AT PASS PAIRS ROTATION KEY_TYPE KEY_SIZE KEY_WORDS KEY_BYTES VALUE_TYPE VALUE_SIZE
    VALUE_WORDS VALUE_BYTES BLOCKS_STRIDE"""
SHAPE = frozenset(_NAMES.split())


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of activations and of the matrix that a work-group multiplies."""

    x: int
    w: int


PLAIN_TILE = Tile(32, 64)  # of matmul


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    parts: tuple[str, ...]  # source files after the prelude
    constants: tuple[tuple[str, object], ...]
    size: int  # work-items of a group
    local_bytes: int = 0
    format: str = ""

    def shape(self) -> list[tuple[str, int | float]]:
        """The constants that a generic kernel is given at run time."""
        return [(name, v) for name, v in self.constants if name in SHAPE and isinstance(v, int | float)]

    def numbers(self) -> NDArray[np.int32]:
        """Their values as 4 bytes each."""
        values = [int(np.float32(v).view(np.int32)) if isinstance(v, float) else int(v) for _, v in self.shape()]
        return np.array(values or [0], np.int32)

    def source(self, generic: bool) -> str:
        """All of it, constants first."""
        given = {
            name: f"AS_FLOAT(shape[{i}])" if isinstance(value, float) else f"shape[{i}]"
            for i, (name, value) in enumerate(self.shape() if generic else [])
        }
        head = "#define GENERIC 1\n" * generic
        head += "".join(f"#define {name} {given.get(name, _literal(value))}\n" for name, value in self.constants)
        names = ("prelude", *(("unpack" if self.quantized else "plain",) if self.format else ()), *self.parts)
        table = formats.tables(self.format)
        return head + _text(names[0]) + table + "".join(_text(name) for name in names[1:])

    @property
    def quantized(self) -> bool:
        return self.format in formats.QUANTIZED


@cache
def _text(name: str) -> str:
    return (files("localllm.backends.gpu") / "kernels" / f"{name}.cl").read_text(encoding="utf-8")


def _literal(value: object) -> str:
    if isinstance(value, float):
        return f"({value:.9e}f)"
    return str(int(value)) if isinstance(value, bool) else str(value)


def _kernel(
    name: str, parts: str, constants: Mapping[str, Any], size: int, local_floats: int = 0, format: str = ""
) -> Kernel:
    every = {**(formats.defines(format) if format else {}), **constants}
    return Kernel(name, tuple(parts.split()), tuple(every.items()), size, 4 * local_floats, format)


def matvec(format: str, columns: int, constants: Mapping[str, Any]) -> Kernel:
    every = {"MATVEC": 1, "COLUMNS": columns, "MATRICES": 1, **constants}
    return _kernel("matvec", "linear", every, 128, 128, format)


def together(format: str, columns: int, constants: Mapping[str, Any]) -> Kernel:
    """The mat-vecs of two or three matrices."""
    every = {"TOGETHER": 1, "COLUMNS": columns, "MATRICES": 1, **constants}
    return _kernel("matvec_together", "linear together", every, 128, 128, format)


def gated(format: str, columns: int, operation: str, constants: Mapping[str, Any]) -> Kernel:
    """The mat-vecs of two matrices and OPERATION(a, b) of their results. A work-group makes 32 of these, with as many
    items as still leave room for a second one beside it: sums of several columns take registers."""
    size = 512 if columns == 1 else 256
    every = {
        "GATED": 1, "COLUMNS": columns, "MATRICES": 2, "SIZE": size, "OPERATION(a, b)": f"({operation})", **constants
    }  # fmt: skip
    return _kernel("matvec_gated", "blocks linear together", every, size, size + 32 * columns, format)


def matmul(format: str, constants: Mapping[str, Any]) -> Kernel:
    depth, more = (8, 64 * 4 + 32 * 3) if format in formats.QUANTIZED else (16, 0)
    return _kernel("matmul", "linear", {"MATMUL": 1, **constants}, 128, (64 + 32) * (depth + 1) + more, format)


def tensor(format: str, tile: Tile, terms: int, constants: Mapping[str, Any]) -> Kernel:
    """A tile on NVIDIA's tensor cores; `terms`: see products.terms."""
    numbers = 2 * 16 * (tile.w + max(terms, 1) * tile.x)  # two steps of 64 bytes of a row
    if packing := formats.QUANTIZED.get(format):
        scales, sums = packing.halves * (1 + packing.minimum), 1 + packing.halves * packing.minimum
        numbers += 2 * 2 * (scales * tile.w + sums * tile.x)
    aligned = next(size for size in (16, 8, 4) if 4 * constants["X_STRIDE"] % size == 0)
    every = {"TILE_X": tile.x, "TILE_W": tile.w, "COPY": aligned, "TERMS": max(terms, 1), **constants}
    if tile == PLAIN_TILE:  # the compiler aims at eight or more, and would keep sums in memory for it
        every["GROUPS"] = 6
    return _kernel("tensor", "instructions linear tensor", every, 2 * tile.w, numbers, format)


def delivered(floats: bool, block_words: int) -> dict[str, int]:
    """What a kernel that makes rows is told of who reads them: `block_words` of activation blocks a row, 0 for none."""
    return {"HAS_FLOATS": int(floats), "HAS_BLOCKS": int(block_words > 0), "BLOCKS_STRIDE": block_words}


def split(format: str, terms: int, constants: Mapping[str, Any]) -> Kernel:
    """Rows of activations as numbers of 16 bits for the tensor cores."""
    return _kernel("split_rows", "rows", {"SPLIT": 1, "TERMS": terms, **constants}, 128, 128, format)


def embed(format: str, limits: Limits, constants: Mapping[str, Any]) -> Kernel:
    return _kernel("embed", "rows", {"EMBED": 1, "MAX_ROWS": limits.rows, **constants}, 64, 0, format)


def norm(constants: Mapping[str, Any]) -> Kernel:
    """A work-group has a group of a row: of so many items that one of a wide row still ends soon."""
    size = 128 if constants["K"] < WIDE else 512
    return _kernel("norm_rows", "blocks rows", {"NORM": 1, "SIZE": size, **constants}, size, size)


def elements(operation: str, constants: Mapping[str, Any]) -> Kernel:
    every = {"PAIRED": 1, "OPERATION(a, b)": f"({operation})", **constants}
    return _kernel("elements", "blocks elements", every, 128, 128)


def select_rows(limits: Limits, constants: Mapping[str, Any]) -> Kernel:
    return _kernel("select_rows", "blocks elements", {"SELECT": 1, "MAX_ROWS": limits.rows, **constants}, 128, 128)


def largest(number: int, constants: Mapping[str, Any]) -> Kernel:
    """Pass `number` of the search for the largest logits."""
    return _kernel("largest", "largest", {"PASS": number, "SORTED": SORTED, **constants}, 256, 2 * SORTED)


def rotate(limits: Limits, constants: Mapping[str, Any]) -> Kernel:
    return _kernel("rotate_heads", "rotate", {"ROTATE": 1, "MAX_ROWS": limits.rows, **constants}, 128)


def append(limits: Limits, constants: Mapping[str, Any]) -> Kernel:
    """`constants` hold those of the cache, as of `cachetypes.constants`, and ROTATED."""
    every = {"APPEND": 1, "MAX_ROWS": limits.rows, **constants}
    parts = "rotate blocks cache" if constants["ROTATED"] else "blocks cache"
    return _kernel("append", parts, every, 128, 128 + max(constants["KEY_SIZE"], constants["VALUE_SIZE"]))


def prepare_queries(constants: Mapping[str, Any]) -> Kernel:
    """For keys in blocks; `constants` hold those of the cache."""
    return _kernel("prepare_queries", "blocks cache", {"PREPARE": 1, **constants}, 128, 128 + constants["KEY_SIZE"])


def grouped(group: int) -> int:
    """Query heads of a work-group, a power of two, where `group` share a key-value head."""
    return min(1 << (group - 1).bit_length(), GROUPED)


def tile(constants: Mapping[str, Any]) -> tuple[int, int, int]:
    """The row of TILES for a layer's cache."""
    size = max(constants["KEY_SIZE"], constants["VALUE_SIZE"])
    found = next((row for most, row in TILES.items() if size <= most), None)
    if found is None:
        raise BackendError(f"heads of {size} values do not fit on the GPU, at most {max(TILES)} do; use --backend cpu")
    return found


def attention(stage: str, limits: Limits, constants: Mapping[str, Any]) -> Kernel:
    """`stage`: attend_partition, attend_combine or attend_tile; `constants` hold those of the cache."""
    together = grouped(constants["HEADS"] // constants["KV_HEADS"])
    every: dict[str, Any] = {
        f"STAGE_{stage}": 1, "MAX_ROWS": limits.rows, "PARTITION": PARTITION, "PARTITIONS": partitions(limits),
        "GROUPED": together, **constants,
    }  # fmt: skip
    size = max(constants["KEY_SIZE"], constants["VALUE_SIZE"])
    rows, keys, dimensions = tile(constants)
    if stage == "attend_tile":
        every |= {"TILE_ROWS": TILE_ROWS, "OWN_ROWS": rows, "TILE_KEYS": keys, "DIMENSIONS_EACH": dimensions}
    local = {
        "attend_partition": 128 + together * (PARTITION + size),
        "attend_combine": 128 + size,
        "attend_tile": 128 + (rows + keys) * (size + 1) + rows * (keys + 4),
    }[stage]
    return _kernel(stage, "blocks cache attention", every, 128, local)


def partitions(limits: Limits) -> int:
    return -(-limits.positions // PARTITION)


def route(experts: int, used: int, constants: Mapping[str, Any]) -> Kernel:
    every = {"ROUTE": 1, "EXPERTS": experts, "USED": used, **constants}
    return _kernel("route", "experts", every, 128, 2 * experts + 256 + used)


def group_pairs(experts: int, constants: Mapping[str, Any]) -> Kernel:
    every = {"GROUP_PAIRS": 1, "EXPERTS": experts, **constants}
    return _kernel("group_pairs", "experts", every, 128, experts)


def combine(constants: Mapping[str, Any]) -> Kernel:
    return _kernel("combine", "experts", {"COMBINE": 1, **constants}, 128)
