"""The chat templates of a checkpoint: one, or several by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.convert.files import check_inside, read_file
from localllm.convert.jsonfile import read_json

_MAX_BYTES = 1 << 20  # the largest known template has 50 KB
_KEY = "tokenizer.chat_template"


def template_keys(folder: Path, settings: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """Return `tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for each additional template.

    Templates in separate files override tokenizer_config.json, and both override the `known` templates.
    """
    templates = dict(known)
    stored = settings.get("chat_template")
    if stored is None and (older := folder / "chat_template.json").is_file():
        stored = read_json(older).get("chat_template")
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, list):
        for entry in stored:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name"))] = entry["template"]
    if (path := folder / "chat_template.jinja").is_file():
        templates["default"] = read_file(path, _MAX_BYTES).decode("utf-8", "replace")
    check_inside(folder / "additional_chat_templates")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_file(path, _MAX_BYTES).decode("utf-8", "replace")
    named = {re.sub("[^A-Za-z0-9]", "_", name): text for name, text in templates.items() if name != "default"}
    keys: dict[str, Any] = {f"{_KEY}.{name}": text for name, text in named.items()}
    if named:
        keys[_KEY + "s"] = list(named)
    if "default" in templates:
        keys[_KEY] = templates["default"]
    return keys
