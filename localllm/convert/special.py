"""Special tokens, and the special tokens added before and after a text, from all files of a checkpoint that can define
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localllm.convert.hf_config import HfConfig
from localllm.convert.jsonfile import steps
from localllm.convert.tokens import optional
from localllm.tokenizer.vocab import read_vocab

_KEY = "tokenizer.ggml."
_ROLES = {  # name in the checkpoint: name in GGUF
    "bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask",
}  # fmt: skip


def special_keys(
    folder: Path, fast: Mapping[str, Any], settings: Mapping[str, Any], config: HfConfig, keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the token ids, add_bos_token, add_eos_token and suppress_tokens. `keys` must already contain the
    vocabulary."""
    tokens: list[str] = keys[_KEY + "tokens"]
    ids = {text: i for i, text in reversed(list(enumerate(tokens)))}
    # without generation_config.json, transformers reads config.json
    generation = optional(folder / "generation_config.json") or {"eos_token_id": config.get("eos_token_id")}
    table = optional(folder / "special_tokens_map.json")
    texts = {role: _text(settings.get(f"{role}_token")) or _text(table.get(f"{role}_token")) for role in _ROLES}
    first, last = _around(fast)
    texts["bos"] = texts["bos"] or first
    if texts["eos"] is None and last is not None:  # `last` is an encoder's separator
        texts["sep"] = texts["sep"] or last
        texts["eos"] = last if keys[_KEY + "model"] != "bert" else None
    found: dict[str, Any] = {}
    for role, name in _ROLES.items():
        by_text = ids.get(texts[role] or "")
        by_number = next(_numbers(config.get(f"{role}_token_id"), len(tokens)), None)
        token = by_text if by_text is not None else by_number
        if token is not None:
            found[f"{_KEY}{name}_token_id"] = token
    for role, text in (("bos", first), ("eos", last)):
        flag = _flag(role, text, texts[role], fast, settings)
        if flag is not None:
            found[f"{_KEY}add_{role}_token"] = flag
    if suppressed := list(_numbers(generation.get("suppress_tokens"), len(tokens))):
        found[_KEY + "suppress_tokens"] = np.array(suppressed, np.int32)
    return found | _further_ends(generation, {**keys, **found})


def _text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _numbers(value: Any, count: int) -> Iterator[int]:
    """Yield the valid token ids in an integer or a list."""
    for number in value if isinstance(value, list) else [value]:
        if type(number) is int and 0 <= number < count:
            yield number


def _around(fast: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the special tokens that tokenizer.json adds before and after a text."""
    for processor in _processors(fast):
        if processor.get("type") in ("BertProcessing", "RobertaProcessing"):
            ends = [processor.get(name) for name in ("cls", "sep")]
            first, last = (end[0] if isinstance(end, list) and end else None for end in ends)
            return _text(first), _text(last)
        single = processor.get("single") if processor.get("type") == "TemplateProcessing" else None
        if isinstance(single, list) and single:
            ends = [part.get("SpecialToken") if isinstance(part, dict) else None for part in (single[0], single[-1])]
            first, last = (end.get("id") if isinstance(end, dict) else None for end in ends)
            return _text(first), _text(last)
    return None, None


def _processors(fast: Mapping[str, Any]) -> list[dict[str, Any]]:
    return steps(fast.get("post_processor"), "processors")


def _flag(
    role: str, text: str | None, role_text: str | None, fast: Mapping[str, Any], settings: Mapping[str, Any]
) -> bool | None:
    """Return the flag from tokenizer.json, else from tokenizer_config.json, or None if neither sets it."""
    if _processors(fast):
        return text is not None and text == role_text
    setting = settings.get(f"add_{role}_token")
    if isinstance(setting, bool):
        return setting
    return False if fast else None


def _further_ends(generation: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, int]:
    """Return the end-of-generation tokens that only generation_config.json lists; GGUF has keys for two such tokens."""
    known = read_vocab(keys).ends
    further = [i for i in _numbers(generation.get("eos_token_id"), len(keys[_KEY + "tokens"])) if i not in known]
    return {f"{_KEY}{name}_token_id": i for name, i in zip(("eot", "eom"), further, strict=False)}
