"""The arithmetic of Mirostat and adaptive-p, samplers that adapt to the tokens chosen so far. `chain` runs them.

Both samplers follow llama.cpp's src/llama-sampler.cpp (2026-10). Mirostat: arXiv 2007.14966. Adaptive-p: llama.cpp pull
request 17927. A choice depends only on the `Feedback` and the logits, so drafted tokens are verified exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from localllm.engine.top_k import Doubles
from localllm.options import SamplingOptions

FITTED = 100  # number of most likely tokens from which Mirostat 1 estimates the exponent of Zipf's law
_PEAK, _SHARPNESS, _WIDTH = 5.0, 10.0, 0.3  # adaptive-p: largest logit, sharpness, and width of the peak
_SLOWEST = 0.99  # upper bound on adaptive-p's decay


@dataclass(slots=True)
class Feedback:
    """The accumulated state of the tokens chosen so far."""

    mu: float  # Mirostat: maximum surprisal of a candidate, in bits
    total: float  # adaptive-p: decayed sum of the chosen tokens' probabilities
    weight: float  # adaptive-p: decayed count of chosen tokens

    @classmethod
    def start(cls, options: SamplingOptions) -> Feedback:
        """Return the state before the first token."""
        weight = 1.0 / (1.0 - min(options.adaptive_decay, _SLOWEST))
        return cls(2.0 * options.mirostat_tau, options.adaptive_target * weight, weight)

    def surprised(self, probability: float, options: SamplingOptions) -> None:
        """Update Mirostat's limit with the chosen token's probability among the remaining candidates."""
        self.mu -= options.mirostat_eta * (-math.log2(probability) - options.mirostat_tau)

    def took(self, probability: float, options: SamplingOptions) -> None:
        """Update adaptive-p's sums with the chosen token's probability before adaptive-p's transform."""
        decay = min(options.adaptive_decay, _SLOWEST)
        self.total = probability + decay * self.total
        self.weight = 1.0 + decay * self.weight

    @property
    def mean(self) -> float:
        """The mean probability of the tokens chosen so far, weighted toward the newest."""
        return self.total / self.weight


def zipf_count(p: Doubles, count: int, mu: float) -> int:
    """Return how many of `count` tokens Mirostat 1 keeps: tokens with a surprisal up to `mu` bits under Zipf's law.

    `p` (n,) are the probabilities of the most likely tokens, descending. A result above 2^31, which overflows in
    llama.cpp, keeps all tokens.
    """
    single = p.astype(np.float32).astype(np.float64)  # as in llama.cpp: a probability too small for float32 is 0
    ranks = np.arange(1, len(p))
    t = np.log((ranks + 1) / ranks)
    with np.errstate(all="ignore"):  # degenerate estimates give NaN, which keeps one token
        exponent = (t * np.log(single[:-1] / single[1:])).sum() / (t * t).sum()
        excess = exponent - 1
        kept = np.power(excess * np.exp2(mu) / (1 - np.power(float(count), -excess)), 1 / exponent)
    return max(1, int(min(kept, count))) if kept == kept else 1


def toward(p: Doubles, target: float, mean: float) -> Doubles:
    """Return adaptive-p's logits: largest at the target probability, shifted to compensate for the mean so far."""
    target = min(target, 1.0)
    distance = np.abs(p - min(max(2 * target - mean, 0.0), 1.0)) / _WIDTH
    logits: Doubles = _PEAK - _SHARPNESS * distance * distance / (1 + distance)
    return logits
