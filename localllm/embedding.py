"""Text embeddings, one vector per text, pooled as the GGUF specifies; and reranking scores of documents.

Each step evaluates several texts if they fit. With bidirectional attention, all tokens of a text must be in one step;
other models may split a long text across steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.engine import ContextFull, Engine, SequenceRows
from localllm.models import Config, Pooler, unit
from localllm.models.config import Pooling
from localllm.tokenizer import Tokenizer

F32 = NDArray[np.float32]
POOLINGS: tuple[str, ...] = ("auto", *get_args(Pooling))
_RANK_TEMPLATE = "tokenizer.chat_template.rerank"
_UNKNOWN = "tokenizer.ggml.unknown_token_id"
_SEPARATOR = "tokenizer.ggml.seperator_token_id"  # GGUF's spelling


@dataclass(frozen=True, slots=True)
class TextPooler:
    """Pools the hidden states of a text's tokens into one vector."""

    config: Config
    pooler: Pooler

    def pooling(self, asked: str) -> Pooling:
        """Return the requested pooling; "auto" selects the GGUF's. Raise LocalLLMError if the model does not support
        it.
        """
        if asked not in POOLINGS:
            raise LocalLLMError(f"pooling {asked!r} is not one of {', '.join(POOLINGS)}")
        found: Pooling = self.config.pooling if asked == "auto" else asked  # type: ignore[assignment]
        if found == "rank" and not self.pooler.ranks:
            raise LocalLLMError('pooling "rank" needs a classifier, which this file lacks; it is not a reranker')
        return found


@dataclass(frozen=True, slots=True)
class Embedder(TextPooler):
    """Computes embeddings of token ids with an engine whose plan ends in embeddings."""

    engine: Engine

    def vectors(self, texts: Sequence[Sequence[int]], pooling: Pooling) -> Iterator[F32]:
        """Yield a float32 vector per text, in order: (width,), (labels,) for "rank", (T, width) for "none"."""
        for rows in self._rows(texts):
            yield self.pooler(rows, pooling)

    def _rows(self, texts: Sequence[Sequence[int]]) -> Iterator[F32]:
        """Yield the embeddings of each text's tokens, float32 (T, width)."""
        limits, engine = self.engine.limits, self.engine
        most = min(limits.rows, limits.logit_rows)
        for number, ids in enumerate(texts, 1):
            longest = limits.positions if self.config.causal else min(most, limits.positions)
            if not 0 < len(ids) <= longest:
                raise _wrong_length(number, len(ids), longest)
        first = 0
        while first < len(texts):
            if len(texts[first]) > most:
                yield self._long(texts[first], most)
                first += 1
                continue
            count = self._together(texts, first, most)
            with engine.alone:
                sequences = [engine.add() for _ in range(count)]
                try:
                    parts = zip(sequences, texts[first : first + count], strict=True)
                    results = engine.step([SequenceRows(sequence, ids, "all") for sequence, ids in parts])
                    found = [result.logits.copy() for result in results]
                finally:
                    for sequence in sequences:
                        engine.release(sequence)
            yield from found
            first += count

    def _together(self, texts: Sequence[Sequence[int]], first: int, most: int) -> int:
        """Return how many texts from `first` on fit in one step, by their numbers of tokens and cache blocks."""
        rows = blocks = count = 0
        for ids in texts[first:]:
            rows, blocks = rows + len(ids), blocks - (-len(ids) // self.engine.block_tokens)
            if count and (rows > most or blocks > self.engine.free_blocks):
                break
            count += 1
        return count

    def _long(self, ids: Sequence[int], most: int) -> F32:
        sequence, parts = self.engine.add(), []
        with self.engine.alone:
            try:
                for start in range(0, len(ids), most):
                    [result] = self.engine.step([SequenceRows(sequence, ids[start : start + most], "all")])
                    parts.append(result.logits.copy())
            finally:
                self.engine.release(sequence)
        return np.concatenate(parts)


def _wrong_length(number: int, count: int, longest: int) -> LocalLLMError:
    if not count:
        return LocalLLMError(f"text {number} has no tokens; give some text")
    counts = f"text {number} has {count} tokens, but the context holds {longest}"
    return ContextFull(Notice(counts, "; shorten it or raise ", Setting("ctx_size")))


def normalized(vectors: Sequence[F32]) -> F32:
    """Return the vectors, normalized to length 1."""
    return unit(np.stack(vectors))


def rank_pair(tokenizer: Tokenizer, metadata: Mapping[str, Any], query: str, document: str) -> list[int]:
    """Return a reranker's token ids for a query and a document.

    The GGUF's rerank template has placeholders for both. Without a template, the two are joined by a separator token.
    """
    template = metadata.get(_RANK_TEMPLATE)
    if isinstance(template, str):
        text, texts = _filled(template, {"{query}": query, "{document}": document})
        control = {token for token in tokenizer.special.values() if tokenizer.is_control(token)}
        control.discard(metadata.get(_UNKNOWN, -1))  # unknown characters are encoded as it
        return tokenizer.encode(text, add_special=False, parse_special=True, guard=_Guard(control, texts))
    first, second = tokenizer.encode(query), tokenizer.encode(document)
    if tokenizer.add_bos and second[:1] == [tokenizer.bos]:
        second = second[1:]
    separator = metadata.get(_SEPARATOR)
    doubled = isinstance(separator, int) and 0 <= separator < tokenizer.vocab_size and "eos" in tokenizer.adds
    return [*first, *([int(separator)] if doubled and separator is not None else []), *second]


@dataclass(frozen=True, slots=True)
class _Guard:
    """Allows control tokens only in the template, not in the inserted texts."""

    tokens: Set[int]
    texts: Sequence[tuple[int, int]]  # start and end offsets of the inserted texts

    def allows(self, token: int, start: int, stop: int) -> bool:
        return token not in self.tokens or all(stop <= first or start >= last for first, last in self.texts)


def _filled(template: str, given: Mapping[str, str]) -> tuple[str, list[tuple[int, int]]]:
    """Return the template filled with texts, and the range of each text in it."""
    made, spans, at = "", [], 0
    while at < len(template):
        place, name = min(
            ((template.find(name, at), name) for name in given if name in template[at:]), default=(-1, "")
        )
        if place < 0:
            break
        made += template[at:place]
        spans.append((len(made), len(made) + len(given[name])))
        made += given[name]
        at = place + len(name)
    return made + template[at:], spans
