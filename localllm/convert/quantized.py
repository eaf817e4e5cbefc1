"""Read quantized weights of Hugging Face checkpoints: the scheme from config.json, and the packed integers as matrices.

compressed-tensors (pack-quantized) stores a matrix (rows, columns) as unsigned integers in 32-bit words, the first in
the lowest bits. A weight is (integer - middle - zero point) * scale, where the scale belongs to a group of columns and
middle is 2^(bits-1). mxfp4-pack-quantized stores bytes of two codes each, and scales (rows, columns / 32), like
DeepSeek 4 and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.tensor import U8, LazyTensor

I32 = NDArray[np.int32]

_PACKED, _PACKED_FP4 = "compressed-tensors pack-quantized", "compressed-tensors mxfp4-pack-quantized"
_READABLE = ("fp8", "mxfp4", "compressed-tensors float-quantized", _PACKED, _PACKED_FP4)
_BITS = (2, 4, 8)  # widths that divide a 32-bit word; libraries pack other widths differently
_MAX_SIDE = 1 << 31  # maximum rows or columns of a matrix
_EXPERT = ".experts."  # part of the tensor names of experts


@dataclass(frozen=True, slots=True)
class Packing:
    """The quantization of a checkpoint's weights."""

    fp8_blocks: tuple[int, int] | None = None  # rows and columns of FP8 that share a scale; None: unknown
    schemes: tuple[tuple[int, int], ...] = ()  # packed integers: bits, and columns that share a scale (0: all)
    fp4: bool = False  # packed as MXFP4


def read_packing(config: HfConfig) -> Packing:
    """Read `quantization_config`; raise ConvertError for an unsupported method."""
    packing = config.table("quantization_config")
    method = " ".join(str(packing[key]) for key in ("quant_method", "format") if packing.get(key))
    if method == "bitnet":
        raise ConvertError(
            f"{config.path}: quantization_config is bitnet: transformers rounds what every matrix reads to 8 bits, "
            "which GGUF cannot express; this model cannot be converted"
        )
    if method and method not in _READABLE:
        raise ConvertError(
            f"{config.path}: the weights are already quantized ({printable(method)}); convert the model that they were "
            "made of"
        )
    inner = config.below("quantization_config", packing)
    if method == _PACKED_FP4:
        _check_fp4(inner)
        return Packing(fp4=True)
    return Packing(_fp8_blocks(inner), tuple(_schemes(inner)) if method == _PACKED else ())


def _fp8_blocks(packing: HfConfig) -> tuple[int, int] | None:
    sizes = packing.get("weight_block_size")
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in sizes):
        raise packing.error("weight_block_size", sizes, "rows and columns of a block")
    return sizes[0], sizes[1]


def _weights(packing: HfConfig) -> Iterator[HfConfig]:
    """Return the quantization settings of the weights in each group of matrices."""
    groups = packing.table("config_groups")
    if not groups:
        raise packing.error("config_groups", None, "the bits and the group size of the weights")
    for name, group in groups.items():
        values = group.get("weights") if isinstance(group, dict) else None
        yield packing.below(f"config_groups {printable(name)}", values if isinstance(values, dict) else {})


def _check_fp4(packing: HfConfig) -> None:
    """Require MXFP4's parameters: 4-bit codes, and one scale per 32 codes."""
    for weights in _weights(packing) if packing.get("config_groups") else ():
        for name, expected in (("num_bits", 4), ("type", "float"), ("group_size", 32)):
            if (found := weights.get(name)) != expected:
                raise weights.error(name, found, f"{expected}, as in MXFP4")


def _schemes(packing: HfConfig) -> Iterator[tuple[int, int]]:
    for weights in _weights(packing):
        bits, kind = weights.needed("num_bits"), weights.get("type") or "int"
        if kind != "int" or bits not in _BITS:
            raise weights.error("num_bits", f"{bits} ({printable(str(kind))})", f"int of {_BITS} bits")
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
        if strategy not in ("group", "channel", "tensor"):
            raise weights.error("strategy", strategy, "group, channel or tensor")
        yield bits, weights.needed("group_size") if strategy == "group" else 0


def fp4(codes: LazyTensor, scales: LazyTensor, name: str) -> LazyTensor:
    """Return a matrix: MXFP4 for an expert, F32 for other matrices, whose rows and columns may be reordered later."""
    matrix = t.renamed(t.mxfp4(codes, scales), name)
    return matrix if _EXPERT in name else t.expanded(matrix)


def unpack_quantized(
    take: Callable[[str], LazyTensor | None], base: str, schemes: tuple[tuple[int, int], ...]
) -> LazyTensor:
    """Return the matrix `base`.weight as F32. `take` removes and returns a tensor by name, or None.

    Raises ConvertError if a part is missing or the parts do not match.
    """
    words, scales, sides = (part_of(take, base, part) for part in ("packed", "scale", "shape"))
    rows, columns = _sides(sides)
    scales = t.as_float32(scales)
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    one = scales.shape == (1,)  # one scale for the whole matrix
    fitting = [
        (bits, size or columns)
        for bits, size in schemes
        if words.shape == (rows, -(-columns * bits // 32)) and -(-columns // (size or columns)) == groups
    ]
    if words.format != "I32" or not fitting or not (one or scales.shape in ((rows, groups), (rows,))):
        raise ConvertError(
            f"{printable(words.name)}: {words.format} {words.shape} with scales {scales.shape} is not a matrix of "
            f"({rows}, {columns}) with the bits and group sizes of config.json: {schemes}"
        )
    bits, size = fitting[0]
    group_of = _order(take(f"{base}.weight_g_idx"), columns, groups, size)
    zeros = take(f"{base}.weight_zero_point")
    if zeros is not None and (zeros.format, zeros.shape) != ("I32", (-(-rows * bits // 32), groups)):
        raise ConvertError(f"{printable(zeros.name)}: {zeros.format} {zeros.shape} does not fit scales {scales.shape}")
    middle = 1 << (bits - 1)

    def read(start: int, stop: int) -> U8:
        codes = _integers(words.read(start, stop), bits)[:, :columns] - middle
        if zeros is not None:
            codes -= _zero_points(zeros, bits, start, stop)[:, group_of] - middle
        factors = scales.read(0, 1) if one else _rows(scales, start, stop)
        by_group = factors.view(np.float32).reshape(-1, groups)
        numbers = codes.astype(np.float32) * by_group[:, group_of]
        return np.ascontiguousarray(numbers, np.float32).view(np.uint8)

    return LazyTensor(f"{base}.weight", "F32", (rows, columns), 4 * columns, read)


def _rows(scales: LazyTensor, start: int, stop: int) -> U8:
    """Return the scales of some rows. A vector with one scale per row is stored as a single row."""
    if len(scales.shape) == 2:
        return scales.read(start, stop)
    return scales.read(0, 1).reshape(-1, 4)[start:stop]


def part_of(take: Callable[[str], LazyTensor | None], base: str, part: str) -> LazyTensor:
    """Take a part of the packed matrix `base`.weight; raise ConvertError if it is missing."""
    tensor = take(f"{base}.weight_{part}")
    if tensor is None:
        raise ConvertError(f"tensor '{printable(base)}.weight_{part}' is missing; download the model again")
    return tensor


def _sides(shape: LazyTensor) -> tuple[int, int]:
    """Return rows and columns from a tensor of two integers."""
    kinds: dict[str, Any] = {"I64": np.int64, "I32": np.int32}
    sides = shape.read(0, 1).view(kinds[shape.format])[0].tolist() if shape.format in kinds else []
    if len(sides) != 2 or len(shape.shape) != 1 or not all(0 < side < _MAX_SIDE for side in sides):
        raise ConvertError(f"{printable(shape.name)}: is {shape.format} {shape.shape}; expected rows and columns")
    return sides[0], sides[1]


def _order(index: LazyTensor | None, columns: int, groups: int, size: int) -> NDArray[np.int64]:
    """Return the group of each column: from the file's index, else (or if it contains -1) consecutive columns."""
    neighbours: NDArray[np.int64] = np.arange(columns) // size
    if index is None:
        return neighbours
    if (index.format, index.shape) != ("I32", (columns,)):
        raise ConvertError(f"{printable(index.name)}: is {index.format} {index.shape}; expected I32 ({columns},)")
    told: NDArray[np.int64] = index.read(0, 1).view(np.int32)[0].astype(np.int64)
    if (told == -1).any():
        return neighbours
    if told.min() < 0 or told.max() >= groups:
        raise ConvertError(f"{printable(index.name)}: names groups outside of 0 to {groups - 1}")
    return told


def _integers(words: U8, bits: int) -> I32:
    """Unpack rows of words to rows of unsigned integers."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    parts = words.view("<u4")[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return parts.reshape(len(words), -1).astype(np.int32)


def _zero_points(zeros: LazyTensor, bits: int, start: int, stop: int) -> I32:
    """Return the zero points (rows, groups) of some rows. Zero points of consecutive rows are packed into one word."""
    each = 32 // bits
    first = start // each
    words = zeros.read(first, -(-stop // each)).view("<u4")
    numbers = _integers(np.ascontiguousarray(words.T).view(np.uint8), bits).T  # (rows of the words, groups)
    return numbers[start - first * each : stop - first * each]
