"""The arrays of a GGUF vocabulary, and the checkpoint files that define them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localllm.base.printable import printable
from localllm.convert.errors import ConvertError
from localllm.convert.jsonfile import objects, read_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types in GGUF files
SPACE = "\u2581"
ADDED_SCORE, _PADDING_SCORE = -1000.0, -10000.0  # as in llama.cpp's converter; merging never yields such tokens
_LOOKS_SPECIAL = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
_SPECIAL_TEXTS = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")  # not marked as control tokens in some checkpoints


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The content of a checkpoint's tokenizer files, and the number of rows in the token embedding."""

    folder: Path
    fast: Mapping[str, Any]  # tokenizer.json
    settings: Mapping[str, Any]  # tokenizer_config.json
    rows: int

    @property
    def path(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def model(self) -> Mapping[str, Any]:
        """Return the `model` table of tokenizer.json."""
        model = self.fast.get("model") or {}
        if not isinstance(model, dict):
            raise ConvertError(f"{self.path}: model is not an object; download it again")
        return model


@dataclass(slots=True)
class Tokens:
    """The three arrays of a GGUF vocabulary. Ids that the checkpoint does not define are padding."""

    texts: list[str]
    types: list[int]
    scores: list[float]

    @classmethod
    def padding(cls, count: int) -> Tokens:
        return cls([f"[PAD{i}]" for i in range(count)], [UNUSED] * count, [_PADDING_SCORE] * count)

    def put(self, i: int, text: str, kind: int, score: float) -> None:
        """Set token i. A token beyond the rows of the embedding has no weights and is dropped."""
        if i < len(self.texts):
            self.texts[i], self.types[i], self.scores[i] = text, kind, score

    def keys(self, model: str, pre: str = "default", scored: bool = False) -> dict[str, Any]:
        """Return the GGUF keys of the arrays, of the tokenizer model, and of the pre-tokenizer if there is one."""
        return {
            "tokenizer.ggml.model": model,
            **({"tokenizer.ggml.pre": pre} if pre else {}),
            "tokenizer.ggml.tokens": self.texts,
            **({"tokenizer.ggml.scores": np.array(self.scores, np.float32)} if scored else {}),
            "tokenizer.ggml.token_type": np.array(self.types, np.int32),
        }


def vocabulary(files: TokenizerFiles) -> list[tuple[str, int]]:
    """Return the tokens and ids of a vocabulary stored as a JSON object."""
    found = files.model.get("vocab")
    if not isinstance(found, dict) or not found:
        raise ConvertError(f"{files.path}: model.vocab is not an object of tokens; download it again")
    for text, i in found.items():
        if type(i) is not int or not 0 <= i < files.rows:
            raise ConvertError(
                f"{files.path}: token '{printable(text)}' has the id {printable(str(i))}, but the "
                f"embedding has {files.rows} rows; tokenizer and weights do not match"
            )
    return list(found.items())


def merges(files: TokenizerFiles) -> list[tuple[str, str]]:
    """Return the merges, highest priority first. Older files write a pair as one string with a space."""
    listed = files.model.get("merges")
    pairs = [m.split(" ") if isinstance(m, str) else m for m in listed] if isinstance(listed, list) else [None]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ConvertError(f"{files.path}: model.merges is not a list of pairs; download it again")
    return [(pair[0], pair[1]) for pair in pairs if pair]


def is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def add_tokens(tokens: Tokens, files: TokenizerFiles) -> None:
    """Add the added tokens of all files to the vocabulary. More reliable files come later and override earlier
    files."""
    listed: dict[int, tuple[str, bool]] = {}
    for text, i in optional(files.folder / "added_tokens.json").items():
        if type(i) is int and i >= 0:
            listed[i] = (text, False)
    decoder = files.settings.get("added_tokens_decoder")
    entries = [{"id": i, **e} for i, e in decoder.items() if isinstance(e, dict)] if isinstance(decoder, dict) else []
    for entry in (*entries, *objects(files.fast.get("added_tokens"))):
        number, content = str(entry.get("id")), entry.get("content")
        if not number.isdecimal() or len(number) > 9 or not isinstance(content, str):
            raise ConvertError(f"{files.folder}: an added token has no id or no content; download the tokenizer again")
        listed[int(number)] = (content, entry.get("special") is True)
    for i, (text, special) in listed.items():
        known = tokens.types[i] if i < len(tokens.types) else UNUSED
        if known == UNKNOWN:
            tokens.put(i, text, UNKNOWN, 0.0)
        elif special or _looks_special(text):
            tokens.put(i, text, CONTROL, ADDED_SCORE)
        else:
            tokens.put(i, text.replace(SPACE, " "), USER_DEFINED, ADDED_SCORE)


def _looks_special(text: str) -> bool:
    return text in _SPECIAL_TEXTS or any(text.startswith(begin) and text.endswith(end) for begin, end in _LOOKS_SPECIAL)


def optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
