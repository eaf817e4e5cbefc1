"""From other threads to the event loop: events of requests as an async iterator, and work in daemon threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from localllm.scheduler.request import Event, Failed, Finished, Request, Ticket

T = TypeVar("T")
Submit = Callable[[Request, Callable[[Event], None]], Ticket]


async def events(submit: Submit, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Event], None]:
    """Submit requests, and yield (number of the request, event) until all have ended.

    The queue is not bounded: a client that reads slowly must not hold up the scheduler, and an answer is at most as
    long as the context. Closing the iterator cancels the requests. Raises the error of a request that failed.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
    tickets: list[Ticket] = []

    def listener(number: int) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, (number, event))

        return listen

    try:
        for number, request in enumerate(requests):
            tickets.append(submit(request, listener(number)))
        left = len(requests)
        while left:
            number, event = await queue.get()
            if isinstance(event, Failed):
                raise event.error
            yield number, event
            left -= isinstance(event, Finished)
    finally:
        for ticket in tickets:
            ticket.cancel()


async def in_daemon(call: Callable[[], T], unwanted: Callable[[T], None]) -> T:
    """Run `call` in a daemon thread, and return its result. The program can end while it runs.

    asyncio.to_thread cannot do that: it joins its threads at exit. If the caller is cancelled, `unwanted` gets the
    result.
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
        with suppress(RuntimeError):  # the loop has ended, and the program is about to
            loop.call_soon_threadsafe(finish, deliver, value, good)

    threading.Thread(target=work, name="load", daemon=True).start()
    return await future
