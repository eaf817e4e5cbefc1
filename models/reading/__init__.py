"""Converts a GGUF's metadata keys to a model `Config`: one module per part. Families begin with `read_general`."""

from __future__ import annotations

from localllm.models.reading.config import read_general
from localllm.models.reading.keys import Keys

__all__ = ["Keys", "read_general"]
