"""Declarations of the kernels of the indexer, which selects the positions for top-k attention."""

from __future__ import annotations

from localllm.backends.gpu.kernels.attention import CacheShape
from localllm.backends.gpu.kernels.kernel import Flag, Kernel, Macros, Shape


class IndexerShape(Macros):
    """Parameters that the two kernels of an indexer share."""

    MAX_ROWS: Shape
    cache: CacheShape
    HEADS: Shape
    Q_STRIDE: Shape
    WEIGHTED: Flag
    COUNT: Shape
    BLOCK: Shape
    LOCAL_BLOCKS: Shape
    POOLED: Flag
    POSITIONS: Shape


class IndexScores(Kernel):
    """Compute the scores of 128 positions of a row."""

    name, parts = "index_scores", "blocks cache indexer"
    shape: IndexerShape
    GROUPED: int

    @property
    def local_floats(self) -> int:
        return self.GROUPED * self.shape.cache.KEY_SIZE


class IndexerTopKRows(Kernel):
    """Select positions of a row by their scores."""

    name, parts = "select_positions", "blocks cache indexer"
    shape: IndexerShape

    @property
    def local_floats(self) -> int:
        return 3 * 128
