"""Declarations of the kernels of the indexer, which selects the positions for top-k attention."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.gpu.kernels.attention import CacheShape
from localllm.backends.gpu.kernels.kernel import Buffers, ByteIn, Flag, FloatIn, FloatOut, IntIn, Kernel, Macros, Shape
from localllm.backends.gpu.references import Fixed


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexScoresBuffers(Buffers):
    q: FloatIn
    weights: FloatIn
    step: IntIn = Fixed.STEP
    tables: IntIn = Fixed.TABLES
    keys: ByteIn
    scores: FloatOut = Fixed.SCORES


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexScores(Kernel[IndexScoresBuffers]):
    """Compute the scores of 128 positions of a row."""

    name, parts, flag = "index_scores", "blocks cache indexer", "STAGE_index_scores"
    shape: IndexerShape
    GROUPED: int

    @property
    def local_floats(self) -> int:
        return self.GROUPED * self.shape.cache.KEY_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerTopKRowsBuffers(Buffers):
    step: IntIn = Fixed.STEP
    scores: FloatOut = Fixed.SCORES
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerTopKRows(Kernel[IndexerTopKRowsBuffers]):
    """Select positions of a row by their scores."""

    name, parts, flag = "select_positions", "blocks cache indexer", "STAGE_select_positions"
    shape: IndexerShape

    @property
    def local_floats(self) -> int:
        return 3 * 128
