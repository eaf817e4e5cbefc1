"""Several streams as one, each event with the number of its stream: completions of a list of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from localllm.server.collected import closing

T = TypeVar("T")
AT_ONCE = 4  # streams of one request that run together; the scheduler queues no more of them


async def merged(sources: Sequence[Callable[[], AsyncIterator[T]]]) -> AsyncIterator[tuple[int, T]]:
    """Yield the events of all sources as they come. The first error ends all of them; closing closes them."""
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(AT_ONCE)
    places = asyncio.Semaphore(AT_ONCE)

    async def run(number: int) -> None:
        try:
            async with places, closing(sources[number]()) as events:
                async for event in events:
                    await queue.put((number, event))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(run(number)) for number in range(len(sources))]
    try:
        for _ in sources:
            while (found := await queue.get()) is not None:
                if isinstance(found, BaseException):
                    raise found
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
