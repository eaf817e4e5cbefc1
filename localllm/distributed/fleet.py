"""The replicas that a front knows: the requests that each has, the prompts in its cache, and which one comes next.

The rule: among the replicas whose queue is at most `slack` requests longer than the shortest queue, the one with the
least work before the answer begins. The work is the number of tokens to evaluate, plus WAITING for each open request.
So a conversation returns to the replica that has its prefix, but no prefix outweighs a much longer queue.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from weakref import WeakValueDictionary

from localllm.distributed.messages import CHUNK

WAITING = 128  # tokens that could be evaluated while one more open request waits or decodes
MOST_CHUNKS = 1 << 16  # maximum remembered chunks of one replica


_FLEETS: WeakValueDictionary[str, Fleet] = WeakValueDictionary()  # of the fronts in this process, by name


class Member:
    """What the front remembers of one replica."""

    def __init__(self) -> None:
        self.open: set[int] = set()  # numbers of its requests
        self.suspect = False  # whether it is silent
        self.gone = False  # whether it has ended; it stays here until its requests are sent elsewhere
        self._chunks: OrderedDict[int, None] = OrderedDict()  # hashes of evaluated chunks, the newest last

    def cached(self, chunks: Sequence[int]) -> int:
        """Return the number of leading chunks that the replica has evaluated."""
        return next((count for count, chunk in enumerate(chunks) if chunk not in self._chunks), len(chunks))

    def remember(self, chunks: Sequence[int], most: int) -> None:
        for chunk in chunks:
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > most:
            self._chunks.popitem(last=False)


class Fleet:
    """The replicas of one front. Thread-safe: Serve's router and the front's scheduler share it."""

    def __init__(self, front: str, slack: int, most_chunks: int = MOST_CHUNKS) -> None:
        """`slack` is the number of requests by which a queue may be longer than the shortest one."""
        _FLEETS[front] = self
        self._slack, self.most_chunks = slack, most_chunks
        self._lock = threading.Lock()
        self._members: dict[str, Member] = {}
        self._turn = 0  # number of choices so far, so that equal replicas take turns

    def update(self, names: Collection[str]) -> None:
        """Follow Serve's list of running replicas. What a replica had is forgotten with it."""
        with self._lock:
            for name in names:
                self._members.setdefault(name, Member()).gone = False
            for name in set(self._members) - set(names):
                self._leave(name)

    def forget(self, name: str) -> None:
        """Forget a dead replica."""
        with self._lock:
            if name in self._members:
                self._leave(name)

    def _leave(self, name: str) -> None:
        self._members[name].gone = True
        if not self._members[name].open:
            del self._members[name]

    @property
    def names(self) -> list[str]:
        with self._lock:
            return [name for name, member in self._members.items() if not member.gone]

    @property
    def alive(self) -> int:
        """Number of replicas that are not silent."""
        with self._lock:
            return sum(not (member.suspect or member.gone) for member in self._members.values())

    def suspect(self, name: str, silent: bool = True) -> None:
        """Send nothing to a silent replica until it is heard again (`silent` is false)."""
        with self._lock:
            if name in self._members:
                self._members[name].suspect = silent

    def ranked(self, names: Collection[str], chunks: Sequence[int], tokens: int) -> list[str]:
        """Return the replicas that may take a prompt of `tokens` tokens with these chunks, the best first."""
        with self._lock:
            members = {name: self._members[name] for name in names if name in self._members}
            members = {name: member for name, member in members.items() if not (member.suspect or member.gone)}
            if not members:
                return []
            shortest = min(len(member.open) for member in members.values())
            self._turn += 1
            turn = self._turn

            def work(place: int, name: str) -> tuple[bool, int, int, int]:
                member = members[name]
                queue = len(member.open)
                new = tokens - CHUNK * member.cached(chunks)
                return queue > shortest + self._slack, new + WAITING * queue, queue, (place + turn) % len(members)

            order = sorted(enumerate(members), key=lambda each: work(*each))
            return [name for _, name in order]

    def sent(self, number: int, name: str, chunks: Sequence[int]) -> None:
        """Remember that a request went to a replica."""
        with self._lock:
            if (member := self._members.get(name)) is not None:
                member.open.add(number)
                member.remember(chunks, self.most_chunks)

    def ended(self, number: int, chunks: Sequence[int] = ()) -> None:
        """Forget a request. Its whole text has these chunks, which stay in the replica's cache."""
        with self._lock:
            for name, member in list(self._members.items()):
                if number in member.open:
                    member.open.discard(number)
                    member.remember(chunks, self.most_chunks)
                    if member.gone:
                        self._leave(name)

    def having(self, name: str) -> list[int]:
        """Return the numbers of the requests that a replica has."""
        with self._lock:
            member = self._members.get(name)
            return [] if member is None else list(member.open)


def fleet_of(front: str) -> Fleet | None:
    """Return the fleet of a front in this process."""
    return _FLEETS.get(front)
