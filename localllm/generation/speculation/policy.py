"""Decides how much to draft, by the cost of passes and the acceptance rate, and when to pause.

All costs are in seconds. A round verifies k drafted tokens in one pass of k + 1 rows and yields 1 + accepted tokens. It
saves time if decoding the accepted tokens would have taken longer than the additional rows did.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WEIGHT = 0.1  # weight of the newest pass
_WORST = -3.0  # maximum loss per round, in tokens
_REST, _LONGEST_REST = 8, 512  # rounds without drafts after a loss; doubles with every further loss


class Costs:
    """Seconds per pass of 1 ... `most` rows: measured once, then corrected by every pass.

    The times of one row and of several rows drift apart, with the length of the text and with the load of the machine.
    So each has its own correction factor.
    """

    def __init__(self, measured: dict[int, float]) -> None:
        """`measured`: row count -> seconds, for some row counts, including 1."""
        self.most = max(measured)
        rows = sorted(measured)
        self._seconds: list[float] = np.interp(range(self.most + 1), rows, [measured[n] for n in rows]).tolist()
        self._drift = [1.0, 1.0]  # for one row, for several
        self._passes = [1, 1]

    def seconds(self, rows: int) -> float:
        return self._seconds[rows] * self._drift[rows > 1]

    def observe(self, rows: int, seconds: float) -> None:
        """Record a pass. A time counts as at most twice the expected time, in case the machine stalled."""
        several = rows > 1
        self._passes[several] += 1
        ratio = min(max(seconds / self.seconds(rows), 0.5), 2.0) ** max(_WEIGHT, 1 / self._passes[several])
        if several:
            self._seconds[rows] *= ratio
        self._drift[several] *= ratio


class Acceptance:
    """Acceptance rates by class of draft: a prior, updated by observations."""

    _SURE = 2.0  # weight of the prior, in drafts
    _KEEP = 0.97  # decay of observations, per new draft of the class

    def __init__(self, priors: Sequence[float]) -> None:
        self._right = [self._SURE * p for p in priors]
        self._seen = [self._SURE] * len(priors)
        self.mean = 0.7  # over the latest drafts of all classes

    def expect(self, trust: int) -> float:
        return self._right[trust] / self._seen[trust]

    def observe(self, trust: int, likelihood: float) -> None:
        """Record that a draft of this class would be accepted with this probability."""
        self._right[trust] = self._right[trust] * self._KEEP + likelihood
        self._seen[trust] = self._seen[trust] * self._KEEP + 1
        self.mean += _WEIGHT * (likelihood - self.mean)

    def hope(self) -> None:
        """Raise the mean acceptance to at least 0.7, so that drafting is tried again after a pause."""
        self.mean = max(self.mean, 0.7)


class Judge:
    """Decides whether a drafter drafts or pauses, by its balance: the decayed gain of its rounds, in tokens."""

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
        """Record the gain of a round, in tokens of plain decoding."""
        self._balance = 0.9 * self._balance + max(won, _WORST)  # the machine may have stalled
        if self._balance < -1:
            self.rest()
        elif self._balance > 1:
            self._next_rest = _REST

    def rest(self) -> None:
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        self._balance = -0.75  # so that the next attempt, if it fails, ends sooner


def outlook(costs: Costs, pace: float, drafted: int, stands: float, mean: float, step: float, longest: int) -> float:
    """Return the maximum expected gain, in seconds, of drafting more than `drafted` tokens.

    The tokens so far are all accepted with probability `stands`, and each further one with probability `mean`. Drafting
    a token takes `step` seconds; an accepted token saves `pace` seconds.
    """
    best = won = 0.0
    for k in range(drafted + 1, longest + 1):
        stands *= mean
        won += stands * pace - step
        best = max(best, won - (costs.seconds(k + 1) - costs.seconds(drafted + 1)))
    return best
