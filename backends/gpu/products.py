"""Which kernel multiplies a matrix with rows of activations: one table of formats, one rule of rows.

    1 row              matvec, a segment of 32 work-items a row of the matrix
    to FEW_ROWS        matvec over COLUMNS rows of activations at a time
    to SOME_ROWS       tiles of TILES[-1] on tensor cores, so that small prompts still fill a card; else matmul's
    more               the largest tile on tensor cores that fills a card; else matmul's, 64 x 32 by dp4a or float32

The int8 formats have the same activations and the same order of sums in every tile. F16 and BF16 on tensor cores round
activations (see SPLIT in rows.cl) to 11 and to 16 bits; F32 stays float32, in matmul's tile.
"""

from __future__ import annotations

from localllm.backends.gpu.formats import QUANTIZED
from localllm.backends.gpu.kernels import PLAIN_TILE, Tile

SOME_ROWS = 64
FULL = 128  # work-groups that fill a card: an RTX 4090 has 128 multiprocessors, an H100 132
TILES = (Tile(128, 128), Tile(64, 128), Tile(64, 64))
EXPERTS_TILE = PLAIN_TILE  # few rows choose the same expert

# Format -> the first compute type whose tensor cores have its product (sm_75: in instructions of half the size), and
# into how many numbers of 16 bits an activation is split. Not here: F32, whose product would not be float32's.
TENSOR = {**dict.fromkeys(QUANTIZED, (75, 0)), "F16": (75, 1), "BF16": (80, 2)}


def block_words(width: int) -> int:
    """Words of a row of activation blocks: a byte a number, a scale a block of 32, a sum a half of one."""
    return width * 11 // 32


def terms(format: str, width: int, compute: str) -> int | None:
    """What tensor cores of this compute type ("sm_90") want of activations: 0 int8 blocks, or so many numbers of 16
    bits; None where they do not multiply matrices of this format and width."""
    least, found = TENSOR.get(format, (None, 0))
    if least is None or not compute.startswith("sm_") or int(compute[3:]) < least or width % 16:
        return None
    return found


def tiles_of(format: str) -> tuple[Tile, ...]:
    """Of tensor cores, largest first. 128 x 128 leaves no registers for a second work-group of a multiprocessor where
    halves of a chunk have scales of their own."""
    packing = QUANTIZED.get(format)
    return TILES[1:] if packing is not None and packing.halves == 2 else TILES


def tile_of(format: str, n: int, rows: int) -> Tile:
    """The largest that fills a card with a product of n rows of a matrix and so many of activations."""
    tiles = tiles_of(format)
    return next((tile for tile in tiles if -(-n // tile.w) * -(-rows // tile.x) >= FULL), tiles[-1])


def grouped(rows: int, used: int, experts: int) -> bool:
    """Whether so many rows are gathered by expert into tiles: from one row an expert on."""
    return rows * used >= experts
