"""Convert PLaMo's vocabulary, tokenizer.jsonl, whose lines are [text, score, kind, ...]. The reference tokenizer
chooses the segmentation with the highest total score, like the GGUF tokenizer model "plamo2". The reference code is not
run.
"""

from __future__ import annotations

import json
import math
from typing import Any

from localllm.convert.errors import ConvertError
from localllm.convert.files import read_lines
from localllm.convert.tokens import BYTE, CONTROL, NORMAL, UNKNOWN, TokenizerFiles, Tokens

FILE = "tokenizer.jsonl"
_MAX_BYTES = 1 << 26  # PLaMo 2's file has 6 MB
_KINDS = {"NORMAL": NORMAL, "UNKNOWN": UNKNOWN, "CONTROL": CONTROL, "BYTE": BYTE}
_TURN = 4  # <|plamo:op|>, which begins the next turn


def from_plamo(files: TokenizerFiles) -> dict[str, Any]:
    """Convert the file to GGUF keys; raise a one-line ConvertError if it is damaged."""
    path = files.folder / FILE
    lines = [line for line in read_lines(path, _MAX_BYTES) if line.strip()]
    tokens = Tokens.padding(files.rows)
    if not _TURN < len(lines) <= files.rows:
        raise ConvertError(
            f"{path}: has {len(lines)} tokens, but the embedding has {files.rows} rows; they do not match"
        )
    for i, line in enumerate(lines):
        text, score, kind = _entry(line) or ("", math.nan, NORMAL)
        if not math.isfinite(score):
            raise ConvertError(f"{path}: line {i + 1} is not a token with its score and kind; download it again")
        looks_special = text.startswith("<|plamo:") and text.endswith("|>")
        tokens.put(i, text, CONTROL if kind == NORMAL and looks_special else kind, score)
    return {
        **tokens.keys("plamo2", scored=True),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.eot_token_id": _TURN,
    }


def _entry(line: str) -> tuple[str, float, int] | None:
    """Return text, score and kind from a line; None if the line is invalid."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or len(found) < 2:
        return None
    text, score, kind = found[0], found[1], found[2] if len(found) > 2 else "NORMAL"
    if not isinstance(text, str) or type(score) not in (int, float) or not isinstance(kind, str):
        return None
    return text, float(score), _KINDS.get(kind, NORMAL)
