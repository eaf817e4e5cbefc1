"""A drafted token, which is accepted if the sampler chooses the same token from the target model's logits.

The answer therefore has the same tokens, and uses the same random numbers, as plain decoding. This is the acceptance
rule of Leviathan, Kalman, Matias (arXiv 2211.17192) for a deterministic drafter: a draft is accepted with its
probability under the target model.
"""

from __future__ import annotations

from typing import NamedTuple


class DraftToken(NamedTuple):
    """A drafted token."""

    token: int
    trust: int  # class of drafts with a similar acceptance rate (policy.Acceptance)
