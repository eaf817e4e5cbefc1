"""Starts the small plans on Oclgrind, which runs about a million instructions a second.

A few constants are smaller here than for cards: kernels take the same paths with less work. They are set before the
modules that copy them are imported, so this runs as a program of its own.
"""

from __future__ import annotations

import sys

from localllm.backends.gpu.kernels import attention, kernel, largest, products

FEW_ROWS = 2  # prefill begins with three rows in place of 17
COLUMNS = 3  # rows of a work-group of the mat-vec, in place of 8: two still fill no group
SORTED = 512  # logits that a work-group sorts: two for each of its work-items, in place of 16
# Rows and keys of a tile of prefill attention: of narrow heads in place of 32 and 64, so that few rows go through
# several tiles. Wider heads have the tiles of cards.
TILES = {32: ((8, 8),), **attention.TILES}


def main(names: str, mutant: str = "") -> None:
    """Run plans by their names, separated by commas."""
    kernel.FEW_ROWS, products.COLUMNS, largest.SORTED, attention.TILES = FEW_ROWS, COLUMNS, SORTED, TILES
    from tests.backends.gpu import checked

    for name in names.split(","):
        checked.main(name, mutant)


if __name__ == "__main__":
    main(*sys.argv[1:])
