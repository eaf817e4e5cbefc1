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
from localllm.backends.gpu.kernels.rowwise import Delivered
from localllm.backends.gpu.references import Fixed

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(Macros):
    """The shape of y = (x @ w.T) * FACTOR + bias + residual.

    COUNT_AT is the offset of the row count in the step buffer.
    """

    K: Shape
    N: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    RESIDUAL_STRIDE: Shape
    FACTOR: Factor
    COUNT_AT: Shape
    HAS_BIAS: bool
    HAS_RESIDUAL: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProduct(Macros):
    """The shape of products of pairs (a row and one of its selected experts). PER_ROW pairs read the same input row."""

    K: Shape
    N: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    EXPERTS: Shape
    PER_ROW: Shape
    HAS_SCALES: bool
    HAS_BIAS: bool
    HAS_RESIDUAL: bool = False
    COUNT_AT: Shape
    FACTOR: Factor = 1.0
    RESIDUAL_STRIDE: Shape = 0
    PAIRS: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProduct(Macros):
    """The shape of per-head products.

    Each head's slice of a row, X_HEAD elements, is multiplied by the head's matrix.
    """

    K: Shape
    N: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    HEADS: Shape
    X_HEAD: Shape
    RESIDUAL_STRIDE: Shape = 0
    FACTOR: Factor = 1.0
    COUNT_AT: Shape
    HAS_BIAS: bool = False
    HAS_RESIDUAL: bool = False


AnyProduct = Product | ExpertProduct | HeadProduct


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBuffers(Buffers):
    """The experts of the pairs, ordered by row or grouped by expert."""

    choices: IntIn
    scales: FloatIn


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductBuffers(Buffers):
    w: ByteIn
    x: FloatIn
    y: FloatOut
    step: IntIn = Fixed.STEP
    bias: FloatIn
    residual: FloatIn
    experts: ExpertBuffers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Matvec(Kernel[ProductBuffers]):
    """Multiply rows of a matrix by COLUMNS rows of activations at a time."""

    name, parts, flag = "matvec", "linear", "MATVEC"
    format: str
    COLUMNS: int
    MATRICES: int = 1
    product: AnyProduct

    @property
    def local_floats(self) -> int:
        return 128

    def takes(self, buffers: ProductBuffers) -> bool:
        return _experts_agree(self.product, buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul(Kernel[ProductBuffers]):
    """Multiply a PLAIN_TILE with dp4a or in float32."""

    name, parts, flag = "matmul", "linear", "MATMUL"
    format: str
    product: AnyProduct

    @property
    def local_floats(self) -> int:
        depth, more = (8, 64 * 4 + 32 * 3) if self.format in QUANTIZED else (16, 0)
        return (64 + 32) * (depth + 1) + more

    def takes(self, buffers: ProductBuffers) -> bool:
        return _experts_agree(self.product, buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCoreMatmul(Kernel[ProductBuffers]):
    """Multiply a tile on NVIDIA's tensor cores. COPY is the number of bytes per copy; `terms` explains TERMS."""

    name, parts = "tensor", "instructions linear tensor"
    format: str
    TILE_X: int
    TILE_W: int
    COPY: int
    TERMS: int
    product: AnyProduct
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

    def takes(self, buffers: ProductBuffers) -> bool:
        return _experts_agree(self.product, buffers)


def _experts_agree(product: AnyProduct, buffers: ProductBuffers) -> bool:
    return isinstance(product, ExpertProduct) == (buffers.experts is not None)


def tensor(format: str, tile: Tile, terms: int, product: AnyProduct) -> TensorCoreMatmul:
    """Return the tensor-core kernel for a tile. `terms` is a result of the function `terms`."""
    step = product.X_HEAD if isinstance(product, HeadProduct) else product.X_STRIDE
    aligned = next(size for size in (16, 8, 4) if 4 * step % size == 0)
    groups = 6 if tile == PLAIN_TILE else None  # the compiler would aim at eight or more, and keep sums in memory
    return TensorCoreMatmul(
        format=format, TILE_X=tile.x, TILE_W=tile.w, COPY=aligned, TERMS=max(terms, 1), product=product, GROUPS=groups
    )


def tile_kernel(format: str, rows: int, product: AnyProduct, compute: str) -> tuple[Matmul | TensorCoreMatmul, Tile]:
    """Return the kernel for a product with at most `rows` rows of activations, and its tile."""
    found = terms(format, product.K, compute)
    if found is None:
        return Matmul(format=format, product=product), PLAIN_TILE
    heads = product.HEADS if isinstance(product, HeadProduct) else 1
    tile = EXPERTS_TILE if isinstance(product, ExpertProduct) else tile_of(format, product.N, rows, heads)
    return tensor(format, tile, found, product), tile


# -- several matrices of one format ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MatvecTogetherBuffers(Buffers):
    w0: ByteIn
    w1: ByteIn
    w2: ByteIn
    x: FloatIn
    y0: FloatOut
    y1: FloatOut
    y2: FloatOut
    step: IntIn = Fixed.STEP
    bias0: FloatIn
    bias1: FloatIn
    bias2: FloatIn


@dataclass(frozen=True, slots=True, kw_only=True)
class MatvecTogether(Kernel[MatvecTogetherBuffers]):
    """Compute the mat-vecs of two or three matrices with N, N1 and N2 rows in one launch."""

    name, parts, flag = "matvec_together", "linear together", "TOGETHER"
    format: str
    COLUMNS: int
    MATRICES: int = 1
    K: Shape
    N: Shape
    X_STRIDE: Shape
    RESIDUAL_STRIDE: Shape
    FACTOR: Factor
    COUNT_AT: Shape
    HAS_BIAS: bool
    N1: Shape
    FACTOR1: Factor
    N2: Shape
    FACTOR2: Factor

    @property
    def local_floats(self) -> int:
        return 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedBuffers(Buffers):
    gate: ByteIn
    up: ByteIn
    x: FloatIn
    y: FloatOut
    blocks: FloatOut
    step: IntIn = Fixed.STEP
    gate_bias: FloatIn
    up_bias: FloatIn


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated(Kernel[GatedBuffers]):
    """Compute the mat-vecs of two matrices, and OPERATION(a, b) of their results."""

    name, parts, flag = "matvec_gated", "blocks linear together", "GATED"
    format: str
    COLUMNS: int
    MATRICES: int = 2
    SIZE: int
    OPERATION: Expression
    K: Shape
    N: Shape
    X_STRIDE: Shape
    RESIDUAL_STRIDE: Shape
    FACTOR: Factor
    COUNT_AT: Shape
    HAS_BIAS: bool
    FACTOR1: Factor
    delivered: Delivered

    @property
    def size(self) -> int:
        return self.SIZE

    @property
    def local_floats(self) -> int:
        return self.SIZE + 32 * self.COLUMNS


def gated_size(columns: int) -> int:
    """Return the number of work-items per group of `Gated`. A group computes 32 results.

    The number leaves room for a second work-group: the sums of several columns take registers.
    """
    return 512 if columns == 1 else 256
