"""A drafted token. It is accepted if it is the token that is chosen anyway, given the model's logits in its place.

So the tokens of an answer, and the random numbers that it uses, are those of plain decoding. This is the rule of
Leviathan, Kalman, Matias (arXiv 2211.17192) for drafters without a choice: a draft is accepted with its probability
under the model.
"""

from __future__ import annotations

from typing import NamedTuple


class Guess(NamedTuple):
    """A drafted token."""

    token: int
    trust: int  # class of drafts with similar acceptance rates (policy.Acceptance)
