"""A drafted token. It is accepted if the sampler chooses the same token from the model's logits.

So an answer has the same tokens, and uses the same random numbers, as with plain decoding. This is the rule of
Leviathan, Kalman, Matias (arXiv 2211.17192) for deterministic drafters: a draft is accepted with its probability under
the model.
"""

from __future__ import annotations

from typing import NamedTuple


class DraftToken(NamedTuple):
    """A drafted token."""

    token: int
    trust: int  # class of drafts with similar acceptance rates (policy.Acceptance)
