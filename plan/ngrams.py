"""The operation that looks up embeddings of the n-grams ending at each token by hashes of token ids (Qwen 4)."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.operation import Producer, Read
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class EmbedNgrams(Producer):
    """out[t] = the concatenated embeddings of the n-grams that end at token t, one from each head's part of the table.

    The hash of order n is the exclusive or of token[t - i] * multipliers[i] over i < n; products stay below 2^63.
    Orders are 2, 3, ... up to the number of multipliers, with equal numbers of heads. Head h reads row `hash % sizes[h]
    + firsts[h]` of the table.

    N-grams do not cross the end of a text: positions below 0 and tokens up to the last `end` before token t are
    replaced by `end`. Token t itself is used even if it is `end`.

    Ids of earlier tokens come from `Batch.histories`. The table stays on disk: a step reads the rows that it needs.
    """

    table: Weight  # (rows, head width)
    multipliers: tuple[int, ...]  # multipliers of the current token, the previous token, ...
    sizes: tuple[int, ...]  # number of rows of each head's part of the table
    firsts: tuple[int, ...]  # index of the first row of each part
    end: int  # end-of-text token

    @property
    def heads(self) -> int:
        """The number of heads per order."""
        return len(self.sizes) // (len(self.multipliers) - 1)

    @property
    def lookups(self) -> tuple[Read, ...]:
        return (Read(self.table, len(self.sizes), self.table.shape[0]),)
