"""Read the metadata of a checkpoint: the model's name, the front matter of its model card, and recommended sampling
options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from localllm.base.files.regular import open_regular
from localllm.convert.files import check_inside
from localllm.convert.hf_config import HfConfig
from localllm.convert.jsonfile import read_json

_MAX_CARD = 1 << 16  # maximum bytes of README.md to read; the front matter has a few hundred
_TEXTS = {"license": "license", "license_name": "license.name", "license_link": "license.link"}
_LISTS = {"tags": "tags", "language": "languages"}
_SNAPSHOT = re.compile(r"[0-9a-f]{40}")  # directory in the huggingface_hub cache: models--OWNER--NAME/snapshots/HASH
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_SAMPLING = {"top_p": "top_p", "min_p": "min_p", "temp": "temperature", "penalty_repeat": "repetition_penalty"}


def general_keys(folder: Path, parameters: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the `general.*` keys of a model with this number of parameters, and a note if its model card cannot be
    read."""
    keys: dict[str, Any] = {
        "general.type": "model",
        "general.name": _name(folder),
        "general.size_label": size_label(parameters),
    }
    notes: tuple[str, ...] = ()
    try:
        card = _card(folder / "README.md")
    except OSError as error:
        card = {}
        what = "the file gets no license, tags and languages"
        notes = (f"README.md cannot be read ({error.strerror or error}), so {what}",)
    for name, key in _TEXTS.items():
        if isinstance(value := card.get(name), str):
            keys["general." + key] = value
    for name, key in _LISTS.items():
        if value := card.get(name):
            keys["general." + key] = [value] if isinstance(value, str) else value
    return keys, notes


def sampling_keys(folder: Path) -> dict[str, Any]:
    """Return the `general.sampling.*` keys from generation_config.json."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    config = HfConfig(path, read_json(path), {})
    found = {f"general.sampling.{key}": config.real(name) for key, name in _SAMPLING.items()}
    keys: dict[str, Any] = {key: np.float32(value) for key, value in found.items() if value is not None}
    if (top_k := config.integer("top_k")) is not None:
        keys["general.sampling.top_k"] = np.int32(top_k)
    return keys


def size_label(parameters: int) -> str:
    """Format a parameter count with at least two significant digits and the suffix K, M, B or T: 1.2B, 134M."""
    scale, unit = next((s, u) for s, u in _UNITS if parameters > s or u == "K")
    number = parameters / scale
    return f"{number:.{1 if round(number) < 10 else 0}f}{unit}"


def _name(folder: Path) -> str:
    """Return the folder's name or, in the huggingface_hub cache, the name of the model."""
    path = folder.resolve()
    if _SNAPSHOT.fullmatch(path.name) and path.parent.name == "snapshots":
        return path.parent.parent.name.split("--")[-1]
    return path.name or "model"


def _card(path: Path) -> dict[str, str | list[str]]:
    """Return the strings and lists of strings at the top level of the model card's YAML front matter (between two
    `---`).

    Raises OSError if the card cannot be read, and ConvertError if a link leads out of the folder.
    """
    if not path.is_file():
        return {}
    check_inside(path)
    with open_regular(path) as file:
        lines = file.read(_MAX_CARD).decode("utf-8", "replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    found: dict[str, str | list[str]] = {}
    items: list[str] | None = None
    for line in lines[1:]:
        if line.strip() == "---":
            return found
        if (item := re.fullmatch(r"\s*- +([^:#]+|\S+)\s*", line)) and items is not None:
            items.append(_scalar(item[1]))
        elif pair := re.fullmatch(r"([A-Za-z_]+):\s*(.*?)\s*", line):
            items = None
            if pair[2].startswith("[") and pair[2].endswith("]"):
                found[pair[1]] = [_scalar(part) for part in pair[2][1:-1].split(",") if part.strip()]
            elif pair[2]:
                found[pair[1]] = _scalar(pair[2])
            else:
                found[pair[1]] = items = []
    return {}  # the front matter is not terminated


def _scalar(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
