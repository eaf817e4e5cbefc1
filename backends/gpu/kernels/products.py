"""Declarations of matrix product kernels, and the choice of kernel by format and number of activation rows.

  1 row              matvec, a segment of 32 work-items per row of the matrix
  to FEW_ROWS        matvec over COLUMNS rows of activations at a time
  to SOME_ROWS       tiles of TILES[-1] on tensor cores, so that small prompts still fill a GPU; else matmul
  more               the largest tile on tensor cores that fills a GPU; else matmul, 64 x 32 by dp4a or float32

The int8 formats use the same activations and the same summation order in every tile. On tensor cores, F16 and BF16
round activations to 11 and to 16 bits (see SPLIT in rows.cl). F32 stays float32 and uses matmul.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.gpu.formats import QUANTIZED
from localllm.backends.gpu.kernels.kernel import Expression, Factor, Kernel, Macros, Shape
from localllm.backends.gpu.kernels.rowwise import Delivered

COLUMNS = 8  # activation rows per work-group of the mat-vec, if there are several rows
SOME_ROWS = 64
FULL = 128  # number of work-groups that fills a GPU: an RTX 4090 has 128 multiprocessors, an H100 132


@dataclass(frozen=True, slots=True)
class Tile:
    """The number of activation rows and the number of matrix rows that a work-group multiplies."""

    x: int
    w: int


PLAIN_TILE = Tile(32, 64)  # tile of the matmul kernel
TILES = (Tile(128, 128), Tile(64, 128), Tile(64, 64))
EXPERTS_TILE = PLAIN_TILE  # small, because few rows select the same expert

# Format -> the first compute type whose tensor cores support its product (on sm_75, in instructions of half the size),
# and the number of 16-bit terms per activation. F32 is missing, because its product would be less precise.
TENSOR = {**dict.fromkeys(QUANTIZED, (75, 0)), "F16": (75, 1), "BF16": (80, 2)}


def block_words(width: int) -> int:
    """Return the words of a row of activation blocks: int8 values, a scale per 32 values, and a sum per 16 values."""
    return width * 11 // 32


def terms(format: str, width: int, compute: str) -> int | None:
    """Return the form of activations that the tensor cores of a compute type ("sm_90") need.

    0 means int8 blocks; a positive number is the count of 16-bit terms. The result is None if tensor cores do not
    multiply matrices of this format and width.
    """
    least, found = TENSOR.get(format, (None, 0))
    if least is None or not compute.startswith("sm_") or int(compute[3:]) < least or width % 16:
        return None
    return found


def tiles_of(format: str) -> tuple[Tile, ...]:
    """Return the tensor-core tiles, largest first.

    If a format has two scales per 32 values, 128 x 128 would leave no registers for a second work-group.
    """
    packing = QUANTIZED.get(format)
    return TILES[1:] if packing is not None and packing.halves == 2 else TILES


def tile_of(format: str, n: int, rows: int, heads: int = 1) -> Tile:
    """Return the largest tile that fills a GPU with products of `n` matrix rows and `rows` activation rows."""
    tiles = tiles_of(format)
    return next((tile for tile in tiles if heads * -(-n // tile.w) * -(-rows // tile.x) >= FULL), tiles[-1])


def grouped(rows: int, used: int, experts: int) -> bool:
    """Return whether rows are gathered into tiles by expert: this needs one row per expert on average."""
    return rows * used >= experts


# -- one matrix --------------------------------------------------------------------------------------------------------


class Pairs(Macros):
    """Pairs of a row and one of its experts, at most PAIRS. PER_ROW pairs read the same input row."""

    EXPERTS: Shape
    PER_ROW: Shape
    HAS_SCALES: bool
    PAIRS: Shape


class Heads(Macros):
    """Each head's slice of a row, X_HEAD elements, is multiplied by the head's matrix."""

    HEADS: Shape
    X_HEAD: Shape


class Product(Macros):
    """The shape of y = (x @ w.T) * FACTOR + bias + residual, for one matrix, one per expert or one per head.

    COUNT_AT is the offset of the row count in the step buffer. Kernels for several matrices of a format have no
    Y_STRIDE and no residual.
    """

    K: Shape
    N: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape | None
    RESIDUAL_STRIDE: Shape
    FACTOR: Factor
    COUNT_AT: Shape
    HAS_BIAS: bool
    HAS_RESIDUAL: bool | None
    pairs: Pairs | None = None
    heads: Heads | None = None


class Matvec(Kernel):
    """Multiply rows of a matrix by COLUMNS rows of activations at a time."""

    name, parts = "matvec", "linear"
    format: str
    COLUMNS: int
    MATRICES: int = 1
    product: Product


class Matmul(Kernel):
    """Multiply a PLAIN_TILE with dp4a or in float32."""

    name, parts = "matmul", "linear"
    format: str
    product: Product

    @property
    def local_floats(self) -> int:
        depth, more = (8, 64 * 4 + 32 * 3) if self.format in QUANTIZED else (16, 0)
        return (64 + 32) * (depth + 1) + more


class TensorCoreMatmul(Kernel):
    """Multiply a tile on NVIDIA's tensor cores. COPY is the number of bytes per copy; `terms` explains TERMS."""

    name, parts = "tensor", "instructions linear tensor"
    format: str
    TILE_X: int
    TILE_W: int
    COPY: int
    TERMS: int
    product: Product
    GROUPS: int | None = None

    @property
    def size(self) -> int:
        return 2 * self.TILE_W

    @property
    def local_floats(self) -> int:
        numbers = 2 * 16 * (self.TILE_W + self.TERMS * self.TILE_X)  # two steps of 64 bytes per row
        if packing := QUANTIZED.get(self.format):
            scales, sums = packing.halves * (1 + packing.minimum), 1 + packing.halves * packing.minimum
            numbers += 2 * 2 * (scales * self.TILE_W + sums * self.TILE_X)
        return numbers


def tensor(format: str, tile: Tile, terms: int, product: Product) -> TensorCoreMatmul:
    """Return the tensor-core kernel for a tile. `terms` is a result of the function `terms`."""
    step = product.heads.X_HEAD if product.heads else product.X_STRIDE
    aligned = next(size for size in (16, 8, 4) if 4 * step % size == 0)
    groups = 6 if tile == PLAIN_TILE else None  # the compiler would aim at eight or more, and keep sums in memory
    return TensorCoreMatmul(
        format=format, TILE_X=tile.x, TILE_W=tile.w, COPY=aligned, TERMS=max(terms, 1), product=product, GROUPS=groups
    )


def tile_kernel(format: str, rows: int, product: Product, compute: str) -> tuple[Matmul | TensorCoreMatmul, Tile]:
    """Return the kernel for a product with at most `rows` rows of activations, and its tile."""
    found = terms(format, product.K, compute)
    if found is None:
        return Matmul(format=format, product=product), PLAIN_TILE
    heads = product.heads.HEADS if product.heads else 1
    tile = EXPERTS_TILE if product.pairs else tile_of(format, product.N, rows, heads)
    return tensor(format, tile, found, product), tile


# -- several matrices of one format ------------------------------------------------------------------------------------


class MatvecTogether(Kernel):
    """Compute the mat-vecs of two or three matrices with N, N1 and N2 rows in one launch."""

    name, parts = "matvec_together", "linear together"
    format: str
    COLUMNS: int
    MATRICES: int = 1
    product: Product
    N1: Shape
    FACTOR1: Factor
    N2: Shape
    FACTOR2: Factor


class Gated(Kernel):
    """Compute the mat-vecs of two matrices, and OPERATION(a, b) of their results."""

    name, parts = "matvec_gated", "blocks linear together"
    format: str
    COLUMNS: int
    MATRICES: int = 2
    SIZE: int
    OPERATION: Expression
    product: Product
    FACTOR1: Factor
    delivered: Delivered

    @property
    def local_floats(self) -> int:
        return self.SIZE + 32 * self.COLUMNS


def gated_size(columns: int) -> int:
    """Return the number of work-items per group of `Gated`. A group computes 32 results.

    The number leaves room for a second work-group: the sums of several columns take registers.
    """
    return 512 if columns == 1 else 256
