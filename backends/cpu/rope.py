"""RoPE tables of cosines and sines, bitwise identical on every processor.

NumPy's sine differs between processors in the last digit. These tables use only +, -, * and rounding in float64, whose
results IEEE 754 defines exactly. The error (below 1e-11 at position 10^6) vanishes in float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.plan import Rope

_TWO_PI_HIGH = 6.28318530717958623  # 2 pi as the nearest float64 and the remainder
_TWO_PI_LOW = 2.4492935982947064e-16
_SPLIT = 134217729.0  # 2^27 + 1


def _product(a: NDArray[np.float64], b: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a * b exactly, as an unevaluated sum of two float64 (Dekker 1971)."""
    p = a * b
    t = _SPLIT * a
    a_high = t - (t - a)
    a_low = a - a_high
    u = _SPLIT * b
    b_high = u - (u - b)
    b_low = b - b_high
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


def _sine_series(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sin and cos for |x| <= pi / 4, by Taylor series up to x^17 and x^18."""
    y = x * x
    sine, cosine = np.zeros_like(x), np.zeros_like(x)
    for k in range(8, 0, -1):
        sine = (sine + 1.0) * (y * (-1.0 / ((2 * k) * (2 * k + 1))))
        cosine = (cosine + 1.0) * (y * (-1.0 / ((2 * k - 1) * (2 * k))))
    return x + x * sine, 1.0 + cosine


def rope_rows(rope: Rope, start: int, stop: int) -> NDArray[np.float32]:
    """Return cosines and sines as `plan.rope_table` defines them, as float32 (stop - start, 2, n_rot / 2)."""
    positions = np.maximum(np.arange(start, stop, dtype=np.float64)[:, None] + rope.shift, 0.0)
    angle = positions * np.asarray(rope.inverse_frequency, np.float64)
    turns = np.rint(angle * (4.0 / _TWO_PI_HIGH))  # number of quarter turns
    high, low = _product(turns, _TWO_PI_HIGH / 4.0)
    sine, cosine = _sine_series(((angle - high) - low) - turns * (_TWO_PI_LOW / 4.0))
    quarter = turns.astype(np.int64) % 4
    swap = (quarter % 2).astype(bool)
    s, c = np.where(swap, cosine, sine), np.where(swap, sine, cosine)
    s = np.where(quarter >= 2, -s, s)
    c = np.where((quarter == 1) | (quarter == 2), -c, c)
    magnitude = rope.factors(positions)
    return np.stack([c * magnitude, s * magnitude], axis=1).astype(np.float32)
