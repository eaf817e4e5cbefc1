"""Merging several event streams into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from localllm.server.merge import merged


class Stream:
    def __init__(self, *values: int | Exception, hang: bool = False) -> None:
        self.values = values
        self.hang = hang
        self.closed = False

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for value in self.values:
                await asyncio.sleep(0)
                if isinstance(value, Exception):
                    raise value
                yield value
            if self.hang:
                await asyncio.sleep(3600)
        finally:
            self.closed = True


async def collect(*streams: Stream) -> list[tuple[int, int]]:
    async with aclosing(merged([each.run() for each in streams])) as events:
        return [event async for event in events]


def test_each_stream_keeps_its_order() -> None:
    found = asyncio.run(collect(Stream(*range(200)), Stream(), Stream(*range(50))))
    assert [value for number, value in found if number == 0] == list(range(200))
    assert [value for number, value in found if number == 2] == list(range(50))
    assert len(found) == 250


def test_only_so_many_run_at_once() -> None:
    running = most = 0

    async def one() -> AsyncGenerator[int, None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for number in range(3):
            await asyncio.sleep(0)
            yield number
        running -= 1

    async def main() -> int:
        async with aclosing(merged([one() for _ in range(20)], 4)) as events:
            return len([event async for event in events])

    assert asyncio.run(main()) == 60
    assert most == 4


def test_none_is_no_event_and_no_end() -> None:
    assert asyncio.run(collect()) == []


def test_an_error_ends_all() -> None:
    streams = [Stream(1, 2, hang=True), Stream(1, ValueError("x"))]
    with pytest.raises(ValueError, match="x"):
        asyncio.run(collect(*streams))
    assert all(each.closed for each in streams)


def test_closing_closes_all() -> None:
    streams = [Stream(1, hang=True), Stream(1, hang=True)]

    async def main() -> None:
        async with aclosing(merged([each.run() for each in streams])) as events:
            async for _ in events:
                break

    asyncio.run(main())
    assert all(each.closed for each in streams)
