"""Decides how much to draft from the cost of forward passes and the acceptance rate, and when to pause.

All costs are in seconds. A round verifies k drafted tokens in one forward pass over k + 1 tokens and yields 1 +
accepted tokens. A round saves time if decoding the accepted tokens one by one would take longer than verifying k
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, exp, log, log2

import numpy as np

_UP, _DOWN = 0.1, 0.3  # weights of a pass that took longer or shorter than expected: a busy machine only adds time
_ROW = 0.25  # expected cost of one more row, relative to a pass of one row, until passes are observed
_LEAST_ROW, _MOST_ROW = 0.1, 0.5  # bounds of this cost as prompts show it
_FIRST_UP = 0.4  # weight of the first pass of several rows if it took longer than expected
_ALONE = 32  # after this number of passes of one row in sequence, the cost of more rows is slowly forgotten,
_EASIER = 0.998  # by this factor per pass: it may have been measured at a busy moment, and is then tried again
_SAME_AGAIN = 2  # passes of the most rows so far, after which half of their cost per row is expected of further rows
_SURE = 4  # passes to observe before costs that were not measured are trusted
_SHORTEST = 1e-6  # seconds; a clock with coarse steps measures 0 for short passes
_LEARNT = 8  # after this number of passes of several rows, their changes are taken for changes of the load
_REST, _LONGER, _LONGEST_REST = 12, 3, 512  # rounds without drafts after a loss, times 3 after every further loss
_TRY = 0.7  # acceptance rate that is assumed at first, and when drafting is tried again


class Costs:
    """Seconds per forward pass of 1 ... `most` rows, learned from the passes.

    Decisions depend only on the cost of several rows relative to one row. It is learned for each number of rows that
    passes have had, and interpolated between them. Each row beyond them is expected to cost as much as a row of a
    prompt, until more passes have shown that rows are cheaper. The estimates tend to the short durations, because other
    programs only ever delay a pass, and long passes more than short ones.
    """

    def __init__(self, measured: dict[int, float], most: int = 0) -> None:
        """`measured`: number of rows -> seconds, including an entry for 1 row. `most` defaults to the most measured."""
        self.most, self._one, self.known = max(most, *measured), measured[1] or _SHORTEST, True
        self._found = {  # relative to a pass of one row
            rows: (measured[rows] or _SHORTEST) / self._one for rows in sorted(measured)
        }
        self._seen = [0] * (self.most + 1)  # passes by number of rows
        self._passes = [1, 0]  # passes of one row, and of several
        self._alone = 0  # passes of one row since the last one of several
        self._measured = True
        self._prompt_row = 0.0  # seconds of a prompt's row; 0: not yet observed
        self._costs: list[float] | None = None  # by number of rows, relative to one row; None: not yet interpolated

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
        return self._one * self._relative[rows] if rows > 1 else self._one

    @property
    def _relative(self) -> list[float]:
        """Costs by number of rows, relative to one row."""
        found = self._costs
        if found is None:
            self._costs = found = self._interpolated()
        return found

    def observe(self, rows: int, seconds: float) -> None:
        """Record the duration of a forward pass, capped at twice the expected time in case the machine stalled."""
        several, seconds = rows > 1, max(seconds, _SHORTEST)
        self._passes[several] += 1
        if not self.known:
            self._one, self.known = seconds / self._relative[rows], True
            self._costs = None
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
            if self._alone > _ALONE and len(self._found) > 1:
                self._found = {n: 1 + _EASIER * (cost - 1) for n, cost in self._found.items()}
                self._costs = None
            return
        self._alone = 0
        if self._passes[1] > _LEARNT and self._seen[rows]:
            self._one *= exp(error / 2)
        before = self._relative[rows]
        now = self._found[rows] = max(expected * exp(error) / self._one, 1.0)
        self._seen[rows] += 1
        for other, cost in self._found.items():  # what was measured and not observed since changes alike
            if other > 1 and not self._seen[other]:
                share = (now - before) / (rows - 1) / (1 + abs(log2((other - 1) / (rows - 1))))
                self._found[other] = max(cost + share * (other - 1), now if other > rows else 1.0)
        self._costs = None

    def read(self, rows: int, seconds: float) -> None:
        """Record the duration of a pass that evaluated only a part of a prompt."""
        if rows >= self.most:
            seconds = max(seconds, _SHORTEST)
            self._prompt_row = min(seconds / rows, self._prompt_row or seconds)
            self._costs = None

    def _interpolated(self) -> list[float]:
        row = min(max(self._prompt_row / self._one, _LEAST_ROW), _MOST_ROW) if self._prompt_row else _ROW
        known = sorted(self._found)
        last = known[-1]
        most = self._found[last]
        each = (most - 1) / (last - 1) if last > 1 else row  # of the rows after the first
        more = max(each + (row - each) * _SAME_AGAIN / (_SAME_AGAIN + self._seen[last]), each)
        between = np.interp(range(last + 1), known, [self._found[n] for n in known]).tolist()
        return [*between, *(most + number * more for number in range(1, self.most + 1 - last))]


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


class Budget:
    """The time that drafts may lose, in tokens of plain decoding per request.

    It begins with an allowance. Drafts pay their costs from it and add what they save. Every pass adds a share of its
    time while less than the allowance is left. Drafts that may cost more than is left are not made. So all drafts
    together lose at most the allowance and that share of the time, however promising they look. After gains, long
    drafts are affordable at once.

    A draft model's prefill after a pause leaves a debt of one draft at most, which passes repay. What it costs beyond
    that is lost besides: at most the time of reading each token once.

    A larger allowance costs more where all drafts fail. A smaller one ends good drafts after bad luck at the start.
    """

    _ALLOWED, _SHARE, _MOST = 1.2, 0.003, 8.0
    _PART = 0.5  # share of the budget that several drafts may take

    def __init__(self) -> None:
        self.tokens = self._ALLOWED

    def allows(self, tokens: float, drafts: int) -> bool:
        """Whether a round with that number of drafts per request may lose `tokens`. One draft may take the whole
        budget, several drafts a part of it, because the first ones show most.
        """
        return tokens <= (self.tokens if drafts <= 1 else self._PART * self.tokens)

    def passes_until(self, tokens: float) -> int:
        """Return the number of passes, without drafts, until one draft may lose `tokens`."""
        return max(ceil((tokens - self.tokens) / self._SHARE), 0)

    def passed(self) -> None:
        """Record a pass."""
        if self.tokens < self._ALLOWED:
            self.tokens = min(self.tokens + self._SHARE, self._ALLOWED)

    def settle(self, saved: float) -> None:
        """Record what drafts have saved, less their cost, in tokens per request."""
        self.tokens = min(self.tokens + saved, self._MOST)


class Judge:
    """Decides whether a drafter drafts or pauses."""

    def __init__(self, priors: Sequence[float]) -> None:
        self.acceptance = Acceptance(priors)
        self._gained = 0.0  # of the newest rounds, in tokens
        self._rest = 0
        self._next_rest = _REST

    def skip_round(self) -> bool:
        """Skip a round of a pause, except its last one, which `ready` ends. Return whether it was skipped."""
        if self._rest <= 1:
            return False
        self._rest -= 1
        return True

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
        self._gained = 0.9 * self._gained + won
        if self._gained > 1:
            self._next_rest = _REST

    def rest(self) -> None:
        """Pause, because drafts are not expected to save time."""
        self._rest, self._next_rest = self._next_rest, min(_LONGER * self._next_rest, _LONGEST_REST)
        self._gained = 0.0


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
