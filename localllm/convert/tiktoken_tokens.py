"""Vocabularies that a folder holds as tiktoken.model alone: Kimi's. Its code, which cuts text into words, is not run.

A line is a token in base64 and its rank, which is its id. tiktoken joins the neighbours whose token has the lowest
rank, so that the last pair that makes a token is its merge.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localllm.convert.errors import ConvertError
from localllm.convert.tokens import CONTROL, NORMAL, TokenizerFiles, Tokens, add_tokens
from localllm.printable import printable
from localllm.tokenizer.encoders import BYTE_LETTERS

FILE = "tiktoken.model"
NOTE = "capitals inside words do not begin a token, as in llama.cpp; Kimi's own code cuts there"
_MAX_BYTES = 1 << 24  # Kimi's has 3 MB
_MAX_TOKEN = 256  # bytes; Kimi's longest token has 128
_RESERVED = 256  # ids behind the tokens of the file; those without a name are <|reserved_token_N|>


def from_tiktoken(files: TokenizerFiles) -> dict[str, Any]:
    """Convert the file to the keys of byte-level BPE; ConvertError if it is not Kimi's, whose words are known."""
    path = files.folder / FILE
    if "kimi" not in str(files.settings.get("auto_map")).lower():
        raise ConvertError(
            f"{path}: tokenizer_config.json names no tokenizer of Kimi, so the rule that cuts text is unknown; load "
            "the tokenizer with transformers (AutoTokenizer) and save it as a fast one (tokenizer.json) into the folder"
        )
    ranks = _read(path, files.rows)
    tokens = Tokens.padding(files.rows)
    for token, rank in ranks.items():
        tokens.put(rank, _letters(token), NORMAL, 0.0)
    first = max(ranks.values()) + 1
    for i in range(first, first + _RESERVED):
        tokens.put(i, f"<|reserved_token_{i}|>", CONTROL, 0.0)
    add_tokens(tokens, files)
    pairs = (_merge(ranks, token, rank) for token, rank in sorted(ranks.items(), key=lambda item: item[1]))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "kimi-k2",
        "tokenizer.ggml.tokens": tokens.texts,
        "tokenizer.ggml.token_type": np.array(tokens.types, np.int32),
        "tokenizer.ggml.merges": [" ".join(_letters(part) for part in pair) for pair in pairs if len(pair) == 2],
    }


def _read(path: Path, rows: int) -> dict[bytes, int]:
    """Return the ranks of tokens."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConvertError(f"{path}: is larger than {_MAX_BYTES >> 20} MB; it cannot be a vocabulary")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConvertError(f"{path}: cannot be read: {error.strerror}") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            coded, rank = line.split()
            token, i = base64.b64decode(coded, validate=True), int(rank)
        except (binascii.Error, ValueError):
            raise ConvertError(f"{path}: line {number} is not a token and its rank; download it again") from None
        if not 0 <= i < rows or not 0 < len(token) <= _MAX_TOKEN or token in ranks:
            raise ConvertError(
                f"{path}: line {number}: token {printable(repr(token), 60)} of rank {printable(str(i), 20)} does not "
                f"belong to an embedding of {rows} rows, or is there twice"
            )
        ranks[token] = i
    if len(set(ranks.values())) != len(ranks) or not ranks:
        raise ConvertError(f"{path}: holds no tokens, or two of one rank; download it again")
    return ranks


def _merge(ranks: Mapping[bytes, int], token: bytes, limit: int) -> list[bytes]:
    """Return the parts of a token before its last merge: two, but for single bytes and tokens that no merge makes."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1))
        if rank >= limit:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _letters(token: bytes) -> str:
    return "".join(BYTE_LETTERS[byte] for byte in token)
