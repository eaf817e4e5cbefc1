"""Declarations of row-wise kernels: embeddings, norms, rotations, elementwise operations, columns, conversions."""

from __future__ import annotations

from localllm.backends.gpu.kernels.kernel import Expression, Factor, Flag, Kernel, Macros, Shape

WIDE = 1024  # groups at least this wide get more work-items


class Delivered(Macros):
    """The forms in which a kernel writes its rows: floats, activation blocks for int8 products, or both."""

    HAS_FLOATS: int
    HAS_BLOCKS: int
    BLOCKS_STRIDE: Shape  # words per row


def delivered(floats: bool, block_words: int) -> Delivered:
    """Return the forms to write.

    `block_words` is the number of words of a row of activation blocks, 0 for no blocks.
    """
    return Delivered(HAS_FLOATS=int(floats), HAS_BLOCKS=int(block_words > 0), BLOCKS_STRIDE=block_words)


class EmbedRows(Kernel):
    name, parts = "embed", "rows"
    format: str
    MAX_ROWS: Shape
    K: Shape
    N: Shape
    Y_STRIDE: Shape
    BY_POSITION: bool = False


class NormRows(Kernel):
    """Normalize rows. A work-group handles a group of K values of a row."""

    name, parts = "norm_rows", "blocks rows"
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


def norm_size(width: int) -> int:
    """Return the work-items per group of `NormRows`: wide groups get more, which shortens their sums."""
    return 128 if width < WIDE else 512


class SplitRows(Kernel):
    """Split activations into TERMS 16-bit floats each, for tensor cores. `format` is the matrix format."""

    name, parts = "split_rows", "rows"
    format: str
    TERMS: int
    K: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape


class Elements(Kernel):
    """Compute OPERATION(a, b) elementwise. With SLICE, each value of `a` is used for SLICE values of `b`."""

    name, parts = "elements", "blocks elements"
    OPERATION: Expression
    WIDTH: Shape
    STRIDE: Shape
    delivered: Delivered
    FACTOR: Factor | None = None
    FACTOR1: Factor | None = None
    FACTOR2: Factor | None = None
    FACTOR3: Factor | None = None
    SLICE: Shape | None = None


class Select(Kernel):
    name, parts = "select_rows", "blocks elements"
    MAX_ROWS: Shape
    WIDTH: Shape
    STRIDE: Shape
    delivered: Delivered


class SpliceRows(Kernel):
    """Replace the rows of media tokens by columns of their embeddings, or add these with ADD."""

    name, parts = "splice_rows", "blocks media"
    MAX_ROWS: Shape
    WIDTH: Shape
    STRIDE: Shape
    MEDIA_STRIDE: Shape
    START: Shape
    ADD: Flag
    delivered: Delivered


class RotateHeads(Kernel):
    name, parts = "rotate_heads", "rotate"
    MAX_ROWS: Shape
    WIDTH: Shape
    STRIDE: Shape
    HEAD: Shape
    N_ROT: Shape
    NEOX: bool
    AXES: bool | None = None


class SliceColumns(Kernel):
    """Copy TAKEN values from START on out of every GROUP values of a row."""

    name, parts = "columns", "blocks columns"
    WIDTH: Shape
    X_STRIDE: Shape
    GROUP: Shape
    START: Shape
    TAKEN: Shape
    delivered: Delivered


class ConcatColumns(Kernel):
    """Interleave OF_A values of a row of a with OF_B values of a row of b."""

    name, parts = "join_columns", "blocks columns"
    WIDTH: Shape
    A_STRIDE: Shape
    B_STRIDE: Shape
    OF_A: Shape
    OF_B: Shape
    delivered: Delivered
