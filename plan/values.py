"""Values, the inputs and outputs of operations, and the rotation of queries and keys by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Rows = Literal["batch", "logits"]
RopeStyle = Literal["interleaved", "neox"]  # rotate (2i, 2i+1), or (i, i + n_rot/2)


@dataclass(frozen=True, slots=True)
class Value:
    """A float32 matrix (T or L rows, width) computed by one operation and read by later ones."""

    index: int
    width: int
    rows: Rows
    name: str


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the first `n_rot` dimensions of every head.

    The angle of pair i at position p is `p * inverse_frequency[i]`; cosine and sine are multiplied by `magnitude` and,
    if `temperature` is not zero, by `1 + temperature * ln(1 + floor((p + temperature_start) / temperature_length))`
    (the query temperature of Ministral 3 and Llama 4). Position p is the token's position plus `shift`, at least 0.
    `rope_table` defines the exact values.

    With `axes`, tokens have several positions, such as row and column of an image patch: pair i turns by the position
    on axis `axes[i]` (`Batch.axes`).
    """

    style: RopeStyle
    n_rot: int
    inverse_frequency: tuple[float, ...]  # (n_rot/2,)
    magnitude: float = 1.0
    temperature: float = 0.0
    temperature_length: int = 1
    temperature_start: int = 0
    shift: int = 0
    axes: tuple[int, ...] = ()  # (n_rot/2,), or empty: all pairs turn by the token's position

    def __post_init__(self) -> None:
        assert not self.axes or (len(self.axes) == self.n_rot // 2 and min(self.axes) >= 0), f"axes {self.axes}"

    def factors(self, positions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the factors on cosine and sine at these positions."""
        lengths = np.floor((positions + self.temperature_start) / self.temperature_length)
        return self.magnitude * (1.0 + self.temperature * np.log1p(lengths))


def rope_table(rope: Rope, positions: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the cosines and sines of every position and pair, float64 (positions, n_rot/2), times the magnitude.

    Positions are (positions,), or (positions, n_rot/2) if every pair has its own.
    """
    of_pairs = positions[:, None] if positions.ndim == 1 else positions
    p = np.maximum(of_pairs.astype(np.float64) + rope.shift, 0.0)
    angle = p * np.array(rope.inverse_frequency)  # (positions, n_rot/2)
    return np.cos(angle) * rope.factors(p), np.sin(angle) * rope.factors(p)
