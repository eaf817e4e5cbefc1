"""Read tokenizer.model, a SentencePiece model in protobuf format: pieces with scores and types.

Only the fields that GGUF stores are read (sentencepiece_model.proto: ModelProto.pieces = 1, trainer_spec = 2,
normalizer_spec = 3).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localllm.convert.errors import ConvertError
from localllm.convert.files import read_file

UNIGRAM, BPE = 1, 2  # model types
_KINDS = {UNIGRAM: "Unigram", BPE: "BPE", 3: "word", 4: "char"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Pieces:
    """A SentencePiece vocabulary."""

    # Text, GGUF token type (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte) and score of each token.
    tokens: list[tuple[str, int, float]]
    kind: int
    space_prefix: bool  # prepend a space to the text
    merge_spaces: bool  # collapse consecutive spaces
    charsmap: bytes  # normalization table, in the format that GGUF also stores


def read_pieces(path: Path) -> Pieces:
    """Read a BPE or unigram model; raise ConvertError for other model types and for a damaged file."""
    data = read_file(path)
    try:
        return _pieces(path, data)
    except (ValueError, TypeError, IndexError, struct.error):
        raise ConvertError(f"{path}: is not a SentencePiece model, or damaged; download it again") from None


def _pieces(path: Path, data: bytes) -> Pieces:
    tokens: list[tuple[str, int, float]] = []
    rules: dict[int, int | bytes] = {}
    model = UNIGRAM
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_message(value)))
            score = struct.unpack("<f", _message(piece.get(2, bytes(4))))[0]
            tokens.append((_message(piece.get(1, b"")).decode(), int(piece.get(3, 1)), score))
        elif number == 2:
            model = int(dict(_fields(_message(value))).get(3, UNIGRAM))
        elif number == 3:
            rules = dict(_fields(_message(value)))
    if not tokens or not all(1 <= kind <= 6 for _, kind, _ in tokens):
        raise ValueError
    if model not in (UNIGRAM, BPE):
        raise ConvertError(f"{path}: is a {_KINDS.get(model, 'strange')} model; supported: BPE, Unigram")
    return Pieces(tokens, model, bool(rules.get(3, 1)), bool(rules.get(4, 1)), _message(rules.get(2, b"")))


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each protobuf field: an int for a varint, bytes for other wire types."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, position = _varint(data, position)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError
        if position + size > len(data):
            raise ValueError
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a varint (seven bits per byte, lowest first) and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError
