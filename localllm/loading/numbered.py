"""Prompts with pictures and sound as plain token ids, as the cache has them, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localllm.engine import Engine, Media, MediaSpan


class NumberedSpans:
    """Knows the spans behind the ids of media tokens, which stay theirs while this object exists."""

    def __init__(self, engine: Callable[[], Engine]) -> None:
        """`engine` is called when the first picture or sound comes."""
        self._engine = engine
        self._media: dict[int, Media] = {}  # by their first id
        self._spans: dict[int, MediaSpan] = {}  # in the last prompt; their tensors take much memory

    def numbered(self, prompt: Sequence[int | MediaSpan]) -> list[int]:
        """Return a prompt with the ids of the tokens of its pictures and sounds."""
        found = list[int]()
        for each in prompt:
            if isinstance(each, MediaSpan):
                ids = self._engine().pool.media
                media = ids.of(each.key, each.tokens, each.positions, each.advance, each.causal)
                self._media[media.first], self._spans[media.first] = media, each
                found += media.ids
            else:
                found.append(each)
        return found

    def spanned(self, tokens: Sequence[int]) -> list[int | MediaSpan]:
        """Return tokens with the pictures and sounds in place of the ids of their tokens."""
        found, at = list[int | MediaSpan](), 0
        while at < len(tokens):
            if tokens[at] < 0:
                found.append(self._spans[tokens[at]])
                at += self._media[tokens[at]].tokens
            else:
                found.append(tokens[at])
                at += 1
        return found

    def forget_others(self, prompt: Sequence[int | MediaSpan]) -> None:
        """Forget the spans that are not in a prompt. Their ids stay theirs."""
        kept = {id(each) for each in prompt}
        self._spans = {first: span for first, span in self._spans.items() if id(span) in kept}
