"""Read byte-level BPE from checkpoints without tokenizer.json: vocab.json, merges.txt, and a pre-tokenizer chosen by
class name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.convert.files import read_lines
from localllm.convert.jsonfile import read_json

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RULES = {"DreamTokenizer": _QWEN2}  # tokenizer class, whose code is not run -> pre-tokenizer
_MAX_BYTES = 1 << 26  # the largest known file has 2 MB


def as_fast(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the equivalent of tokenizer.json, or an empty table if the class is unknown or a file is missing."""
    rule = _RULES.get(str(settings.get("tokenizer_class")))
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if rule is None or not vocabulary.is_file() or not merges.is_file():
        return {}
    lines = read_lines(merges, _MAX_BYTES)
    return {
        "model": {
            "type": "BPE", "vocab": read_json(vocabulary),
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated"},
    }  # fmt: skip
