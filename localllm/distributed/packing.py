"""Requests with pictures or sound before a front sends them: they wait for room in Ray's shared memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any

from localllm.base.errors import LocalLLMError
from localllm.distributed.answer import Answer
from localllm.distributed.media import MOST_BYTES, media_bytes, packed
from localllm.server.bridge import in_daemon

log = logging.getLogger("localllm")


class Packing:
    """Packs the pictures of waiting requests in another thread, because that takes long. Used on the scheduler's loop.

    While there is room, the account with the least room comes next. Of several such accounts, that is the one without
    room for the longest time. So the pictures of one client do not wait behind many of another.
    """

    def __init__(
        self,
        opened: Callable[[], Iterable[Answer]],
        start: Callable[[Any], object],
        send: Callable[[Answer], None],
        fail: Callable[[Answer, LocalLLMError], None],
    ) -> None:
        """`opened` returns all open requests, `start` runs a coroutine, and `send` takes packed requests."""
        self._opened, self._start, self._send, self._fail = opened, start, send, fail
        self._clock = count(1)
        self._waiting: dict[Answer, int] = {}  # the time at which each came, the oldest first
        self._turns: dict[str, int] = {}  # the last time at which each account with waiting requests held some room
        self._busy: set[Answer] = set()  # being packed; a client that leaves does not stop the thread

    def add(self, answer: Answer) -> None:
        self._waiting[answer] = next(self._clock)
        self.advance()

    def advance(self) -> None:
        """Pack the next requests while there is room."""
        self._waiting = {each: came for each, came in self._waiting.items() if not each.over}
        held, now = Counter[str](), next(self._clock)
        for each in {*self._opened(), *self._busy}:
            held[each.request.account] += each.held
        accounts = {each.request.account for each in self._waiting}
        self._turns = {each: now if held[each] else self._turns.get(each, 0) for each in accounts}

        def order(answer: Answer) -> tuple[int, int]:
            account = answer.request.account
            return held[account], max(self._waiting[answer], self._turns[account])

        while self._waiting:
            answer = min(self._waiting, key=order)
            size = media_bytes(answer.request.prompt)
            if held.total() + size > MOST_BYTES:
                return
            answer.held = size
            held[answer.request.account] += size
            self._turns[answer.request.account] = next(self._clock)
            del self._waiting[answer]
            self._busy.add(answer)
            self._start(self._pack(answer))

    async def _pack(self, answer: Answer) -> None:
        problem = ""
        try:
            media = await in_daemon(partial(packed, answer.request.prompt), lambda unwanted: None)
        except Exception as error:
            log.warning("pictures cannot be packed: %s", error)
            problem = "the pictures of this prompt could not be sent; see the log of the server"
        self._busy.discard(answer)
        if answer.over:  # its client left meanwhile
            self.advance()
        elif problem:
            self._fail(answer, LocalLLMError(problem))
        else:
            answer.media = media
            self._send(answer)
