"""The events of a front's requests in a replica, collected until the next report. The scheduler's thread fills it."""

from __future__ import annotations

import asyncio
import threading

from localllm.distributed.messages import Report, States
from localllm.generation.request import Event


class Outbox:
    """Collects events for one front. `put`, `step` and `drop` may be called from any thread, the others from one event
    loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[tuple[int, Event | States]] = []
        self._steps: list[tuple[int, int]] = []
        self._loop = asyncio.get_running_loop()
        self._some = asyncio.Event()
        self._woken = False
        self._reader = 0

    def put(self, number: int, event: Event | States) -> None:
        """Add an event of request `number`, and wake the reader unless it is about to read."""
        with self._lock:
            self._events.append((number, event))
            woken, self._woken = self._woken, True
        if not woken:
            self._loop.call_soon_threadsafe(self._some.set)

    def step(self, sequences: int, drafts: int = 0) -> None:
        """Count a step of the scheduler, for the front's metrics. The next report has it."""
        with self._lock:
            self._steps.append((sequences, drafts))

    def turn(self) -> int:
        """Begin to read, and return the number of this reader. Earlier ones get nothing more."""
        self._reader += 1
        return self._reader

    async def take(self, reader: int, seconds: float, number: int = 0) -> Report | None:
        """Return what has been collected, after at most `seconds`, as report `number`. None: a later reader began."""
        if not self._woken:
            try:
                async with asyncio.timeout(seconds):
                    await self._some.wait()
            except TimeoutError:
                pass
        if reader != self._reader:
            return None
        with self._lock:
            self._some.clear()
            events, self._events, self._woken = self._events, [], False
            steps, self._steps = self._steps, []
        return Report(events, None, steps, number=number)

    def drop(self, number: int) -> None:
        """Drop the events of a request that its front has given up."""
        with self._lock:
            self._events = [each for each in self._events if each[0] != number]
