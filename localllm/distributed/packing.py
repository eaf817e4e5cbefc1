"""Requests with pictures or sound before a front sends them: they wait for room in Ray's shared memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from localllm.base.errors import LocalLLMError
from localllm.distributed.answer import Answer
from localllm.distributed.media import MOST_BYTES, media_bytes, packed
from localllm.server.bridge import in_daemon

log = logging.getLogger("localllm")


class Packing:
    """Packs the pictures of waiting requests in another thread, because that takes long. Used on the scheduler's loop.

    While there is room, the next request is the oldest one of the account that holds the least. So the pictures of one
    client do not wait behind many of another.
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
        self._waiting: list[Answer] = []

    def add(self, answer: Answer) -> None:
        self._waiting.append(answer)
        self.advance()

    def advance(self) -> None:
        """Pack the next requests while there is room."""
        self._waiting = [each for each in self._waiting if not each.over]
        held = Counter[str]()
        for each in self._opened():
            held[each.request.account] += each.held
        while self._waiting:
            answer = min(self._waiting, key=lambda each: held[each.request.account])
            size = media_bytes(answer.request.prompt)
            if held.total() + size > MOST_BYTES:
                return
            answer.held = size
            held[answer.request.account] += size
            self._waiting.remove(answer)
            self._start(self._pack(answer))

    async def _pack(self, answer: Answer) -> None:
        try:
            answer.media = await in_daemon(partial(packed, answer.request.prompt), lambda unwanted: None)
        except Exception as error:
            log.warning("pictures cannot be packed: %s", error)
            problem = "the pictures of this prompt could not be sent; see the log of the server"
            self._fail(answer, LocalLLMError(problem))
            return
        self._send(answer)
