"""StableLM."""

from __future__ import annotations

from localllm.models.architecture import Architecture

ROWS = (Architecture("stablelm", "neox", norm="layer"),)
