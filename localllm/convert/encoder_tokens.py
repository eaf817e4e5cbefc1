"""Convert the vocabularies of encoders: WordPiece (BERT) from tokenizer.json, and unigram models (XLM-RoBERTa, T5) from
tokenizer.json or SentencePiece's tokenizer.model."""

from __future__ import annotations

import base64
import binascii
import math
import re
from typing import Any

import numpy as np

from localllm.base.printable import printable
from localllm.convert.bpe_tokens import space_prefix
from localllm.convert.errors import ConvertError
from localllm.convert.jsonfile import steps
from localllm.convert.sentencepiece import Pieces
from localllm.convert.tokens import (
    ADDED_SCORE,
    BYTE,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    TokenizerFiles,
    Tokens,
    add_tokens,
    is_byte,
    vocabulary,
)

_SENTINEL = re.compile(r"<extra_id_\d+>")


def from_wordpiece(files: TokenizerFiles) -> dict[str, Any]:
    """Convert a WordPiece vocabulary. GGUF marks the tokens that begin a word; tokenizer.json marks the tokens that
    continue one."""
    inner = files.model.get("continuing_subword_prefix", "##")
    if not isinstance(inner, str) or not inner:
        raise ConvertError(f"{files.path}: model.continuing_subword_prefix is not a text; download it again")
    tokens, ids = Tokens.padding(files.rows), dict(vocabulary(files))
    for text, i in ids.items():
        tokens.put(i, text.removeprefix(inner) if text.startswith(inner) else SPACE + text, NORMAL, 0.0)
    add_tokens(tokens, files)
    kinds = [
        step for step in steps(files.fast.get("normalizer"), "normalizers") if step.get("type") == "BertNormalizer"
    ]
    lowercase = bool(kinds) and kinds[0].get("lowercase") is True
    accents = kinds[0].get("strip_accents") if kinds else False
    return {
        **tokens.keys("bert"),
        "tokenizer.ggml.normalizer.lowercase": lowercase,
        "tokenizer.ggml.normalizer.strip_accents": lowercase if accents is None else accents is True,
        "tokenizer.ggml.unknown_token_id": _unknown(files, ids.get(str(files.model.get("unk_token")))),
    }


def from_unigram(files: TokenizerFiles) -> dict[str, Any]:
    """Convert a unigram model: tokens with scores, and the table that normalizes characters."""
    tokens, scored = Tokens.padding(files.rows), _scored(files)
    by_bytes, unknown = files.model.get("byte_fallback") is True, _unknown(files, files.model.get("unk_id"))
    for i, (text, score) in enumerate(scored):
        kind = UNKNOWN if i == unknown else BYTE if by_bytes and is_byte(text) else NORMAL
        tokens.put(i, text, kind, score)
    add_tokens(tokens, files)
    normalizers = steps(files.fast.get("normalizer"), "normalizers")
    splits = steps(files.fast.get("pre_tokenizer"), "pretokenizers")
    merged = any(step.get("type") == "WhitespaceSplit" for step in splits) or any(
        step.get("type") == "Replace" and step.get("pattern") == {"Regex": " {2,}"} for step in normalizers
    )
    tables = [step.get("precompiled_charsmap") for step in normalizers if step.get("type") == "Precompiled"]
    charsmap = _decoded(files, tables[0]) if tables and tables[0] else b""
    return _unigram_keys(tokens, unknown, space_prefix(files.fast), merged, charsmap)


def from_unigram_pieces(pieces: Pieces, files: TokenizerFiles) -> dict[str, Any]:
    """Convert tokenizer.model, as in checkpoints of mT5 and T5 1.1. T5's sentinel tokens follow the pieces."""
    tokens, count = Tokens.padding(files.rows), len(pieces.tokens)
    for i, piece in enumerate(pieces.tokens):
        tokens.put(i, *piece)
    sentinels = files.settings.get("extra_ids")
    if type(sentinels) is int:
        for i in range(count, min(count + sentinels, files.rows)):
            tokens.put(i, f"<extra_id_{count + sentinels - 1 - i}>", USER_DEFINED, ADDED_SCORE)
    add_tokens(tokens, files)
    unknown = next((i for i, piece in enumerate(pieces.tokens) if piece[1] == UNKNOWN), None)
    return _unigram_keys(tokens, _unknown(files, unknown), pieces.space_prefix, pieces.merge_spaces, pieces.charsmap)


def _unigram_keys(tokens: Tokens, unknown: int, prefix: bool, merged: bool, charsmap: bytes) -> dict[str, Any]:
    """Return the GGUF keys. T5's sentinel tokens can occur in the output, so they are stored as text, as in
    llama.cpp."""
    for i, text in enumerate(tokens.texts):
        if _SENTINEL.fullmatch(text):
            tokens.types[i] = USER_DEFINED
    keys: dict[str, Any] = {
        **tokens.keys("t5", scored=True),
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.remove_extra_whitespaces": merged,
        "tokenizer.ggml.unknown_token_id": unknown,
    }
    if charsmap:
        keys["tokenizer.ggml.precompiled_charsmap"] = np.frombuffer(charsmap, np.uint8)
    return keys


def _unknown(files: TokenizerFiles, token: object) -> int:
    if type(token) is not int or not 0 <= token < files.rows:
        raise ConvertError(f"{files.folder}: the tokenizer has no token for unknown text, which encoders need")
    return token


def _scored(files: TokenizerFiles) -> list[tuple[str, float]]:
    """Return the tokens with their scores."""
    listed = files.model.get("vocab")
    if not isinstance(listed, list) or not listed or not all(isinstance(item, list) and _pair(item) for item in listed):
        raise ConvertError(f"{files.path}: model.vocab is not a list of tokens with scores; download it again")
    if len(listed) > files.rows:
        raise ConvertError(
            f"{files.path}: token '{printable(listed[files.rows][0])}' has the id {files.rows}, but the embedding has "
            f"{files.rows} rows; tokenizer and weights do not match"
        )
    return [(text, float(score)) for text, score in listed]


def _pair(item: list[Any]) -> bool:
    return len(item) == 2 and isinstance(item[0], str) and type(item[1]) in (int, float) and math.isfinite(item[1])


def _decoded(files: TokenizerFiles, table: object) -> bytes:
    try:
        return base64.b64decode(str(table), validate=True)
    except (binascii.Error, ValueError):
        raise ConvertError(f"{files.path}: precompiled_charsmap is not base64; download it again") from None
