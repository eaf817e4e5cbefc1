"""`Tokenizer`: text to token ids and back, for the vocabulary in a GGUF file's metadata; ids equal llama.cpp's.

What a call does not need is not made: decoding uses the token table only, merges are read at the first `encode`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from localllm.tokenizer.encoders import BYTE_LETTERS, SPACE, TextEncoder, text_encoder
from localllm.tokenizer.errors import TokenizerError
from localllm.tokenizer.stream import StreamDecoder
from localllm.tokenizer.vocab import BYTE, HIDDEN, NORMAL, SPECIAL, Vocab, read_vocab

_C_SPACES = " \t\n\v\f\r"
_PREFIX = 3  # characters by which special tokens are looked for together: thousands of them share a few beginnings


class Tokenizer:
    """One vocabulary. Safe to share between threads that only call it.

    `bos`, `eos`: ids or None. `eog`: ids that end a generation. `add_bos`, `add_eos`: what `add_special` adds.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self.vocab_size = len(vocab.tokens)
        self.bos, self.eos = vocab.bos, vocab.eos
        self.add_bos, self.add_eos = vocab.add_bos, vocab.add_eos
        self.eog = vocab.ends

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a file's metadata; TokenizerError names the key that is missing, broken or unsupported."""
        return cls(read_vocab(metadata))

    @cached_property
    def special(self) -> Mapping[str, int]:
        """Text to id of the tokens that stand for more than their text: control, user-defined and unknown ones."""
        vocab = self._vocab
        found = np.flatnonzero(np.frombuffer(vocab.kinds, np.uint8) & SPECIAL).tolist()
        return MappingProxyType({vocab.tokens[i]: i for i in found})

    def prepare(self) -> None:
        """Do now what the first `encode` would do: read the merges. For a thread beside the loading of weights."""
        self._encoder  # noqa: B018

    def text(self, token: int) -> str:
        """The token as the vocabulary writes it, escapes and all."""
        return self._vocab.tokens[self._checked(token)]

    def id(self, text: str) -> int | None:
        """The token written so in the vocabulary, escapes and all; None where there is none."""
        return self._vocab.ids.get(text)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`. `add_special` puts BOS before and EOS after it where the file says so, but never doubles one.

        Control tokens written in the text are text, unless `parse_special`; user-defined tokens are always recognised.
        """
        vocab = self._vocab
        ids: list[int] = []
        for part in self._parts(_valid(text), parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:  # at the beginning, or after a special token: its first word is written with a space
                ids += self._encoder.encode(" " + part if vocab.add_space_prefix else part)
        if add_special and self.add_bos and vocab.bos is not None and ids[:1] != [vocab.bos]:
            ids.insert(0, vocab.bos)
        if add_special and self.add_eos and vocab.eos is not None and ids[-1:] != [vocab.eos]:
            ids.append(vocab.eos)
        return ids

    def decode(self, ids: Iterable[int], special: bool = False, drop_space: bool = True) -> str:
        """Text of `ids`; control tokens only where `special`. Bytes that are not UTF-8 become U+FFFD.

        Without the space that the vocabulary puts before a first word, unless `drop_space` is false: for ids that
        continue a text. TokenizerError for an id outside the vocabulary.
        """
        text = b"".join([self.piece(token, special) for token in ids])
        if drop_space and self._vocab.add_space_prefix:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def stream(self, special: bool = False, drop_space: bool = True) -> StreamDecoder:
        """`decode`, token by token, with the same options."""
        return StreamDecoder(lambda token: self.piece(token, special), drop_space and self._vocab.add_space_prefix)

    def piece(self, token: int, special: bool = True) -> bytes:
        """The bytes that a token adds to the text; may be part of a character. Control tokens only where `special`."""
        vocab = self._vocab
        token = self._checked(token)
        text, kind = vocab.tokens[token], vocab.kinds[token]
        if kind & SPECIAL:
            return b"" if kind & HIDDEN and not special else _bytes(text)
        if kind & BYTE and len(text) == 6 and text.startswith("<0x"):
            try:
                return bytes.fromhex(text[3:5])
            except ValueError:
                return _bytes(text)
        if not kind & NORMAL:
            return b""  # unused
        if vocab.spaces_escaped:
            return _bytes(text.replace(SPACE, " "))
        if vocab.rule is not None and vocab.rule.byte_level:
            try:
                return bytes([_BYTE_OF[letter] for letter in text])
            except KeyError:
                return _bytes(text)
        return _bytes(text)

    def _checked(self, token: int) -> int:
        index = operator.index(token)
        if not 0 <= index < self.vocab_size:
            raise TokenizerError(f"token {index} is outside the vocabulary: ids are 0 to {self.vocab_size - 1}")
        return index

    @cached_property
    def _encoder(self) -> TextEncoder:
        return text_encoder(self._vocab)

    @cached_property
    def _special_by_prefix(self) -> dict[str, list[tuple[int, int]]]:
        """Special tokens, as (order, id), by the first characters of their text. Order: longest in bytes first."""
        tokens = self._vocab.tokens
        order = sorted(self.special.values(), key=lambda i: -len(_bytes(tokens[i])))
        groups: dict[str, list[tuple[int, int]]] = {}
        for position, token in enumerate(order):
            groups.setdefault(tokens[token][:_PREFIX], []).append((position, token))
        return groups

    def _parts(self, text: str, parse_special: bool) -> list[str | int]:
        """`text` with its special tokens found: longest tokens first, each from left to right, none inside another."""
        if not text:
            return []
        tokens, kinds = self._vocab.tokens, self._vocab.kinds
        groups = self._special_by_prefix
        candidates = sorted(pair for prefix in groups if prefix in text for pair in groups[prefix])
        taken = bytearray(len(text))
        found: list[tuple[int, int]] = []  # (place, token)
        for _, token in candidates:
            if kinds[token] & HIDDEN and not parse_special:
                continue
            length = len(tokens[token])
            place = text.find(tokens[token])
            while place >= 0:
                if taken.find(1, place, place + length) < 0:
                    taken[place : place + length] = b"\1" * length
                    found.append((place, token))
                    place += length
                else:
                    place += 1
                place = text.find(tokens[token], place)
        return self._cut(text, sorted(found))

    def _cut(self, text: str, found: list[tuple[int, int]]) -> list[str | int]:
        vocab = self._vocab
        parts: list[str | int] = []
        start = 0
        strip = False
        for place, token in [*found, (len(text), -1)]:
            between = text[start:place]
            if strip:
                between = between.lstrip(_C_SPACES)
            if between:
                parts.append(between)
            if token >= 0:
                parts.append(token)
                start = place + len(vocab.tokens[token])
                strip = token in vocab.strip_after
        return parts


_BYTE_OF = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _valid(text: str) -> str:
    """`text` with lone surrogates, which have no bytes, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
