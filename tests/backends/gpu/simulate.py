"""Start the small plans on Oclgrind, which runs about a million instructions a second.

A few constants are smaller than for GPUs: kernels take the same paths with less work. They are set before the modules
that copy them are imported, so this is a separate program.
"""

from __future__ import annotations

import sys

from localllm.backends.gpu.kernels import attention, kernel, largest, products

FEW_ROWS = 2  # prefill starts at three rows instead of 17
COLUMNS = 3  # matrix rows per mat-vec work-group, instead of 8: two rows still leave a group partly empty
SORTED = 512  # logits that a work-group sorts: two per work-item, instead of 16
# Rows and keys of a prefill attention tile: for narrow heads instead of 32 and 64, so that few rows need several tiles.
# Wider heads keep the tiles of GPUs.
TILES = {32: ((8, 8),), **attention.TILES}


def main(names: str, mutant: str = "") -> None:
    """Run plans by their names, separated by commas."""
    kernel.FEW_ROWS, products.COLUMNS, largest.SORTED, attention.TILES = FEW_ROWS, COLUMNS, SORTED, TILES
    from tests.backends.gpu import checked

    for name in names.split(","):
        checked.main(name, mutant)


if __name__ == "__main__":
    main(*sys.argv[1:])
