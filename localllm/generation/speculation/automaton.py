"""A suffix automaton: the substrings of a text, and how often each token followed each of them.

It grows by one token at a time (Blumer et al. 1985; for drafting: SAM decoding, arXiv 2411.10666). All substrings of
one state end at the same positions.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from localllm.generation.speculation.rule import DraftToken

_WALK = 4096  # maximum number of contexts visited per token; in texts such as "aaaab", the last token visits all
_CHAIN = 16  # maximum number of contexts updated per token; more occur in texts such as "aaaa"
END = 2**31 - 1  # stands after each text in an automaton of several; no vocabulary has this token

# A draft's acceptance rate depends on the length of its context, on the share of the context's occurrences that the
# token followed, and on how often it did. These are the class bounds, and the rates that benchmarks/repetition.py
# measured.
_LENGTHS, _SHARES, _COUNTS = (1, 2, 3, 5, 8, 16), (0.51, 0.85), (1, 2, 3)
_RATES = (  # one row per length; share below 0.51 with counts 1, 2, 3, then below 0.85, then above
    (0.12, 0.12, 0.16, 0.28, 0.28, 0.39, 0.30, 0.56, 0.74),
    (0.16, 0.19, 0.29, 0.31, 0.31, 0.48, 0.40, 0.61, 0.78),
    (0.22, 0.20, 0.24, 0.39, 0.39, 0.52, 0.55, 0.76, 0.88),
    (0.27, 0.23, 0.30, 0.38, 0.38, 0.60, 0.69, 0.84, 0.93),
    (0.38, 0.25, 0.30, 0.38, 0.38, 0.64, 0.81, 0.89, 0.94),
    (0.30, 0.30, 0.30, 0.55, 0.55, 0.85, 0.97, 0.96, 0.98),
)
RATES = tuple(rate for row in _RATES for rate in row)


class Context(NamedTuple):
    """The longest end of a text that occurs in an automaton: its state, and its length in tokens."""

    state: int
    length: int


START = Context(0, 0)


class SuffixAutomaton:
    """The substrings of a text, and how often each token followed each of them.

    State 0 is the empty substring. Most states have one transition, which `_token` and `_target` hold; states with more
    keep a dictionary.
    """

    def __init__(self) -> None:
        self.tokens = 0  # length of the text
        self._last = 0  # the state of the whole text
        self._link, self._length = array("i", [-1]), array("i", [0])  # longest suffix in another state; longest member
        self._count = array("i", [0])  # occurrences
        self._best = array("i", [-1])  # the most frequent next token; of equally frequent ones, the newest
        self._token, self._target = array("i", [-1]), array("i", [-1])
        self._more: dict[int, dict[int, int]] = {}
        self._columns = [(self._link, 0), (self._count, 0), (self._best, -1), (self._token, -1), (self._target, -1)]

    @property
    def repeated(self) -> Context:
        """The longest end of the text that occurred before."""
        state = max(self._link[self._last], 0)
        return Context(state, self._length[state])

    def after(self, context: Context, token: int) -> Context:
        """Return the context of another text after one more token."""
        state, length = self._settled(context)
        left = _WALK
        while state > 0 and self._next(state, token) < 0:
            state = self._link[state] if left else 0
            length = self._length[state]
            left -= 1
        following = self._next(state, token)
        return Context(following, length + 1) if following > 0 else START

    def continuations(self, context: Context, at_end: bool) -> Iterator[DraftToken]:
        """Yield the most frequent next token of the context, then of the context with that token, and so on.

        `at_end`: whether one of the context's occurrences is the end of the text, which nothing has followed.
        """
        state, length = self._settled(context)
        ending = int(at_end)
        while True:
            while state > 0 and self._best[state] < 0:  # nothing has followed this context yet
                state = self._link[state]
                length, ending = self._length[state], int(at_end)
            if state <= 0:
                return
            token = self._best[state]
            following = self._next(state, token)
            count = self._count[following]
            share = bisect_right(_SHARES, count / max(self._count[state] - ending, count))
            row, column = bisect_right(_LENGTHS, length) - 1, share * len(_COUNTS) + min(count, _COUNTS[-1]) - 1
            yield DraftToken(token, row * len(_RATES[0]) + column)
            state, length, ending = following, length + 1, 0

    def extend(self, token: int) -> bool:
        """Append a token to the text: create its states, then count it in each context that it followed.

        Return False if too many contexts lead to the token, because a few repeated tokens fill the text. The automaton
        is then useless. One visit could take seconds.
        """
        self.tokens += 1
        before = self._last
        self._last = new = self._state(self._length[before] + 1)
        context, left = before, _WALK
        while context >= 0 and (following := self._next(context, token)) < 0 and left:
            self._connect(context, token, new)
            context = self._link[context]
            left -= 1
        if context >= 0 and left:
            self._link[new] = self._split(context, token, following, left)
        if not left or self._link[new] < 0:
            return False
        self._count_up(new, before, token)
        return True

    def _settled(self, context: Context) -> Context:
        """Return the state that holds the context now: texts appended since may have split its state."""
        state, length = context
        while state > 0 and length <= self._length[self._link[state]]:
            state = self._link[state]
        return Context(state, length)

    def _next(self, state: int, token: int) -> int:
        """Return the state after a token, or -1."""
        if state in self._more:
            return self._more[state].get(token, -1)
        return self._target[state] if self._token[state] == token else -1

    def _connect(self, state: int, token: int, target: int) -> None:
        if state in self._more:
            self._more[state][token] = target
        elif self._token[state] in (-1, token):
            self._token[state], self._target[state] = token, target
        else:
            self._more[state] = {self._token[state]: self._target[state], token: target}

    def _state(self, length: int, like: int = 0) -> int:
        """Create a state; `like`: with the transitions, link, count and best next token of another state than 0."""
        state = len(self._length)
        self._length.append(length)
        for values, empty in self._columns:
            values.append(values[like] if like else empty)
        if like and like in self._more:
            self._more[state] = dict(self._more[like])
        return state

    def _split(self, context: int, token: int, following: int, left: int) -> int:
        """Return the state of the substring context + token, which may so far share a state with longer substrings.

        Return -1 if more than `left` contexts lead to it.
        """
        length = self._length[context] + 1
        if length == self._length[following]:
            return following
        split = self._state(length, like=following)
        self._link[following] = split
        while context >= 0 and self._next(context, token) == following:
            if not left:
                return -1
            self._connect(context, token, split)
            context = self._link[context]
            left -= 1
        return split

    def _count_up(self, new: int, context: int, token: int) -> None:
        state = new
        for _ in range(_CHAIN):
            if state <= 0:
                break
            self._count[state] += 1
            state = self._link[state]
        for _ in range(_CHAIN):
            if context <= 0:
                break
            best = self._best[context]
            if best != token and (
                best < 0 or self._count[self._next(context, token)] >= self._count[self._next(context, best)]
            ):
                self._best[context] = token
            context = self._link[context]
