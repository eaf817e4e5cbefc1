"""Rotary position embedding: computes the inverse frequency of each pair of dimensions.

The scaling rules (linear, YaRN with ggml's cancellations, frequency factors) are applied here; a backend gets only
frequencies and one magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from localllm.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, factors: Sequence[float] | None) -> tuple[float, ...]:
    """Return the frequencies (n_rot/2,) in radians per position, divided by `factors` (n_rot/2,) (`rope_freqs.weight`
    of Llama 3.1).
    """
    plain = [rope.base ** (-2.0 * i / rope.n_rot) for i in range(rope.n_rot // 2)]
    if factors is not None:
        plain = [f / factor for f, factor in zip(plain, factors, strict=True)]
    if rope.scaling != "yarn":
        return tuple(f / rope.factor for f in plain)
    low, high = _yarn_range(rope)
    mixed = []
    for i, f in enumerate(plain):
        keep = 1.0 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))  # 1: high-frequency pair, kept as trained
        keep *= rope.extrapolation
        mixed.append(f / rope.factor * (1.0 - keep) + f * keep)
    return tuple(mixed)


def magnitude(rope: RopeConfig) -> float:
    """Return the factor on cosine and sine: YaRN's attention temperature times the factor in the GGUF."""
    if rope.scaling != "yarn" or rope.extrapolation == 0.0:
        return rope.attention_factor
    scale = _mscale(rope.factor, rope.multiplier)
    if rope.log_multiplier != 0.0:
        scale /= _mscale(rope.factor, rope.log_multiplier)
    return scale * rope.attention_factor


def score_factor(rope: RopeConfig) -> float:
    """Return the factor on attention scores in DeepSeek models: the square of YaRN's temperature."""
    return _mscale(rope.factor, rope.score_multiplier) ** 2 if rope.scaling == "yarn" else 1.0


def _mscale(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0


def _yarn_range(rope: RopeConfig) -> tuple[float, float]:
    """Return two pair indices: pairs below the first stay as trained, pairs above the second are fully interpolated."""

    def pair(rotations: float) -> float:
        turns = math.log(rope.original_context / (rotations * 2.0 * math.pi))
        return rope.n_rot * turns / (2.0 * math.log(rope.base))

    return max(0.0, math.floor(pair(rope.beta_fast))), min(rope.n_rot - 1.0, math.ceil(pair(rope.beta_slow)))
