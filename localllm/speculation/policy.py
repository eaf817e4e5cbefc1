"""How much guessing pays: what passes cost, how often guesses are right, and when to leave it.

All is counted in seconds. A round checks k guesses in one pass of k + 1 rows and yields 1 + (guesses that stand)
tokens; it pays while the tokens it adds would have taken longer than what it adds to the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WEIGHT = 0.1  # of the newest pass among those seen
_WORST = -3.0  # tokens lost that a round counts for at most
_REST, _LONGEST_REST = 8, 512  # rounds without guesses after a loss; doubled with every further one


class Costs:
    """Seconds of a pass of 1 ... `most` rows: measured at first, corrected by every pass since.

    One row and several rows drift apart (with the length of the text, with the load of the machine), so each has a
    factor of its own.
    """

    def __init__(self, measured: dict[int, float]) -> None:
        """`measured`: rows -> seconds, for some rows; 1 among them."""
        self.most = max(measured)
        rows = sorted(measured)
        self._seconds: list[float] = np.interp(range(self.most + 1), rows, [measured[n] for n in rows]).tolist()
        self._drift = [1.0, 1.0]  # of one row, of several
        self._passes = [1, 1]

    def seconds(self, rows: int) -> float:
        return self._seconds[rows] * self._drift[rows > 1]

    def observe(self, rows: int, seconds: float) -> None:
        """A pass has taken so long; what stopped the whole machine for a while counts as twice the time at most."""
        several = rows > 1
        self._passes[several] += 1
        ratio = min(max(seconds / self.seconds(rows), 0.5), 2.0) ** max(_WEIGHT, 1 / self._passes[several])
        if several:
            self._seconds[rows] *= ratio
        self._drift[several] *= ratio


class Acceptance:
    """How often guesses stand, by their class: what was expected at first, and what has been seen since."""

    _SURE = 2.0  # the expectation weighs as much as so many guesses
    _KEEP = 0.97  # of what was seen, with every new guess of the class

    def __init__(self, priors: Sequence[float]) -> None:
        self._right = [self._SURE * p for p in priors]
        self._seen = [self._SURE] * len(priors)
        self.mean = 0.7  # of the latest guesses of all classes

    def expect(self, trust: int) -> float:
        return self._right[trust] / self._seen[trust]

    def observe(self, trust: int, likelihood: float) -> None:
        """A guess of this class would stand with this probability."""
        self._right[trust] = self._right[trust] * self._KEEP + likelihood
        self._seen[trust] = self._seen[trust] * self._KEEP + 1
        self.mean += _WEIGHT * (likelihood - self.mean)

    def hope(self) -> None:
        """Before another try after a rest."""
        self.mean = max(self.mean, 0.7)


class Judge:
    """Decides for one drafter. Its balance is what its rounds have won, in tokens of plain decoding, fading."""

    def __init__(self, priors: Sequence[float]) -> None:
        self.acceptance = Acceptance(priors)
        self._balance = 0.0
        self._rest = 0
        self._next_rest = _REST

    def ready(self) -> bool:
        """Whether to guess in this round; to be asked once a round."""
        if self._rest == 0:
            return True
        self._rest -= 1
        if self._rest == 0:
            self.acceptance.hope()
        return False

    def settle(self, won: float) -> None:
        """A round is over and has won so many tokens of plain decoding."""
        self._balance = 0.9 * self._balance + max(won, _WORST)  # the machine may have stood still
        if self._balance < -1:
            self.rest()
        elif self._balance > 1:
            self._next_rest = _REST

    def rest(self) -> None:
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        self._balance = -0.75  # a try that fails ends sooner


def outlook(costs: Costs, pace: float, drafted: int, stands: float, mean: float, step: float, longest: int) -> float:
    """Seconds that going on from `drafted` guesses, which all stand with probability `stands`, wins at best.

    Each further guess stands with probability `mean` and takes `step` seconds; `pace` is what a token is worth.
    """
    best = won = 0.0
    for k in range(drafted + 1, longest + 1):
        stands *= mean
        won += stands * pace - step
        best = max(best, won - (costs.seconds(k + 1) - costs.seconds(drafted + 1)))
    return best


def worth_checking(costs: Costs, pace: float, likelihoods: Sequence[float]) -> tuple[int, float]:
    """How many of the guesses to check, and the seconds that wins; each stands with its likelihood if all before do."""
    best, found = 0.0, 0
    stands, won = 1.0, 0.0
    for k, likelihood in enumerate(likelihoods, 1):
        stands *= likelihood
        won += stands * pace
        gain = won - (costs.seconds(k + 1) - costs.seconds(1))
        if gain > best:
            best, found = gain, k
    return found, best
