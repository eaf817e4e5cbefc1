"""From the scheduler's thread to the event loop: the events of one or several requests as an async iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from localllm.scheduler.request import Event, Failed, Finished, Request, Ticket

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
