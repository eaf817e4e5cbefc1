"""Merge several streams into one, which yields each event with the number of its stream, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")
AT_ONCE = 64  # maximum running or queued choices of one request
AHEAD = 64  # maximum buffered events of all streams together


async def merged(streams: Sequence[AsyncGenerator[T, None]], most: int = 0) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the events of all streams. On exit or error, all streams are closed; an error is raised again.

    With `most`, at most that many streams run at once, and the next one starts when one ends.
    """
    places = asyncio.Semaphore(most or max(len(streams), 1))
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(AHEAD)
    tasks = [asyncio.create_task(_pump(number, stream, queue, places)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            match await queue.get():
                case None:
                    left -= 1
                case BaseException() as error:
                    raise error
                case event:
                    yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    number: int,
    stream: AsyncGenerator[T, None],
    queue: asyncio.Queue[tuple[int, T] | BaseException | None],
    places: asyncio.Semaphore,
) -> None:
    try:
        async with aclosing(stream), places:
            async for event in stream:
                await queue.put((number, event))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
