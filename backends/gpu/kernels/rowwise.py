"""Declarations of row-wise kernels: embeddings, norms, rotations, elementwise operations, conversions of rows."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.gpu.kernels.kernel import (
    Buffers,
    ByteIn,
    Expression,
    Factor,
    FloatIn,
    FloatOut,
    IntIn,
    Kernel,
    Macros,
    Shape,
)
from localllm.backends.gpu.references import Fixed

WIDE = 1024  # groups at least this wide get more work-items


@dataclass(frozen=True, slots=True)
class Delivered(Macros):
    """The forms in which a kernel writes its rows: floats, activation blocks for int8 products, or both."""

    HAS_FLOATS: int
    HAS_BLOCKS: int
    BLOCKS_STRIDE: Shape  # words per row


def delivered(floats: bool, block_words: int) -> Delivered:
    """Return the forms to write.

    `block_words` is the number of words of a row of activation blocks, 0 for no blocks.
    """
    return Delivered(int(floats), int(block_words > 0), block_words)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRowsBuffers(Buffers):
    w: ByteIn
    step: IntIn = Fixed.STEP
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRows(Kernel[EmbedRowsBuffers]):
    name, parts, flag = "embed", "rows", "EMBED"
    format: str
    MAX_ROWS: Shape
    K: Shape
    N: Shape
    Y_STRIDE: Shape
    BY_POSITION: bool = False

    @property
    def size(self) -> int:
        return 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRowsBuffers(Buffers):
    x: FloatIn
    weight: FloatIn
    bias: FloatIn
    y: FloatOut
    blocks: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRows(Kernel[NormRowsBuffers]):
    """Normalize rows. A work-group handles a group of K values of a row."""

    name, parts, flag = "norm_rows", "blocks rows", "NORM"
    SIZE: int
    K: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    LAYER: bool
    NORMS: bool = True
    EPS: Factor
    HAS_BIAS: bool
    GROUP_STRIDE: Shape
    delivered: Delivered

    @property
    def size(self) -> int:
        return self.SIZE

    @property
    def local_floats(self) -> int:
        return self.SIZE


def norm_size(width: int) -> int:
    """Return the work-items per group of `NormRows`: wide groups get more, which shortens their sums."""
    return 128 if width < WIDE else 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRowsBuffers(Buffers):
    x: FloatIn
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRows(Kernel[SplitRowsBuffers]):
    """Split activations into TERMS 16-bit floats each, for tensor cores. `format` is the matrix format."""

    name, parts, flag = "split_rows", "rows", "SPLIT"
    format: str
    TERMS: int
    K: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape

    @property
    def local_floats(self) -> int:
        return 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementsBuffers(Buffers):
    a: FloatIn
    b: FloatIn
    y: FloatOut
    blocks: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements(Kernel[ElementsBuffers]):
    """Compute OPERATION(a, b) elementwise. With SLICE, each value of `a` is used for SLICE values of `b`."""

    name, parts, flag = "elements", "blocks elements", "PAIRED"
    OPERATION: Expression
    WIDTH: Shape
    STRIDE: Shape
    delivered: Delivered
    FACTOR: Factor | None = None
    FACTOR1: Factor | None = None
    FACTOR2: Factor | None = None
    FACTOR3: Factor | None = None
    SLICE: Shape | None = None

    @property
    def local_floats(self) -> int:
        return 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectBuffers(Buffers):
    x: FloatIn
    step: IntIn = Fixed.STEP
    y: FloatOut
    blocks: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Select(Kernel[SelectBuffers]):
    name, parts, flag = "select_rows", "blocks elements", "SELECT"
    MAX_ROWS: Shape
    WIDTH: Shape
    STRIDE: Shape
    delivered: Delivered

    @property
    def local_floats(self) -> int:
        return 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateHeadsBuffers(Buffers):
    x: FloatIn
    step: IntIn = Fixed.STEP
    table: FloatIn
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateHeads(Kernel[RotateHeadsBuffers]):
    name, parts, flag = "rotate_heads", "rotate", "ROTATE"
    MAX_ROWS: Shape
    WIDTH: Shape
    STRIDE: Shape
    HEAD: Shape
    N_ROT: Shape
    NEOX: bool
