"""Finds the vocabulary's tokens at a position of a text, with one dictionary lookup per existing token length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from localllm.tokenizer.errors import TokenizerError

_LONGEST = 256  # maximum characters of a token: each length costs a lookup per position; known tokens have up to 128


class Matcher:
    """Indexes the lengths of tokens by their first two characters."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        lengths: dict[str, set[int]] = {}
        for text, token in ids.items():
            if len(text) > _LONGEST:
                raise TokenizerError(
                    f"tokenizer.ggml.tokens: token {token} has {len(text)} characters; the limit is {_LONGEST}"
                )
            lengths.setdefault(text[:2], set()).add(len(text))
        self._single = {start: (1,) for start in lengths if len(start) == 1}
        self._lengths = {  # in ascending order
            start: tuple(sorted(found | ({1} if start[0] in self._single else set())))
            for start, found in lengths.items()
            if len(start) == 2
        }

    def at(self, text: str, start: int) -> Iterator[tuple[int, int]]:
        """Yield (end, id) of every token at `start`, shortest first."""
        for length in self._of(text, start):
            token = self._ids.get(text[start : start + length])
            if token is not None and start + length <= len(text):
                yield start + length, token

    def longest(self, text: str, start: int) -> tuple[int, int] | None:
        """Return (end, id) of the longest token at `start`; None without a match."""
        for length in reversed(self._of(text, start)):
            token = self._ids.get(text[start : start + length])
            if token is not None and start + length <= len(text):
                return start + length, token
        return None

    def _of(self, text: str, start: int) -> tuple[int, ...]:
        return self._lengths.get(text[start : start + 2]) or self._single.get(text[start]) or ()
