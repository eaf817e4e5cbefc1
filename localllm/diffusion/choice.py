"""One diffusion step as pure functions: propose a token for every masked position, and select the positions to unmask.

The rules follow the reference implementations of Dream and LLaDA; docs/diffusion.md lists where llama.cpp differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.options import SamplingOptions
from localllm.sampling.chain import COLDEST, Candidates, SamplingContext, softmax, temperature, top_k, top_p
from localllm.sampling.sampler import refuse_broken

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Places = NDArray[np.intp]

SAMPLED_BY = ("seed", "temperature", "top_k", "top_p")  # the sampling options that have an effect
_TINY = 1e-10  # added before a logarithm


class Proposal(NamedTuple):
    """The token proposed for a position, and its confidence."""

    token: int
    confidence: float


def guided(with_prompt: F32, without: F32, scale: float) -> F32:
    """Return the logits of classifier-free guidance, extrapolated away from the logits with a masked prompt (LLaDA)."""
    return without + np.float32(scale + 1) * (with_prompt - without)


def propose(logits: F32, mask: int, options: SamplingOptions, algorithm: str, uniform: float) -> Proposal:
    """Return a token for one position from logits (V,): drawn with `uniform` in [0, 1), or the top token at temperature
    0.

    The mask token is never proposed. The confidence is computed after top-k, top-p and temperature (1 instead of 0).
    """
    candidates = _candidates(logits, mask, options)
    probabilities = softmax(candidates)
    if options.temperature < COLDEST:
        chosen = int(probabilities.argmax())
    else:
        sums = probabilities.cumsum()
        chosen = min(int(sums.searchsorted(uniform * sums[-1], side="right")), len(sums) - 1)
    return Proposal(int(candidates.ids[chosen]), confidence(probabilities, chosen, algorithm))


def _candidates(logits: F32, mask: int, options: SamplingOptions) -> Candidates:
    refuse_broken(float(logits.max()))
    rows, context = np.delete(np.arange(len(logits), dtype=np.int32), mask), SamplingContext()
    candidates = Candidates(rows, logits[rows])
    if options.top_k > 0:
        candidates = top_k(candidates, options, context)
    if options.top_p < 1:
        candidates = top_p(candidates, options, context)
    return candidates if options.temperature < COLDEST else temperature(candidates, options, context)


def confidence(probabilities: F64, chosen: int, algorithm: str) -> float:
    """Return the confidence of a proposal; larger is more confident."""
    return _CONFIDENCE[algorithm](probabilities, chosen)


def _of_token(p: F64, chosen: int) -> float:
    return float(p[chosen])


def _of_entropy(p: F64, chosen: int) -> float:
    return float((p * np.log(p + _TINY)).sum())


def _of_margin(p: F64, chosen: int) -> float:
    if len(p) < 2:
        return float(p[0])
    second, first = np.partition(p, len(p) - 2)[-2:]
    return float(first - second)


_CONFIDENCE: dict[str, Callable[[F64, int], float]] = {
    "confidence": _of_token,
    "entropy": _of_entropy,
    "margin": _of_margin,
    "random": _of_token,  # `settling` draws at random instead
    "origin": _of_token,
}


def settling(confidences: F64, count: int, alg_temp: float, uniform: Callable[[], float]) -> Places:
    """Return the positions (count,) to unmask: the most confident, ties to the left; or drawn without replacement.

    At temperature `alg_temp`, a position is drawn in proportion to exp(confidence / alg_temp), with `uniform` in [0,
    1).
    """
    if alg_temp <= 0:
        return np.argsort(-confidences, kind="stable")[:count]
    weights = np.exp((confidences - confidences.max()) / alg_temp)
    drawn: list[int] = []
    for _ in range(min(count, len(weights))):
        left = np.flatnonzero(weights)
        if not len(left):  # the other weights underflowed: take the most confident positions
            rest = np.argsort(-confidences, kind="stable")
            drawn += [place for place in rest if place not in drawn][: min(count, len(weights)) - len(drawn)]
            break
        sums = weights[left].cumsum()
        place = left[min(int(sums.searchsorted(uniform() * sums[-1], side="right")), len(left) - 1)]
        weights[place] = 0.0
        drawn.append(place)
    return np.array(drawn, np.intp)
