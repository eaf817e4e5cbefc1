"""The rule that accepts or rejects a draft, so that the tokens have the model's distribution with any drafter.

Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192). A token drawn
from q is accepted with probability min(1, p/q); otherwise one is drawn from max(0, p - q), normalized.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.sampling.sampler import Sampler
from localllm.sampling.select import Doubles, Ids

Distribution = tuple[Ids, Doubles]  # tokens (n,) and their probabilities (n,)


class Guess(NamedTuple):
    """A drafted token."""

    token: int
    trust: int  # class of drafts with similar acceptance rates (policy.Acceptance)
    drawn_from: Distribution | None  # None: the drafter had no choice


class Verdict(NamedTuple):
    token: int  # the next token: the draft, or another
    likelihood: float  # probability that the draft is accepted


def choose(sampler: Sampler, logits: NDArray[np.float32], guess: Guess) -> Verdict:
    """Return the next token given the target's `logits` (V,): the draft, or another one. The sampler has not accepted
    it yet.

    A draft without a choice (q = 1) needs no extra random number: the token drawn from p is the draft with probability
    p, and otherwise comes from the rest of p. It is the token that plain decoding would have drawn.
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
    if not rest.any():  # p = q up to rounding
        return Verdict(sampler.draw(ids, p), likelihood)
    return Verdict(sampler.draw(ids, rest), likelihood)


def _on(ids: Ids, drafted: Ids, q: Doubles) -> Doubles:
    """Return q (n,) for `ids` (n,); 0 for tokens that are not in `drafted`."""
    order = drafted.argsort()
    at = np.minimum(drafted[order].searchsorted(ids), len(drafted) - 1)
    row = order[at]
    return np.where(drafted[row] == ids, q[row], 0.0)
