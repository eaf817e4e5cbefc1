"""The rule that keeps a guess or replaces it, so that the tokens have the model's distribution whoever guessed.

Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192): a token drawn
from q stands with probability min(1, p/q), else one is drawn from max(0, p - q), made to sum to 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.sampling.chain import Ids
from localllm.sampling.sampler import Sampler
from localllm.sampling.select import Doubles

Distribution = tuple[Ids, Doubles]  # tokens (n,) and their probabilities (n,)


class Guess(NamedTuple):
    """A drafted token."""

    token: int
    trust: int  # class of guesses that turn out equally often (policy.Acceptance)
    drawn_from: Distribution | None  # None: there was no choice


class Verdict(NamedTuple):
    token: int  # what comes next; the guess, or another
    likelihood: float  # that the guess would stand


def choose(sampler: Sampler, logits: NDArray[np.float32], guess: Guess) -> Verdict:
    """The next token by the model's `logits` (V,), not yet accepted; the guess may be right or wrong.

    A guess without a choice (q = 1) needs no dice of its own: the token drawn from p is the guess with probability p,
    and else comes from the rest of p. It is the token that would have been drawn without any guess.
    """
    if sampler.options.greedy:
        token = sampler.sample(logits)
        return Verdict(token, float(token == guess.token))
    ids, p = sampler.distribution(logits)
    wanted = float(p[ids == guess.token].sum())
    if guess.drawn_from is None:
        return Verdict(sampler.draw(ids, p), wanted)
    drafted, q = guess.drawn_from
    offered = float(q[drafted == guess.token].sum())
    likelihood = min(1.0, wanted / offered)
    if sampler.uniform() * offered < wanted:
        return Verdict(guess.token, likelihood)
    rest = np.maximum(p - _on(ids, drafted, q), 0.0)
    if not rest.any():  # p = q but for rounding
        return Verdict(sampler.draw(ids, p), likelihood)
    return Verdict(sampler.draw(ids, rest), likelihood)


def _on(ids: Ids, drafted: Ids, q: Doubles) -> Doubles:
    """q (n,) of `ids` (n,), 0 where a token is not among `drafted`."""
    order = drafted.argsort()
    at = np.minimum(drafted[order].searchsorted(ids), len(drafted) - 1)
    row = order[at]
    return np.where(drafted[row] == ids, q[row], 0.0)
