"""Finds the architecture of a GGUF in `models.architectures`, and reads the configuration as its family does."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from localllm.base.notices import FILE, Notice, Setting
from localllm.models.architecture import Architecture
from localllm.models.architectures import ARCHITECTURES
from localllm.models.config import Config
from localllm.models.errors import ModelError
from localllm.models.families import DRAFTERS
from localllm.models.reading.keys import Keys


def is_mmproj(metadata: Mapping[str, Any]) -> bool:
    """Return whether a GGUF has encoders of pictures or sound instead of a model."""
    name = metadata.get("general.architecture")
    return isinstance(name, str) and name == "clip"


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Return the entry for `general.architecture`; for an unknown name, ModelError suggests the most similar one."""
    name = metadata.get("general.architecture")
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is not None:
        return row
    if not isinstance(name, str):
        problem = "the key is missing" if name is None else f"expected a name, found {str(name)[:60]!r}"
        raise ModelError(f"general.architecture: {problem}; {len(ARCHITECTURES)} architectures are supported")
    if name in DRAFTERS:
        problem = f"general.architecture: {name} files draft for a model; open the model itself, with "
        raise ModelError(Notice(problem, Setting("model_draft", FILE), " for this one"))
    nearest = max(ARCHITECTURES, key=lambda known: SequenceMatcher(None, name[:60], known).ratio())
    raise ModelError(
        f"general.architecture: {name[:60]!r} is not supported; the nearest of {len(ARCHITECTURES)} supported ones is "
        f"{nearest!r}"
    )


def read_config(metadata: Mapping[str, Any], architecture: str, head: int = 0) -> Config:
    """Read the `Config` of a model from the keys with prefix `architecture + "."`; ModelError names the invalid key.

    `head` is the number of multi-token-prediction heads to count as layers after the model's layers.
    """
    row = ARCHITECTURES[architecture]
    return row.read(Keys(metadata, architecture + "."), row, head)
