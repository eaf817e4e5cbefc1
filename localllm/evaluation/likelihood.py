"""Statistics over log probabilities, as pure functions: scores of single tokens, and their summary.

Definitions and names match llama.cpp's perplexity tool, so that the values can be compared. "Base" is the reference
model, usually the same model before quantization.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

LEAST = np.float32(-16.0)  # the divergence ignores tokens to which the base gives less than e^-16
PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a text, one value per scored token. Without a base only `nll` is filled, and the other arrays are
    empty."""

    nll: F64  # -ln p of the text's token
    base_nll: F64
    kld: F64  # sum over the vocabulary of p_base ln(p_base / p)
    same_top: NDArray[np.bool_]  # whether both models have the same top token

    @staticmethod
    def join(parts: Sequence[Scores]) -> Scores:
        return Scores(
            np.concatenate([part.nll for part in parts]),
            np.concatenate([part.base_nll for part in parts]),
            np.concatenate([part.kld for part in parts]),
            np.concatenate([part.same_top for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and its standard error."""

    value: float
    error: float


def log_softmax(logits: F32) -> F32:
    """Return the natural logarithms of the probabilities, float32 (rows, vocabulary). A row with NaN or +infinity
    becomes NaN."""
    highest = logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        shifted: F32 = logits - highest
        total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
        shifted -= np.log(total).astype(np.float32)
    return shifted


def score(log_p: F32, targets: NDArray[np.int32]) -> Scores:
    """Return the scores (rows,) of the text's tokens, from log probabilities (rows, vocabulary)."""
    nothing = np.zeros(0)
    return Scores(_nll(log_p, targets), nothing, nothing, np.zeros(0, np.bool_))


def compare(log_p: F32, base: F32, targets: NDArray[np.int32]) -> Scores:
    """Return the scores (rows,) of a model and its base, both given as log probabilities (rows, vocabulary)."""
    counts = base > LEAST
    weighted = np.exp(base, where=counts, out=np.zeros_like(base)) * (base - log_p)
    return Scores(
        _nll(log_p, targets),
        _nll(base, targets),
        np.where(counts, weighted, np.float32(0)).sum(axis=1, dtype=np.float64),
        log_p.argmax(axis=1) == base.argmax(axis=1),
    )


def _nll(log_p: F32, targets: NDArray[np.int32]) -> F64:
    return -np.take_along_axis(log_p, targets[:, None].astype(np.intp), axis=1)[:, 0].astype(np.float64)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log likelihood. The error is the standard error of the mean, propagated through exp."""

    tokens: int  # number of scored tokens
    nll: Mean
    perplexity: Mean


@dataclass(frozen=True, slots=True)
class Divergence:
    """A model compared with its base. Shares and differences of probability are fractions, not percentages."""

    base: Perplexity
    log_ratio: Mean  # ln(perplexity / perplexity of the base)
    kld: Mean
    kld_maximum: float
    kld_minimum: float
    kld_percentiles: dict[str, float]
    same_top: Mean
    p_difference: Mean  # mean change in the probability of the text's token, model minus base
    p_difference_rms: float


def statistics(scores: Scores) -> tuple[Perplexity, Divergence | None]:
    """Return a summary of all scores. Without a base, the divergence is None."""
    own = _perplexity(scores.nll)
    if not scores.kld.size:
        return own, None
    base = _perplexity(scores.base_nll)
    count = len(scores.kld)
    covariance = _mean_product(scores.nll, scores.base_nll) / max(count - 1, 1)
    variance = own.nll.error**2 + base.nll.error**2 - 2 * covariance
    share = float(scores.same_top.mean())
    p_difference = np.exp(-scores.nll) - np.exp(-scores.base_nll)
    return own, Divergence(
        base=base,
        log_ratio=Mean(own.nll.value - base.nll.value, math.sqrt(max(variance, 0.0))),
        kld=mean_of(scores.kld),
        kld_maximum=float(scores.kld.max()),
        kld_minimum=float(scores.kld.min()),
        kld_percentiles={f"{p:g}": float(np.percentile(scores.kld, p)) for p in PERCENTILES},
        same_top=Mean(share, math.sqrt(share * (1 - share) / max(count - 1, 1))),
        p_difference=mean_of(p_difference),
        p_difference_rms=math.sqrt(float((p_difference**2).mean())),
    )


def mean_of(values: F64) -> Mean:
    """Return the mean and its standard error, from the mean square deviation over n - 1."""
    mean = float(values.mean())
    deviation = float(((values - mean) ** 2).mean())
    return Mean(mean, math.sqrt(deviation / (len(values) - 1)) if len(values) > 1 else 0.0)


def _perplexity(nll: F64) -> Perplexity:
    mean = mean_of(nll)
    value = math.exp(min(mean.value, 700.0))  # a larger exponent overflows a float, and the value is meaningless
    return Perplexity(len(nll), mean, Mean(value, value * mean.error))


def _mean_product(a: F64, b: F64) -> float:
    return float(((a - a.mean()) * (b - b.mean())).mean())
