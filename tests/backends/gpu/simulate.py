"""Run the small plans on Oclgrind, which executes about a million instructions per second.

Some constants are smaller than for GPUs, so that kernels take the same branches with less work. They must be
set before the modules that copy them are imported, so this is a separate program.
"""

from __future__ import annotations

import sys

from localllm.backends.gpu.kernels import attention, kernel, largest, products

FEW_ROWS = 2  # prefill starts at 3 tokens instead of 17
COLUMNS = 3  # matrix rows per mat-vec work-group, instead of 8; with two rows left, the last group is partly empty
SORTED = 512  # logits that a work-group sorts: two per work-item instead of 16
# Query and key tile sizes of prefill attention. For narrow heads they are 8 instead of 32 and 64, so that few tokens
# need several tiles. Wider heads use the same tiles as on GPUs.
TILES = {32: ((8, 8),), **attention.TILES}


def main(names: str, mutant: str = "") -> None:
    """Run the plans with these comma-separated names."""
    kernel.FEW_ROWS, products.COLUMNS, largest.SORTED, attention.TILES = FEW_ROWS, COLUMNS, SORTED, TILES
    from tests.backends.gpu import checked

    for name in names.split(","):
        checked.main(name, mutant)


if __name__ == "__main__":
    main(*sys.argv[1:])
