"""The built-in presets: options by name, for `--preset NAME`. A preset of the same name in a file replaces it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # A high temperature makes unlikely tokens likelier. min_p keeps the text coherent, so top_k and top_p are off.
    "creative": {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
    # Greedy sampling always chooses the most likely token, so the output is reproducible.
    "precise": {"temperature": 0.0},
    # A low temperature prefers the most likely tokens. Code repeats itself, so repetition is not penalized.
    "coding": {
        "temperature": 0.2, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "dry_multiplier": 0.0,
    },
}  # fmt: skip
