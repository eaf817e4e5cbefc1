"""Evaluates a prompt with pictures and sound outside the loop, for `LoadedModel.logits`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from localllm.engine import Engine, MediaSpan, SequenceRows
from localllm.engine.rows import Wanted

F32 = NDArray[np.float32]


def logits_of(engine: Engine, prompt: Sequence[int | MediaSpan], step: int) -> F32:
    """Return the logits after every token of the text, and after the last token of each picture or sound."""
    sequence, found = engine.add(), list[F32]()
    try:
        for tokens, media, wanted in _parts(engine, prompt, step):
            rows = SequenceRows(sequence, tokens, wanted, media=media)
            found.append(engine.step([rows])[0].logits.copy())
    finally:
        engine.release(sequence)
    return np.concatenate(found)


def _parts(
    engine: Engine, prompt: Sequence[int | MediaSpan], step: int
) -> Iterator[tuple[list[int], F32 | None, Wanted]]:
    for is_text, group in groupby(prompt, lambda each: not isinstance(each, MediaSpan)):
        if is_text:
            text = [each for each in group if not isinstance(each, MediaSpan)]
            for at in range(0, len(text), step):
                yield text[at : at + step], None, "all"
            continue
        for span in group:
            assert isinstance(span, MediaSpan)
            media = engine.pool.media.of(span.key, span.tokens, span.positions, span.advance, span.causal)
            encoding = span.encode()
            while not encoding.advance():
                pass
            ids, rows = list(media.ids), encoding.embeddings
            each = step if span.causal else span.tokens
            for at in range(0, len(ids), each):
                last = at + each >= len(ids)
                yield ids[at : at + each], rows[at : at + each], "last" if last else "none"
