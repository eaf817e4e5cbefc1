"""`Tokenizer`: converts text to token ids and back with the vocabulary in GGUF metadata. Token ids are the same as in
llama.cpp.

Tables are built on demand: decoding only uses the token table, and merges are read at the first `encode`.
"""

from __future__ import annotations

import codecs
import operator
import re
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from localllm.tokenizer.encoders import BYTE_LETTERS, SPACE, Encoder, text_encoder
from localllm.tokenizer.errors import TokenizerError
from localllm.tokenizer.kinds import ESCAPES, LETTERS, SPACES
from localllm.tokenizer.plain import unescaped
from localllm.tokenizer.vocab import BYTE, HIDDEN, NORMAL, SPECIAL, Vocab, read_vocab

_C_SPACES = " \t\n\v\f\r"
_PREFIX = 3  # prefix length for the search of special tokens: thousands of tokens share a few prefixes
_MANY = 1000  # above this number of prefixes, it is faster to enumerate the text's prefixes


class SpecialGuard(Protocol):
    """Decides which special tokens a text may contain, and where."""

    @property
    def tokens(self) -> Set[int]:
        """Tokens that merging of plain text must not produce."""

    def allows(self, token: int, start: int, stop: int) -> bool:
        """Return whether `token` counts as special at [start, stop) of the text."""


class Tokenizer:
    """The tokenizer of a vocabulary. Thread-safe.

    `bos`, `eos`, `end` (of an answer): ids or None. `eog`: end-of-generation ids. `adds`: names of the tokens that
    `add_special` adds, "bos" before a text, "eos" or "seperator" after it. `suppressed`: ids that are never sampled.
    `note`: a note to the user if the pre-tokenizer is guessed, else "".
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self.vocab_size = len(vocab.tokens)
        self.bos, self.eos = vocab.bos, vocab.eos
        self.adds = tuple(vocab.adds)
        self.add_bos = "bos" in vocab.adds
        self.eog, self.end = vocab.ends, vocab.end
        self.suppressed = vocab.suppressed
        self.note = vocab.note

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], nearest_rule: bool = False) -> Tokenizer:
        """Return the tokenizer defined by GGUF metadata; raise TokenizerError for a missing, invalid or unsupported
        key.

        With `nearest_rule`, use the known pre-tokenizer with the name most similar to `tokenizer.ggml.pre`; `note`
        reports this.
        """
        return cls(read_vocab(metadata, nearest_rule))

    @cached_property
    def special(self) -> Mapping[str, int]:
        """Text -> id of the special tokens: control, user-defined and unknown tokens."""
        vocab = self._vocab
        found = np.flatnonzero(np.frombuffer(vocab.kinds, np.uint8) & SPECIAL).tolist()
        return MappingProxyType({vocab.tokens[i]: i for i in found})

    @cached_property
    def longest(self) -> int:
        """Length of the longest token, in the unit of `length`; n tokens have at most n times this length."""
        special = max((self.length(text) for text in self.special), default=0)
        return max(special, *map(len, self._vocab.tokens))

    def length(self, text: str) -> int:
        """Return the length of a text in the unit of `longest`: bytes for a byte-level vocabulary, otherwise
        characters.
        """
        if text.isascii() or self._vocab.writes != LETTERS:
            return len(text)
        return len(text.encode("utf-8", "replace"))

    def prepare(self) -> None:
        """Read the merges now instead of at the first `encode`, for example in a thread while weights load."""
        self._encoder  # noqa: B018

    def text(self, token: int) -> str:
        """Return the token's text as stored in the vocabulary, including escapes."""
        return self._vocab.tokens[self._checked(token)]

    def id(self, text: str) -> int | None:
        """Return the id of the token with this text in the vocabulary, including escapes; None if it does not exist."""
        return self._vocab.ids.get(text)

    def is_control(self, token: int) -> bool:
        """Return whether a token is hidden in output, and recognized in text only on request."""
        return bool(self._vocab.kinds[self._checked(token)] & HIDDEN)

    def encode(
        self, text: str, add_special: bool = True, parse_special: bool = False, guard: SpecialGuard | None = None
    ) -> list[int]:
        """Return the ids of `text`. `add_special` adds the tokens in `adds`, without duplicating them.

        Control tokens in the text are encoded as plain text, unless `parse_special`; user-defined tokens are always
        recognized. With a `guard`, both are recognized where it allows them.
        """
        ids: list[int] = []
        for part in self._parts(_valid(text), parse_special, guard):
            if isinstance(part, int):
                ids.append(part)
            else:  # at the start or after a special token, a space precedes the first word
                made = self._encoder.encode(part)
                ids += made if guard is None or guard.tokens.isdisjoint(made) else self._spelled(made, guard.tokens)
        if add_special:
            for name, token in self._vocab.adds.items():
                if name == "bos" and ids[:1] != [token]:
                    ids.insert(0, token)
                elif name != "bos" and ids[-1:] != [token]:
                    ids.append(token)
        return ids

    def decode(self, ids: Iterable[int], special: bool = False, drop_space: bool = True) -> str:
        """Return the text of `ids`; control tokens only if `special`. Invalid UTF-8 becomes U+FFFD.

        Drop the space that the vocabulary puts before the first word. Set `drop_space` to false for ids that continue a
        text. Raises TokenizerError for an id outside the vocabulary.
        """
        text = b"".join([self.piece(token, special) for token in ids])
        if drop_space and self._vocab.add_space_prefix:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def stream(self, special: bool = False, drop_space: bool = True, visible: Collection[int] = ()) -> StreamDecoder:
        """Return a streaming version of `decode`, with the same options.

        Control tokens in `visible` are decoded even without `special`.
        """

        def piece(token: int) -> bytes:
            return self.piece(token, special or token in visible)

        return StreamDecoder(piece, drop_space and self._vocab.add_space_prefix)

    def piece(self, token: int, special: bool = True) -> bytes:
        """Return the bytes that a token adds to the text, possibly an incomplete character. Control tokens are empty
        unless `special`.
        """
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
            return b""  # an unused token has no text
        if vocab.writes == SPACES:
            return _bytes(text.replace(SPACE, " "))
        if vocab.writes == ESCAPES:
            return unescaped(text)
        if vocab.writes == LETTERS:
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
    def _encoder(self) -> Encoder:
        return text_encoder(self._vocab)

    def _spelled(self, ids: list[int], without: Set[int]) -> Iterator[int]:
        """Yield `ids`, replacing each token in `without` with the tokens of its single letters."""
        for token in ids:
            if token not in without:
                yield token
                continue
            for letter in self.piece(token).decode("utf-8", "replace"):
                yield from (i for i in self._encoder.encode(letter, start=False) if i not in without)

    @cached_property
    def _special_by_prefix(self) -> dict[str, tuple[dict[str, tuple[int, int]], list[int]]]:
        """Special tokens by the first characters of their text: ((order, id) by text, lengths). `order` is by length in
        bytes, longest first.
        """
        tokens = self._vocab.tokens
        order = sorted(self.special.values(), key=lambda i: -len(_bytes(tokens[i])))
        groups: dict[str, tuple[dict[str, tuple[int, int]], list[int]]] = {}
        for position, token in enumerate(order):
            text = tokens[token]
            texts, lengths = groups.setdefault(text[:_PREFIX], ({}, []))
            texts[text] = (position, token)
            if len(text) not in lengths:
                insort(lengths, len(text))
        return groups

    def _found(self, text: str) -> list[tuple[int, int, int]]:
        """Return (order, position, token) for every special token in the text; takes one lookup per position and
        length.
        """
        found: list[tuple[int, int, int]] = []
        groups = self._special_by_prefix
        present = iter(groups)
        if len(groups) > _MANY:
            present = iter(groups.keys() & {text[i : i + n] for n in range(1, _PREFIX + 1) for i in range(len(text))})
        for prefix in present:
            texts, lengths = groups[prefix]
            place = text.find(prefix)
            while place >= 0:
                for length in lengths:
                    hit = texts.get(text[place : place + length])
                    if hit is not None and place + length <= len(text):
                        found.append((hit[0], place, hit[1]))
                place = text.find(prefix, place + 1)
        return sorted(found)

    def _parts(self, text: str, parse_special: bool, guard: SpecialGuard | None = None) -> list[str | int]:
        """Split `text` at its special tokens: longest tokens first, from left to right, without overlaps."""
        if not text:
            return []
        tokens, kinds = self._vocab.tokens, self._vocab.kinds
        taken = bytearray(len(text))
        found: list[tuple[int, int]] = []  # (position, token)
        for _, place, token in self._found(text):
            if kinds[token] & HIDDEN and not parse_special:
                continue
            stop = place + len(tokens[token])
            if taken.find(1, place, stop) < 0 and (guard is None or guard.allows(token, place, stop)):
                taken[place:stop] = b"\1" * (stop - place)
                found.append((place, token))
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
            if token in vocab.strip_before:
                between = between.rstrip(_C_SPACES)
            if between:
                parts.append(between)
            if token >= 0:
                parts.append(token)
                start = place + len(vocab.tokens[token])
                strip = token in vocab.strip_after
        return parts


_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_OF = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _valid(text: str) -> str:
    """Replace each surrogate in `text`, which cannot be encoded, with U+FFFD. Positions do not change."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


class StreamDecoder:
    """`push(id)` returns the text that the token completes, `finish()` the remainder; together they equal
    `decode(ids)`.

    Incomplete characters wait for their remaining bytes; bytes that never form a character become U+FFFD. `drop_space`
    drops the space that the vocabulary puts before the first word.
    """

    def __init__(self, piece: Callable[[int], bytes], drop_space: bool) -> None:
        self._piece = piece
        self._drop_space = drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that `token` completes, or ""; raise TokenizerError for an id outside the vocabulary."""
        piece = self._piece(token)
        if self._drop_space and piece:
            self._drop_space = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Return the remainder: U+FFFD for an incomplete character, otherwise ""."""
        return self._decoder.decode(b"", True)
