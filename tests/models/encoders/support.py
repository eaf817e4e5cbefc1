"""Helpers for tests of encoders: bound encoders, and errors in the kit's terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from localllm.backends.base import Backend
from localllm.engine.encoder import Encoder
from localllm.models.encoders import encoder_of
from tests.models.support import MemoryWeight

ROWS, CENTERED = 2e-5, 1e-4  # limits of the kit


@contextmanager
def bound(
    backend: Backend, metadata: Mapping[str, Any], tensors: Mapping[str, MemoryWeight], kind: Literal["vision", "audio"]
) -> Iterator[Encoder]:
    encoder = Encoder(backend, encoder_of(metadata, tensors, kind))
    try:
        yield encoder
    finally:
        encoder.close()


def errors(ours: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Return the squared error divided by the square of the truth, and by its spread around the mean row."""
    assert ours.shape == truth.shape, f"{ours.shape}, not {truth.shape}"
    square = float(((ours.astype(np.float64) - truth) ** 2).sum())
    return square / float((truth.astype(np.float64) ** 2).sum()), square / float(((truth - truth.mean(0)) ** 2).sum())
