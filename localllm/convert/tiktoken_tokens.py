"""Convert vocabularies of checkpoints that only have a tiktoken file: Kimi, Qwen 1 and GLM 4 (2024). Their tokenizer
code is not run; the class name determines the pre-tokenizer.

A line is a token in base64 and its rank, which is its id. tiktoken merges the adjacent pair with the lowest rank first,
so a token's merge is the last pair that forms it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.base.printable import printable
from localllm.convert.errors import ConvertError
from localllm.convert.files import read_file
from localllm.convert.tokens import CONTROL, NORMAL, TokenizerFiles, Tokens, add_tokens
from localllm.tokenizer.encoders import BYTE_LETTERS

FILE = "tiktoken.model"
_MAX_BYTES = 1 << 24  # Kimi's file has 3 MB
_MAX_TOKEN = 256  # bytes; Kimi's longest token has 128


@dataclass(frozen=True, slots=True)
class TiktokenKind:
    """A tokenizer with a known pre-tokenizer. `specials` are the texts of the ids after the file's last id; {} is the
    id."""

    name: str  # part of the class name in tokenizer_config.json, in lower case
    file: str
    pre: str
    specials: tuple[str, ...] = ()
    end: str = ""  # the end-of-text token, if no file sets it
    add_bos: bool | None = None
    note: str = ""


_KINDS = (
    TiktokenKind(
        "kimi", FILE, "kimi-k2", ("<|reserved_token_{}|>",) * 256,  # unnamed special tokens
        note="capitals inside words do not begin a token, as in llama.cpp; Kimi's own code splits there",
    ),
    TiktokenKind(
        "qwentokenizer", "qwen.tiktoken", "qwen2",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
        end="<|endoftext|>", add_bos=False,
    ),
    TiktokenKind("chatglm4tokenizer", "tokenizer.model", "chatglm-bpe", add_bos=False),
)  # fmt: skip


def tiktoken_kind(files: TokenizerFiles) -> TiktokenKind | None:
    """Return the kind of the checkpoint's tiktoken file, or None without one; raise ConvertError if its pre-tokenizer
    is unknown."""
    said = f"{files.settings.get('auto_map')} {files.settings.get('tokenizer_class')}".lower()
    for kind in _KINDS:
        if kind.name in said and (files.folder / kind.file).is_file():
            return kind
    for name in {kind.file for kind in _KINDS} - {"tokenizer.model"}:  # tokenizer.model may be a SentencePiece model
        if (path := files.folder / name).is_file():
            raise ConvertError(
                f"{path}: tokenizer_config.json names no tokenizer of Kimi or Qwen, so the pre-tokenizer is unknown; "
                "load the tokenizer with transformers (AutoTokenizer) and save it as a fast one "
                "(tokenizer.json) into the folder"
            )
    return None


def from_tiktoken(files: TokenizerFiles, kind: TiktokenKind) -> dict[str, Any]:
    """Convert the file to the GGUF keys of byte-level BPE."""
    ranks = _read(files.folder / kind.file, files.rows)
    tokens = Tokens.padding(files.rows)
    for token, rank in ranks.items():
        tokens.put(rank, _letters(token), NORMAL, 0.0)
    for i, text in enumerate(kind.specials, max(ranks.values()) + 1):
        tokens.put(i, text.format(i), CONTROL, 0.0)
    add_tokens(tokens, files)
    pairs = (_merge(ranks, token, rank) for token, rank in sorted(ranks.items(), key=lambda item: item[1]))
    keys: dict[str, Any] = {
        **tokens.keys("gpt2", kind.pre),
        "tokenizer.ggml.merges": [" ".join(_letters(part) for part in pair) for pair in pairs if len(pair) == 2],
    }
    if kind.end in tokens.texts:
        keys |= {f"tokenizer.ggml.{x}_token_id": tokens.texts.index(kind.end) for x in ("bos", "eos", "unknown")}
    return keys if kind.add_bos is None else {**keys, "tokenizer.ggml.add_bos_token": kind.add_bos}


def _read(path: Path, rows: int) -> dict[bytes, int]:
    """Return the rank of each token."""
    lines = read_file(path, _MAX_BYTES).splitlines()
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
                f"belong to an embedding of {rows} rows, or occurs twice"
            )
        ranks[token] = i
    if len(set(ranks.values())) != len(ranks) or not ranks:
        raise ConvertError(f"{path}: no tokens, or two with the same rank; download it again")
    return ranks


def _merge(ranks: Mapping[bytes, int], token: bytes, limit: int) -> list[bytes]:
    """Return a token's parts before its last merge: usually two. A byte has one part, and an unreachable token has more
    than two."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1))
        if rank >= limit:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _letters(token: bytes) -> str:
    return "".join(BYTE_LETTERS[byte] for byte in token)
