"""Bridge from other threads to the event loop: events of requests, and work in daemon threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from localllm.generation.request import Event, Failed, Finished, Request
from localllm.generation.request_state import Ticket

T = TypeVar("T")
Submit = Callable[[Request, Callable[[Event], None]], Ticket]


class Inbox:
    """A queue of request events that is read on the event loop. Closing it cancels the requests, so always close it.

    The queue is unbounded, since a slow client must not delay the scheduler. The context limits the length of the
    output.
    """

    def __init__(self, submit: Submit, requests: Sequence[Request]) -> None:
        self.left = len(requests)  # unfinished requests
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._tickets: list[Ticket] = []
        try:
            for request in requests:
                self._tickets.append(submit(request, self._put))
        except BaseException:
            self.close()
            raise

    async def next(self) -> Event:
        """Return the next event of any request, or raise the error of a failed request."""
        event = await self._queue.get()
        if isinstance(event, Failed):
            raise event.error
        self.left -= isinstance(event, Finished)
        return event

    def _put(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    def close(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()


async def in_daemon(call: Callable[[], T], unwanted: Callable[[T], None]) -> T:
    """Run `call` in a daemon thread and return its result. The program can exit while it runs.

    asyncio.to_thread joins its threads at exit, so it cannot be used. If the caller is cancelled, the result is passed
    to `unwanted`.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(deliver: Callable[[Any], None], value: Any, good: bool) -> None:
        if not future.cancelled():
            deliver(value)
        elif good:
            threading.Thread(target=unwanted, args=(value,), daemon=True).start()

    def work() -> None:
        deliver: Callable[[Any], None] = future.set_result
        value: Any
        try:
            value, good = call(), True
        except BaseException as error:
            deliver, value, good = future.set_exception, error, False
        with suppress(RuntimeError):  # the loop is closed, and the program is about to exit
            loop.call_soon_threadsafe(finish, deliver, value, good)

    threading.Thread(target=work, name="load", daemon=True).start()
    return await future
