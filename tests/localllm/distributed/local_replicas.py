"""Replicas in this process, without Serve and Ray, and the front that sends requests to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import localllm
from localllm.distributed.fleet import Fleet
from localllm.distributed.messages import Ask, Listen, Origin, Report
from localllm.distributed.remote import RemoteScheduler
from localllm.distributed.replica import Replica
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Event, Request
from localllm.generation.scheduler import Scheduler
from tests.localllm.generation.support import Answer, scheduled

pytest.importorskip("zmq", reason="replicas send events through pyzmq")
from localllm.distributed.direct import DirectSender

LIMITS = SchedulerLimits(parallel=3)


class LocalReplica(Replica):
    """A replica without Serve and Ray."""

    def __init__(self, model: localllm.Model, name: str, wire: Local) -> None:
        self.name, self._model, self._outboxes, self._problem = name, model, {}, ""
        self.wire = wire
        self._stages, self._pulsed = None, time.monotonic()
        self._scheduler = Scheduler(model.new_core(LIMITS, self))
        self.dead = self.hung = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.senders: list[LocalSender] = []

    def _direct(self, key: bytes) -> DirectSender | None:
        self.senders.append(LocalSender(self, key))
        return self.senders[-1]

    def where(self) -> tuple[str, Origin]:
        return self.name, Origin(self.name, "test", 0, "node", problem=self._problem)

    async def stopped(self) -> None:
        """Return while the replica works. Raise once it is dead."""
        while self.hung and not self.dead:
            await asyncio.sleep(0.01)
        if self.dead:
            raise ConnectionError("the replica died")


class LocalSender(DirectSender):
    """The replica's end of a direct connection, which hangs and dies with the replica, and may lose a report."""

    def __init__(self, replica: LocalReplica, key: bytes) -> None:
        super().__init__(key, "127.0.0.1")
        self._replica, self.sent = replica, 0

    async def send(self, report: Report) -> bool:
        await self._replica.stopped()
        wire = self._replica.wire
        if wire.lose_after is not None and self.sent > wire.lose_after and report.events:
            wire.lose_after = None
            return True
        done = await super().send(report)
        self.sent += done and len(report.events)
        return done


class Local:
    """The way to replicas in this process: it routes as Serve's router does. Killed replicas raise, hung ones wait."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.replicas = fleet, dict[str, LocalReplica]()
        self.killed: list[str] = []
        self.asks: list[Ask] = []
        self.lose_after: int | None = None  # events: the first replica that sent more loses a report
        self.elsewhere: Callable[[], None] | None = None  # starts a replica on a machine that was left out

    def add(self, replica: LocalReplica) -> None:
        self.replicas[replica.name] = replica
        self.fleet.update(list(self.replicas))

    def ask(self, ask: Ask) -> Any:
        return asyncio.get_running_loop().create_task(self._ask(ask))

    async def _ask(self, ask: Ask) -> None:
        self.asks.append(ask)
        while not (names := self.fleet.ranked(list(self.replicas), ask.chunks, ask.tokens)):
            await asyncio.sleep(0.01)
        replica = self.replicas[names[0]]
        self.fleet.sent(ask.number, replica.name, ask.chunks)
        work = asyncio.get_running_loop().create_task(replica.answer(ask))
        try:
            while not work.done() or replica.hung:
                if replica.dead:
                    raise ConnectionError("the replica died")
                await asyncio.wait([work], timeout=0.005)
            work.result()
        finally:
            work.cancel()

    def listen(self, listen: Listen) -> Any:
        return Reports(self.replicas[listen.replica], listen)

    async def kill(self, origin: Origin) -> None:
        self.killed.append(origin.actor)
        self.end(origin.actor)

    def forget(self, listen: Listen) -> Any:
        return self.replicas[listen.replica].forget(listen)

    def pulse(self, listen: Listen) -> Any:
        return self.replicas[listen.replica].pulse(listen)

    def end(self, name: str) -> None:
        """End a replica as SIGKILL does."""
        self.replicas.pop(name).dead = True
        self.fleet.forget(name)

    def revive(self) -> str:
        if (start := self.elsewhere) is None:
            return ""
        self.elsewhere = None
        start()
        return "another machine takes them"

    def close(self) -> None:
        pass


class Reports:
    """The reports of a replica while it lives."""

    def __init__(self, replica: LocalReplica, listen: Listen) -> None:
        self._replica, self._reports = replica, replica.listen(listen)

    async def __aiter__(self) -> AsyncIterator[Report]:
        async for report in self._reports:
            await self._replica.stopped()
            yield report

    def cancel(self) -> None:
        pass


class Front:
    def __init__(self, models: list[localllm.Model], limits: SchedulerLimits, count: int) -> None:
        self.fleet = Fleet("test", limits.parallel)
        self.wire, self.models = Local(self.fleet), models
        for number in range(count):
            self.start(number)
        self.scheduler = RemoteScheduler(self.wire, "test", self.fleet, limits)

    def start(self, number: int) -> None:
        self.wire.add(LocalReplica(self.models[number], f"replica{number}", self.wire))

    def ask(self, request: Request) -> Answer:
        answer = Answer()
        answer.ticket = self.scheduler.submit(request, answer)
        return answer

    def holder(self) -> LocalReplica:
        """Return the replica that has a request."""
        return next(each for name, each in self.wire.replicas.items() if self.fleet.having(name))


class Unanswered(Local):
    """The way to replicas that never answer."""

    async def _ask(self, ask: Ask) -> None:
        self.asks.append(ask)
        await asyncio.sleep(60)


def until(ready: Callable[[], Any], seconds: float = 20) -> Any:
    """Wait for a true value, and return it."""
    stop = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < stop, "it does not happen"
        time.sleep(0.005)
    return found


def request_of(model: localllm.Model, length: int = 120, **asking: Any) -> Request:
    sampling = model.sampling_defaults.options({"seed": 7, "temperature": 0.9, "repeat_penalty": 1.1})
    return Request(model.tokenize("Once upon a time"), sampling, length, ignore_eos=True, **asking)


def undisturbed(model: localllm.Model, request: Request) -> list[Event]:
    with scheduled(model, parallel=2) as scheduler:
        answer = Answer()
        scheduler.submit(request, answer)
        answer.result()
    return answer.events


@contextmanager
def unanswered() -> Iterator[RemoteScheduler]:
    """Yield a front whose requests no replica answers."""
    fleet = Fleet("test", LIMITS.parallel)
    with RemoteScheduler(Unanswered(fleet), "test", fleet, replace(LIMITS, waiting=20)) as scheduler:
        yield scheduler
