"""WordPiece ("bert"): normalize, split at white space and punctuation, then repeatedly take the longest token.

Follows transformers' BertNormalizer where llama.cpp differs: Korean syllables are decomposed into all their letters,
not only the first, and the spacing marks of Indic scripts are not treated as accents. Vertical tab and form feed
separate words, as in llama.cpp.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping

from localllm.tokenizer.matching import Matcher
from localllm.tokenizer.pretokenize import WHITE_SPACE

_CHINESE = (
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0x2F800, 0x2FA1F)),
)
_WORD_START = "\u2581"
_DROPPED = ("Cc", "Cf", "Co", "Cs")


class _Written(dict[int, str]):
    """Maps a code point to its replacement: itself, its lower case, nothing, or a separate word between spaces."""

    def __init__(self, lowercase: bool, strip_accents: bool) -> None:
        self._lowercase, self._strip_accents = lowercase, strip_accents

    def __missing__(self, code: int) -> str:
        self[code] = written = self._write(chr(code))
        return written

    def _write(self, char: str) -> str:
        category = unicodedata.category(char)
        if char in WHITE_SPACE:
            return " "
        if char == "\ufffd" or category in _DROPPED or (self._strip_accents and category == "Mn"):
            return ""
        lower = char.lower() if self._lowercase else char
        alone = category[0] == "P" or (char < "\x7f" and category[0] == "S")
        alone = alone or any(first <= ord(char) <= last for first, last in _CHINESE)
        return f" {lower} " if alone else lower


def word_splitter(lowercase: bool, strip_accents: bool) -> Callable[[str], list[str]]:
    """Return a function that normalizes a text and splits it into words, without white space."""
    written = _Written(lowercase, strip_accents)

    def split(text: str) -> list[str]:
        if strip_accents and not text.isascii():
            text = unicodedata.normalize("NFD", text)
        return [word for word in text.translate(written).split(" ") if word]

    return split


def word_encoder(ids: Mapping[str, int], unknown: int) -> Callable[[str], list[int]]:
    """Return a function that encodes one word. A word without a split into tokens is encoded as the unknown token."""
    longest = Matcher(ids).longest

    def encode_word(word: str) -> list[int]:
        out, text, place = [], _WORD_START + word, 0
        while place < len(text):
            found = longest(text, place)
            if found is None:
                return [unknown]
            place, token = found
            out.append(token)
        return out

    return encode_word
