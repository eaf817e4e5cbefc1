"""Convert BPE vocabularies: SentencePiece (from tokenizer.model or tokenizer.json), byte-level (GPT-2) and UTF-8 (Gemma
4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.convert.errors import ConvertError
from localllm.convert.jsonfile import steps
from localllm.convert.pretokenizer import pre_tokenizer_name
from localllm.convert.sentencepiece import Pieces
from localllm.convert.tokens import (
    BYTE,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    TokenizerFiles,
    Tokens,
    add_tokens,
    is_byte,
    merges,
    vocabulary,
)

# The checkpoint marks these as special tokens, but the model generates them as part of its output. GGUF files store
# them as text, so that the output parser sees them.
_GEMMA4_VISIBLE = (
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
)  # fmt: skip


def from_pieces(pieces: Pieces, files: TokenizerFiles) -> dict[str, Any]:
    """Convert a SentencePiece BPE model. tokenizer.json, if present, decides whether a space is prepended to the
    text."""
    tokens = Tokens.padding(files.rows)
    for i, piece in enumerate(pieces.tokens):
        tokens.put(i, *piece)
    add_tokens(tokens, files)
    prefix = space_prefix(files.fast) if files.fast else pieces.space_prefix
    return _spm_keys(tokens, prefix)


def from_merges(files: TokenizerFiles) -> dict[str, Any]:
    """Convert a SentencePiece vocabulary from tokenizer.json only. Scores follow the order of the merges: an earlier
    merge gives its token a higher score."""
    tokens = Tokens.padding(files.rows)
    rank: dict[str, int] = {}
    for i, merge in enumerate(merges(files)):
        rank.setdefault(merge[0] + merge[1], i)
    unknown = files.model.get("unk_token")
    for text, i in vocabulary(files):
        kind = UNKNOWN if text == unknown else BYTE if is_byte(text) else NORMAL
        tokens.put(i, text, kind, -float(rank.get(text, len(rank))) if kind == NORMAL else 0.0)
    add_tokens(tokens, files)
    return _spm_keys(tokens, space_prefix(files.fast))


def from_bytes(files: TokenizerFiles) -> dict[str, Any]:
    """Convert a byte-level BPE vocabulary."""
    tokens = Tokens.padding(files.rows)
    for text, i in vocabulary(files):
        tokens.put(i, text, NORMAL, 0.0)
    add_tokens(tokens, files)
    try:
        pre = pre_tokenizer_name(files.fast.get("pre_tokenizer"), files.model.get("ignore_merges") is True)
    except ConvertError as error:
        raise ConvertError(f"{files.folder}: {error}") from None
    escaped = ((left.replace(" ", "Ġ"), right.replace(" ", "Ġ")) for left, right in merges(files))
    return {
        **tokens.keys("gpt2", pre),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in escaped],
    }


def from_utf8(files: TokenizerFiles) -> dict[str, Any]:
    """Convert Gemma 4's vocabulary: SentencePiece characters with an explicit list of merges."""
    tokens = Tokens.padding(files.rows)
    for text, i in vocabulary(files):
        kind = UNKNOWN if text == files.model.get("unk_token") else BYTE if is_byte(text) else NORMAL
        tokens.put(i, text, kind, 0.0)
    add_tokens(tokens, files)
    for i, text in enumerate(tokens.texts):
        if text in _GEMMA4_VISIBLE:
            tokens.types[i] = USER_DEFINED
    return {
        **tokens.keys("gemma4", ""),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges(files)],
        "tokenizer.ggml.add_space_prefix": False,
    }


def _spm_keys(tokens: Tokens, space_prefix: bool) -> dict[str, Any]:
    return tokens.keys("llama", scored=True) | {"tokenizer.ggml.add_space_prefix": space_prefix}


def space_prefix(fast: Mapping[str, Any]) -> bool:
    """Return whether the normalizer or pre-tokenizer in tokenizer.json prepends a space to the text."""
    for part, name in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        for step in steps(fast.get(part), name):
            if step.get("type") == "Prepend":
                return True
            if step.get("type") == "Metaspace":
                scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
                return bool(scheme != "never")
    return False
