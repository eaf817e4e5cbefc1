"""Text with DNA ("hybriddna"): between <dna> and </dna>, each token is six letters; all other text is BPE."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Protocol

_OPEN, _CLOSE, _UNKNOWN = "<dna>", "</dna>", "<oov>"
_MARKER = "\ue000"  # suffix of DNA tokens in the vocabulary, which distinguishes them from BPE tokens
_LETTERS = 6
_SECTION = re.compile(f"{_OPEN}(.*?)({_CLOSE}|\\Z)", re.DOTALL)


class _Words(Protocol):
    def encode(self, text: str, start: bool = True) -> list[int]: ...


def shown_tokens(tokens: list[str], ids: Mapping[str, int]) -> list[str]:
    """Return all token texts without the marker of DNA tokens, which follow the unknown token."""
    after = ids.get(_UNKNOWN, len(tokens)) + 1
    return tokens[:after] + [text.removesuffix(_MARKER) or text for text in tokens[after:]]


def knows_dna(ids: Mapping[str, int]) -> bool:
    """Return whether the vocabulary has the <dna> and </dna> tokens; without them, all text is BPE."""
    return all(text in ids for text in (_OPEN, _CLOSE, _UNKNOWN))


class DnaEncoder:
    """Encodes DNA sections by table lookup, and all other text with `words`."""

    def __init__(self, ids: Mapping[str, int], words: _Words) -> None:
        self._ids, self._words = ids, words

    def encode(self, text: str, start: bool = True) -> list[int]:
        ids: list[int] = []
        place = 0
        for section in _SECTION.finditer(text):
            ids += self._words.encode(text[place : section.start()], start)
            ids += [self._ids[_OPEN], *self._sixes(section[1])]
            if section[2]:
                ids.append(self._ids[_CLOSE])
            place = section.end()
        return ids + self._words.encode(text[place:], start)

    def _sixes(self, text: str) -> Iterator[int]:
        """Yield one token per six letters; the last group is padded with A."""
        letters = text.encode().upper()
        for i in range(0, len(letters), _LETTERS):
            six = letters[i : i + _LETTERS].ljust(_LETTERS, b"A").decode("ascii", "replace")
            yield self._ids.get(six + _MARKER, self._ids[_UNKNOWN])
