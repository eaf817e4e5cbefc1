"""The operation that looks up the n-grams ending at each token by hashes of token ids (Qwen 4's embeddings)."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.operation import Producer, Read
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class EmbedNgrams(Producer):
    """out[t] = the table rows of the n-grams that end at row t side by side, one from each head's part of the table.

    The hash of order n is the exclusive or of token[t - i] * multipliers[i] over i < n; products stay below 2^63.
    Orders are 2, 3, ... up to the number of multipliers, with equal numbers of heads. Head h takes row `hash % sizes[h]
    + firsts[h]` of the table.

    N-grams do not cross the end of a text: positions below 0 and tokens up to the last `end` before row t read as
    `end`. The token of row t itself is used even if it is `end`.

    Ids of earlier rows come from `Batch.histories`. The table stays in the file: a step reads the rows that it needs.
    """

    table: Weight  # (rows, width of a head)
    multipliers: tuple[int, ...]  # multipliers of the row's token, the previous one, ...
    sizes: tuple[int, ...]  # rows of each head's part of the table
    firsts: tuple[int, ...]  # first row of each part
    end: int  # the token that ends a text

    @property
    def heads(self) -> int:
        """The number of heads of each order."""
        return len(self.sizes) // (len(self.multipliers) - 1)

    @property
    def lookups(self) -> tuple[Read, ...]:
        return (Read(self.table, len(self.sizes), self.table.shape[0]),)
