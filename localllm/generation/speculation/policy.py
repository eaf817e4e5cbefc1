"""Decides how much to draft from the cost of forward passes and the acceptance rate, and when to pause.

All costs are in seconds. A round verifies k drafted tokens in one forward pass over k + 1 tokens and yields 1 +
accepted tokens. A round saves time if decoding the accepted tokens one by one would take longer than verifying k
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WEIGHT = 0.1  # weight of the newest forward pass in the moving averages
_WORST = -3.0  # lower bound on the gain of one round, in tokens
_REST, _LONGEST_REST = 8, 512  # rounds without drafts after a loss; doubled after every further loss


class Costs:
    """Seconds per forward pass of 1 ... `most` rows: measured once, then corrected after every forward pass.

    The times of single-token and multi-token passes drift apart with the length of the text and the machine's load.
    Each kind therefore has a correction factor.
    """

    def __init__(self, measured: dict[int, float]) -> None:
        """`measured`: number of tokens -> seconds, including an entry for 1 token."""
        self.most = max(measured)
        rows = sorted(measured)
        self._seconds: list[float] = np.interp(range(self.most + 1), rows, [measured[n] for n in rows]).tolist()
        self._drift = [1.0, 1.0]  # correction factors for one token, and for several
        self._passes = [1, 1]

    def seconds(self, rows: int) -> float:
        return self._seconds[rows] * self._drift[rows > 1]

    def observe(self, rows: int, seconds: float) -> None:
        """Record the duration of a forward pass, capped at twice the expected time in case the machine stalled."""
        several = rows > 1
        self._passes[several] += 1
        ratio = min(max(seconds / self.seconds(rows), 0.5), 2.0) ** max(_WEIGHT, 1 / self._passes[several])
        if several:
            self._seconds[rows] *= ratio
        self._drift[several] *= ratio


class Acceptance:
    """Acceptance rates per class of drafts: a prior, updated by observations."""

    _SURE = 2.0  # weight of the prior, as a number of drafts
    _KEEP = 0.97  # decay of earlier observations with each new draft of the class

    def __init__(self, priors: Sequence[float]) -> None:
        self._right = [self._SURE * p for p in priors]
        self._seen = [self._SURE] * len(priors)
        self.mean = 0.7  # moving average over the drafts of all classes

    def expect(self, trust: int) -> float:
        return self._right[trust] / self._seen[trust]

    def observe(self, trust: int, likelihood: float) -> None:
        """Record that a draft of this class would be accepted with probability `likelihood`."""
        self._right[trust] = self._right[trust] * self._KEEP + likelihood
        self._seen[trust] = self._seen[trust] * self._KEEP + 1
        self.mean += _WEIGHT * (likelihood - self.mean)

    def hope(self) -> None:
        """Raise the mean acceptance to at least 0.7, so that drafting is tried again after a pause."""
        self.mean = max(self.mean, 0.7)


class Judge:
    """Decides whether a drafter drafts or pauses, from its balance: the decayed gain of its rounds, in tokens."""

    def __init__(self, priors: Sequence[float]) -> None:
        self.acceptance = Acceptance(priors)
        self._balance = 0.0
        self._rest = 0
        self._next_rest = _REST

    def ready(self) -> bool:
        """Return whether to draft in this round; call once per round."""
        if self._rest == 0:
            return True
        self._rest -= 1
        if self._rest == 0:
            self.acceptance.hope()
        return False

    def settle(self, won: float) -> None:
        """Record the gain of a round, measured in tokens of plain decoding."""
        self._balance = 0.9 * self._balance + max(won, _WORST)  # bounded, because the machine may have stalled
        if self._balance < -1:
            self.rest()
        elif self._balance > 1:
            self._next_rest = _REST

    def rest(self) -> None:
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        self._balance = -0.75  # so that a failing retry pauses again sooner


def outlook(costs: Costs, pace: float, drafted: int, stands: float, mean: float, step: float, longest: int) -> float:
    """Return the maximum expected gain, in seconds, of drafting more than `drafted` tokens.

    The drafts so far are all accepted with probability `stands`, and each further draft with probability `mean`.
    Drafting a token takes `step` seconds; an accepted token saves `pace` seconds.
    """
    best = won = 0.0
    for k in range(drafted + 1, longest + 1):
        stands *= mean
        won += stands * pace - step
        best = max(best, won - (costs.seconds(k + 1) - costs.seconds(drafted + 1)))
    return best
