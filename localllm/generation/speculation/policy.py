"""Decides how much to draft from the cost of forward passes and the acceptance rate, and when to pause.

All costs are in seconds. A round verifies k drafted tokens in one forward pass over k + 1 tokens and yields 1 +
accepted tokens. A round saves time if decoding the accepted tokens one by one would take longer than verifying k
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, log2

import numpy as np

_UP, _DOWN = 0.1, 0.3  # weights of a pass that took longer or shorter than expected: a busy machine only adds time
_ROW = 0.25  # expected cost of one more row, relative to a pass of one row, until passes are observed
_FIRST_UP = 0.4  # weight of the first pass of several rows if it took longer than expected
_ALONE = 32  # after this number of passes of one row in sequence, the cost of more rows is slowly forgotten,
_EASIER = 0.998  # by this factor per pass: it may have been measured at a busy moment, and is then tried again
# After a pass, the cost per row of the next larger pass moves by this share towards the observed cost, if no pass of
# that size was observed: otherwise the first guess would prevent trying it.
_ALIKE = 0.1
_SURE = 4  # passes to observe before costs that were not measured are trusted
_LEARNT = 8  # after this number of passes of several rows, their changes are taken for changes of the load
_WORST, _BEST = -1.0, 1.5  # bounds of the gain of one round and of the balance, in tokens
_BAD, _WARNED = -2.0, -1.0  # balance at which drafting pauses, and after a pause
_REST, _LONGER, _LONGEST_REST = 12, 3, 512  # rounds without drafts after a loss, times 3 after every further loss
_TRY = 0.7  # acceptance rate that is assumed at first, and when drafting is tried again


class Costs:
    """Seconds per forward pass of 1 ... `most` rows, learned from the passes.

    Decisions depend only on the cost of further rows relative to one row. A pass of n rows corrects the cost of n
    rows and, with less weight, the costs of similar numbers. The estimates tend to the short durations, because other
    programs only ever delay a pass, and long passes more than short ones.
    """

    def __init__(self, measured: dict[int, float], most: int = 0) -> None:
        """`measured`: number of rows -> seconds, including an entry for 1 row. `most` defaults to the most measured."""
        self.most, self._one, self.known = max(most, *measured), measured[1], True
        rows = sorted(measured)
        each = [(measured[n] / self._one - 1) / max(n - 1, 1) for n in rows]
        if len(rows) == 1:
            rows, each = [1, 2], [0.0, _ROW]
        # By number of rows: cost of each row after the first, relative to a pass of one row.
        seconds = np.interp(range(self.most + 1), rows, [1 + (n - 1) * x for n, x in zip(rows, each, strict=True)])
        self._row = [0.0, 0.0, *((float(seconds[n]) - 1) / (n - 1) for n in range(2, min(self.most, rows[-1]) + 1))]
        self._row += [each[-1]] * (self.most + 1 - len(self._row))
        self._seen = [0] * (self.most + 1)  # passes by number of rows
        self._passes = [1, 0]  # passes of one row, and of several
        self._alone = 0  # passes of one row since the last one of several
        self._measured = True

    @classmethod
    def unknown(cls, most: int) -> Costs:
        """Return costs that become known with the first pass."""
        found = cls({1: 1.0}, most)
        found.known = found._measured = False
        found._passes = [0, 0]
        return found

    @property
    def sure(self) -> bool:
        """Whether the costs were measured, or enough passes have been observed to trust them."""
        return self._measured or sum(self._passes) >= _SURE

    def seconds(self, rows: int) -> float:
        return self._one * (1 + (rows - 1) * self._row[rows])

    def observe(self, rows: int, seconds: float) -> None:
        """Record the duration of a forward pass, capped at twice the expected time in case the machine stalled."""
        several = rows > 1
        self._passes[several] += 1
        if not self.known:
            self._one, self.known = seconds / (1 + (rows - 1) * self._row[rows]), True
            return
        expected = self.seconds(rows)
        error = log(min(max(seconds / expected, 0.5), 2.0))
        first = 1 / (1 + self._seen[rows]) if several else 1 / self._passes[0]
        if several and error > 0:
            first = min(first, _FIRST_UP)
        error *= max(_UP if error > 0 else _DOWN, first)
        if not several:
            self._one *= exp(error)
            self._alone += 1
            if self._alone > _ALONE:
                self._row = [_EASIER * row for row in self._row]
            return
        self._alone = 0
        if self._passes[1] > _LEARNT:
            self._one *= exp(error / 2)
        before = self._row[rows]
        self._row[rows] = max((expected * exp(error) / self._one - 1) / (rows - 1), 0.0)
        self._seen[rows] += 1
        change = self._row[rows] - before
        for other in range(2, self.most + 1):
            if other != rows:
                share = change / (1 + abs(log2((other - 1) / (rows - 1)))) / (1 + self._seen[other])
                self._row[other] = max(self._row[other] + share, 0.0)
            if other > rows and not self._seen[other]:
                if other == rows + 1:
                    self._row[other] += _ALIKE * (self._row[rows] - self._row[other])
                # more rows cost at least as much
                self._row[other] = max(self._row[other], self._row[rows] * (rows - 1) / (other - 1))


class Rate:
    """An acceptance rate: a prior with the weight of some drafts, and the drafts observed so far, the newest most."""

    def __init__(self, prior: float, weight: float, keep: float) -> None:
        self._right, self._seen, self._keep = prior * weight, weight, keep

    @property
    def value(self) -> float:
        return self._right / self._seen

    def observe(self, likelihood: float) -> None:
        self._right = self._right * self._keep + likelihood
        self._seen = self._seen * self._keep + 1


class Acceptance:
    """Acceptance rates per class of drafts: a prior, updated by observations.

    If more drafts fail than expected, the rates of all classes are lowered: a text may look repetitive in many ways,
    and disproving class after class would cost many drafts.
    """

    _SURE, _SURE_OF_ALL = 2.0, 2.0  # weights of the priors of a class and of the totals, as numbers of drafts
    _SURE_AGAIN = 0.5  # weight of the prior after a pause: a retry that fails at once ends at once
    _KEEP = 0.97  # decay of earlier observations with each new draft of the class

    def __init__(self, priors: Sequence[float]) -> None:
        self._rates = [Rate(prior, self._SURE, self._KEEP) for prior in priors]
        self._all = Rate(_TRY, self._SURE_OF_ALL, self._KEEP)
        self._accepted = self._expected = self._SURE_OF_ALL  # decayed numbers of drafts

    @property
    def mean(self) -> float:
        """The acceptance rate of the drafts of all classes."""
        return self._all.value

    def expect(self, trust: int) -> float:
        return self._rates[trust].value * min(self._accepted / self._expected, 1.0)

    def observe(self, trust: int, likelihood: float) -> None:
        """Record that a draft of this class would be accepted with probability `likelihood`."""
        self._accepted = self._decayed(self._accepted) + likelihood
        self._expected = self._decayed(self._expected) + self._rates[trust].value
        self._rates[trust].observe(likelihood)
        self._all.observe(likelihood)

    def _decayed(self, number: float) -> float:
        return self._SURE_OF_ALL + self._KEEP * (number - self._SURE_OF_ALL)

    def hope(self) -> None:
        """Forget a low mean acceptance, so that drafting is tried again after a pause."""
        if self.mean < _TRY:
            self._all = Rate(_TRY, self._SURE_AGAIN, self._KEEP)
            self._accepted = self._expected = self._SURE_OF_ALL


class Balance:
    """The time that drafts have saved, less what they have cost, in tokens of plain decoding."""

    _MOST_LOST = 0.25  # tokens that unaccepted drafts may cost before drafts are only compared, not verified
    _LEAST, _MOST = -0.5, 1.0  # bounds, so that a text that changes its character is noticed soon

    def __init__(self) -> None:
        self._tokens = 0.0

    @property
    def lost(self) -> bool:
        """Whether the drafts have cost too much."""
        return self._tokens < -self._MOST_LOST

    def add(self, tokens: float) -> None:
        self._tokens = min(max(self._tokens + tokens, self._LEAST), self._MOST)


class Stake:
    """The time that the drafts of one request may lose in a round, in tokens of plain decoding.

    It grows while rounds gain. So drafts that look certain and are wrong cost little before this is known. A single
    draft is always allowed.
    """

    _LEAST, _MOST = 0.5, 16.0

    def __init__(self) -> None:
        self.tokens = self._LEAST

    def settle(self, won: float) -> None:
        """Record the gain of a round, in tokens."""
        self.tokens = min(2 * self.tokens, self._MOST) if won > 0 else max(self.tokens / 2, self._LEAST)


class Judge:
    """Decides whether a drafter drafts or pauses, from its balance: the decayed gain of its rounds, in tokens."""

    def __init__(self, priors: Sequence[float]) -> None:
        self.acceptance, self.stake = Acceptance(priors), Stake()
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
        self.stake.settle(won)
        self._balance = min(0.9 * self._balance + max(won, _WORST), _BEST)  # bounded: the machine may have stalled
        if self._balance < _BAD:
            self.rest()
        elif self._balance > 1:
            self._next_rest = _REST

    def rest(self) -> None:
        self._rest, self._next_rest = self._next_rest, min(_LONGER * self._next_rest, _LONGEST_REST)
        self._balance = _WARNED  # so that a failing retry pauses again sooner


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
