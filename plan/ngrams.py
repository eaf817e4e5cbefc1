"""The operation that looks up the n-grams which end at a token, by hashes of the tokens' ids (Qwen 4's embeddings)."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.operation import Producer, Read
from localllm.plan.recurrence import RowLayer
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class EmbedNgrams(Producer):
    """out[t] = the rows of the n-grams that end at row t side by side, from each head's part of the table.

    The hash of order n is the exclusive or of token[t - i] * multipliers[i] over i < n; products stay below 2^63.
    Orders are 2, 3, ... up to the number of multipliers, and each has as many heads. Head h takes row
    `hash % sizes[h] + firsts[h]` of the table.

    Tokens up to the last `end` before row t do not count, nor do positions below 0: each reads as `end`. The token of
    row t itself counts, also if it is `end`.

    Ids of earlier steps come from the store of `layer`, where those of every row go as float32: they are below 2^24.
    """

    table: Weight  # (rows, width of a head)
    layer: int
    multipliers: tuple[int, ...]  # of the row's token, the one before it, ...
    sizes: tuple[int, ...]  # rows of each head's part of the table
    firsts: tuple[int, ...]  # first row of each part
    end: int  # the token that ends a text

    @property
    def heads(self) -> int:
        """Heads of each order."""
        return len(self.sizes) // (len(self.multipliers) - 1)

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return (self.table,)

    @property
    def reads(self) -> tuple[Read, ...]:
        return (Read(self.table, len(self.sizes), self.table.shape[0]),)

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)

    @property
    def store(self) -> RowLayer:
        return RowLayer(1, len(self.multipliers))
