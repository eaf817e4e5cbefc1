"""The scheduler of a front: sends requests to replicas, and passes their events on. It has `Scheduler`'s interface.

It keeps the tokens that each client has. If a replica dies, or is silent for SILENT seconds, its requests are sent
again to another one, with these tokens as their known continuation (`Request.known`). The replica verifies the tokens
and continues.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from localllm.base.closing import Closing
from localllm.base.errors import LocalLLMError
from localllm.base.printable import printable
from localllm.cluster.errors import StageLost
from localllm.distributed.answer import Answer, RemoteTicket
from localllm.distributed.fleet import Fleet
from localllm.distributed.media import check_media, media_bytes, routed
from localllm.distributed.messages import Ask, Listen, Origin, Report, States, chunks_of
from localllm.distributed.packing import Packing
from localllm.generation.errors import Stopped
from localllm.generation.interfaces import Load, Observer, Replicas, SchedulerLimits
from localllm.generation.open_requests import OpenRequests
from localllm.generation.request import Event, Failed, Finished, Request, Started
from localllm.generation.request_state import Ticket
from localllm.generation.slots import Slots
from localllm.generation.statistics import Usage
from localllm.server.bridge import in_daemon

if TYPE_CHECKING:
    from localllm.distributed.direct import Reports

T = TypeVar("T")
log = logging.getLogger("localllm.server")
SILENT = 1.0  # seconds without a report after which a replica's requests are sent to another one
PULSE = 5.0  # seconds between two signs of life to a replica
LOOK = 0.1  # seconds between two looks at the replicas
FIRST_SILENT = 5.0  # seconds until the first report of a replica
RECOVERING = 0.3  # seconds for which a replica may wait for a lost stage before its requests are sent to others
KILLED = 1.5  # seconds without a report after which a replica is killed, so that it starts again
REVIVE = 0.5  # seconds without a replica before machines that were left out are considered
RETRY = 0.05  # seconds before a failed call is sent again, times the number of tries
MOST_TRIES = 20  # times that a request is sent, at most


class Wire(Protocol):
    """The way to the replicas (`deployment.py`; tests have their own). Its calls run on the scheduler's event loop."""

    def ask(self, ask: Ask) -> Any:
        """Send a request. Return an awaitable with `cancel`, which ends with the answer, or raises if it is lost."""
        ...

    def listen(self, listen: Listen) -> Any:
        """Return an asynchronous iterator over a replica's reports, with `cancel`."""
        ...

    async def kill(self, origin: Origin) -> None:
        """End a replica that does not answer, so that Serve starts it again."""
        ...

    def forget(self, listen: Listen) -> Any:
        """Tell one replica to clear its prefix cache. Return an awaitable."""
        ...

    def pulse(self, listen: Listen) -> Any:
        """Tell one replica that its front lives. Return an awaitable."""
        ...

    def revive(self) -> str:
        """Start replicas elsewhere if their machines are gone for good; this may take seconds. Return a note, or ""."""
        ...

    def close(self) -> None: ...


class RemoteScheduler(Closing):
    """Runs requests at replicas until it is closed."""

    def __init__(
        self,
        wire: Wire,
        front: str,
        fleet: Fleet,
        limits: SchedulerLimits,
        observer: Observer | None = None,
        replicas: int = 1,
    ) -> None:
        """`limits` apply to all replicas together, at most `replicas`. `observer` counts their steps."""
        self.limits, self.fleet = limits, fleet
        self.moved = self.lost = 0  # requests sent again, and replicas that died or were silent
        self._replicas, self._stages, self._hop = replicas, 1, 0.0
        from localllm.distributed.direct import DirectReceiver

        self._wire, self._front, self._observer = wire, front, observer
        self._open, self._numbers = OpenRequests(), count(1)
        self._answers: dict[int, Answer] = {}  # by the number of their newest attempt
        self._packing = Packing(self._answers.values, self._start, self._send, self._fail)
        self._heard: dict[str, float] = {}  # when each replica was heard last
        self._loads: dict[str, Load] = {}
        self._restarted: dict[str, int] = {}  # stages of each replica that were started again
        self._restarted_before = 0  # of replicas that have ended
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, Reports] = {}  # of the replicas that are heard
        self._direct = DirectReceiver()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: set[str] = set()  # replicas that are counted in `lost`
        self._killed: set[str] = set()
        self._recovering: set[str] = set()  # replicas that wait for lost stages
        self._broken: dict[str, str] = {}  # replicas that could not open the model, and why
        self._unrevived = ""  # why replicas did not start elsewhere, as it was logged last
        self.origins: dict[str, Origin] = {}  # of the replicas that are heard
        self._stopped: Stopped | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)
        self._thread.start()

    # -- for any thread --------------------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Callable[[Event], None]) -> Ticket:
        """Send a request. The scheduler's thread calls `listener` with the request's events. Raise as `Scheduler`."""
        if not request.prompt:
            raise LocalLLMError("the prompt has no tokens; give some text")
        check_media(request.prompt)
        if self._stopped is not None:
            raise self._stopped
        self._open.enter(request.account, self.limits.parallel + self.limits.waiting)
        if request.sampling.seed < 0:  # so that another replica repeats the same answer
            request = replace(request, sampling=request.sampling.changed({"seed": secrets.randbits(32)}))
        answer = Answer(request, listener)
        ticket = RemoteTicket(request, listener, gone=lambda: self._soon(self._cancelled, answer))
        self._soon(self._begin, answer)
        return ticket

    def load(self) -> Load:
        """Return the load of all replicas together, as they reported it last."""
        loads = list(self._loads.values())
        running = tuple(slot for load in loads for slot in load.running)
        running = tuple(replace(slot, number=number) for number, slot in enumerate(running))

        def total(each: Callable[[Load], int]) -> int:
            return sum(map(each, loads))

        return Load(
            running, max(0, self._open.count - len(running)), total(lambda load: load.kept_tokens),
            total(lambda load: load.kept_blocks), total(lambda load: load.free_blocks), total(lambda load: load.blocks),
            Replicas(
                self.fleet.alive, self._replicas, self._stages, self._hop, self.lost, self.moved,
                self._restarted_before + sum(self._restarted.copy().values()),
            ),
        )  # fmt: skip

    def forget(self) -> None:
        """Clear the prefix caches."""
        self._soon(self._forget)

    def between(self, job: Callable[[Slots], T]) -> Future[T]:
        """Raise LocalLLMError: each replica has its own slots."""
        raise LocalLLMError("slots of replicas cannot be saved, restored or erased; each replica has its own")

    def close(self) -> None:
        """End all requests with the error Stopped, and the connection to the replicas."""
        self._stopped = self._stopped or Stopped("the server is shutting down")
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._wire.close()

    def _soon(self, call: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, and all requests have ended
            self._loop.call_soon_threadsafe(call, *args)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._start(self._watch())
        self._loop.run_forever()

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self) -> None:
        for answer in list(self._answers.values()):
            self._fail(answer, self._stopped or Stopped("the server is shutting down"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._direct.close()

    def _forget(self) -> None:
        for name in self.fleet.names:
            self._start(self._told(self._wire.forget(Listen(self._front, name))))

    async def _told(self, call: Any) -> None:
        with suppress(Exception):  # the replica is lost, with its cache
            await call

    # -- requests --------------------------------------------------------------------------------------------------

    def _begin(self, answer: Answer) -> None:
        """Send a new request, once its pictures and sounds are packed."""
        if self._stopped is not None or not media_bytes(answer.request.prompt):
            self._send(answer)
            return
        answer.number = next(self._numbers)
        self._answers[answer.number] = answer
        self._packing.add(answer)

    def _send(self, answer: Answer) -> None:
        """Send a request, for the first time or again."""
        if answer.over:
            return
        self._answers.pop(answer.number, None)
        answer.number, answer.tries, answer.reached = next(self._numbers), answer.tries + 1, 0
        answer.running = False
        problem = self._hopeless()
        if self._stopped is not None or problem or answer.tries > MOST_TRIES:
            self._answers[answer.number] = answer
            error = Stopped(problem or "no replica could answer; see the log of the server")
            self._fail(answer, self._stopped or error)
            return
        self._answers[answer.number] = answer
        prompt = routed(answer.request.prompt)
        ask = Ask.of(self._front, answer.number, answer.request, prompt, answer.known, answer.media)
        try:
            answer.call = self._wire.ask(ask)
        except Exception as error:  # Ray cannot take it now
            answer.call = self._loop.create_future()
            answer.call.set_exception(error)
        self._start(self._wait(answer, answer.number, answer.call))

    async def _wait(self, answer: Answer, number: int, call: Any) -> None:
        """Wait for the end of a request's call. A call that fails is sent again."""
        try:
            await call
        except asyncio.CancelledError:
            return
        except Exception as error:
            if answer.number == number and not answer.over:
                log.warning("a request is sent to another replica: %s", _line(error))
                await asyncio.sleep(RETRY * answer.tries)
                if answer.number == number:
                    self._move(number)

    def _move(self, number: int) -> None:
        """Send a request again, with the tokens that its client has."""
        answer = self._answers.get(number)
        if answer is None or answer.over:
            self.fleet.ended(number)  # Serve may have routed it after its end
            return
        self.moved += 1
        self.fleet.ended(number)
        call, answer.call = answer.call, None
        if call is not None:
            call.cancel()
        self._send(answer)

    def _cancelled(self, answer: Answer) -> None:
        """End a request whose client has left: at the replica too, at its next step."""
        if answer.over:
            return
        if answer.call is not None:
            answer.call.cancel()
        usage = Usage(prompt_tokens=len(routed(answer.request.prompt)), answer_tokens=len(answer.known))
        self._finish(answer, Finished("cancelled", "", usage, choice=answer.request.choice))

    def _fail(self, answer: Answer, error: LocalLLMError) -> None:
        if answer.call is not None:
            answer.call.cancel()
        self._finish(answer, Failed(error, answer.request.choice))

    def _finish(self, answer: Answer, event: Event) -> None:
        """Pass the last event to the client."""
        if answer.over:
            return
        answer.over = True
        self._answers.pop(answer.number, None)
        self.fleet.ended(answer.number, chunks_of([*routed(answer.request.prompt), *answer.known]))
        self._open.leave(answer.request.account)
        answer.media = ()
        self._packing.advance()
        with suppress(Exception):  # the event loop of the client is closed
            answer.listener(event)

    def _take(self, number: int, event: Event | States) -> None:
        """Pass an event on to the client of its request, unless the request was sent again or has ended."""
        answer = self._answers.get(number)
        if answer is None or answer.over:
            return
        if isinstance(event, States):
            if answer.request.states is not None:
                answer.request.states(event.start, event.rows)
        elif isinstance(event, Failed) and isinstance(event.error, Stopped | StageLost):  # it ends, or is broken
            self._move(number)
        elif isinstance(event, Started) and answer.running:
            # a replica died before Serve knew that it had accepted the request; Serve sent it again, without the tokens
            self._move(number)
        elif isinstance(event, Finished | Failed):
            self._finish(answer, answer.fresh(event) or event)
        elif (new := answer.fresh(event)) is not None:
            try:
                answer.listener(new)
            except Exception:  # the event loop of the client is closed
                self._cancelled(answer)

    # -- replicas --------------------------------------------------------------------------------------------------

    async def _pump(self, name: str) -> None:
        """Read the reports of a replica until it ends."""
        from localllm.distributed.direct import Reports

        stream = self._wire.listen(Listen(self._front, name, self._direct.public_key))
        reports = self._reports[name] = Reports(partial(self._hear, name), partial(self._report, name))
        try:
            await reports.read(stream, self._direct)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        except Exception as error:
            log.warning("replica %s is lost: %s", name, _line(error))
        finally:
            self._broken.pop(name, None)
            self._recovering.discard(name)
            self._restarted_before += self._restarted.pop(name, 0)
            for known in (self._heard, self._loads, self._reports, self.origins):
                known.pop(name, None)
        self._lose(name)

    def _hear(self, name: str, report: Report) -> None:
        """Note a sign of life."""
        if report.origin is not None and report.origin.problem:
            log.warning("a replica cannot open the model: %s", printable(report.origin.problem))
            self._broken[name] = report.origin.problem
            self.fleet.suspect(name)
            for answer in list(self._answers.values()) if self._hopeless() else ():
                self._fail(answer, Stopped(report.origin.problem))
        elif name not in self._broken and (
            report.origin is not None or monotonic() - self._heard.get(name, 0.0) > SILENT
        ):
            self.fleet.suspect(name, name in self._recovering)  # it may wait for a stage, and is then told later
            # a request that was on its way there while its reports were not read has lost its first events
            for number in self.fleet.having(name) if report.origin is not None and name in self._lost else ():
                self._move(number)
            self._lost.discard(name)
            self._killed.discard(name)
        self._heard[name] = monotonic()

    def _report(self, name: str, report: Report) -> None:
        if report.origin is not None:
            self.origins[name] = report.origin
            self._stages, self._hop = report.origin.stages, report.origin.hop_seconds
            self._share()
        if report.load is not None:
            self._loads[name], self._restarted[name] = report.load, report.restarted
            self._recover(name, report.recovering)
        if self._observer is not None:
            for sequences, drafts in report.steps:
                self._observer.step(sequences, drafts)
        for number, event in report.events:
            self._take(number, event)

    def _recover(self, name: str, seconds: float) -> None:
        """Send the requests of a replica that waits for lost stages to others, if there are any."""
        if seconds > RECOVERING and name not in self._recovering:
            self.fleet.suspect(name)
            if not self.fleet.alive:
                self.fleet.suspect(name, False)
                return
            log.warning("replica %s has lost a stage; its requests go to others", name)
            self._recovering.add(name)
            for number in self.fleet.having(name):
                self._move(number)
        elif not seconds and name in self._recovering:
            self._recovering.discard(name)
            self.fleet.suspect(name, False)

    def _share(self) -> None:
        """Send requests that wait at other replicas again, so that a new replica gets its share."""
        queues = {name: self.fleet.having(name) for name in self.origins.keys() - self._broken.keys() - self._lost}
        share = ceil(sum(map(len, queues.values())) / max(len(queues), 1))
        running = self.limits.parallel // self._replicas
        for queue in queues.values():
            answers = [self._answers[number] for number in sorted(queue) if number in self._answers]
            waiting = [answer for answer in answers if answer.started is None]
            surplus = min(len(queue) - max(share, running), len(waiting))
            for answer in waiting[-surplus:] if surplus > 0 else ():
                answer.tries = 0
                self._move(answer.number)

    def _hopeless(self) -> str:
        """Return why no replica can open the model; "" if one can, or if none runs yet."""
        names = self.fleet.names
        return next(iter(self._broken.values())) if names and self._broken.keys() >= set(names) else ""

    def _lose(self, name: str) -> None:
        """Send the requests of a replica to others."""
        self.lost += name not in self._lost
        self._lost.add(name)
        self.fleet.suspect(name)
        for number in self.fleet.having(name):
            self._move(number)

    async def _watch(self) -> None:
        """Follow the list of replicas, and notice the silent ones."""
        looked = pulsed = monotonic()
        reviving: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(LOOK)
            if not self.fleet.alive and (reviving is None or reviving.done()):
                reviving = self._start(self._revive())
            if looked - pulsed > PULSE:
                pulsed = looked
                for name in self.fleet.names:
                    for number in self.fleet.having(name):
                        if number not in self._answers:
                            self.fleet.ended(number)
                    self._start(self._told(self._wire.pulse(Listen(self._front, name))))
            late, looked = monotonic() - looked - LOOK, monotonic()
            if late > LOOK:  # this process was held up, so reports may wait to be read
                self._heard = {name: heard + late for name, heard in self._heard.items()}
                for reports in self._reports.values():
                    reports.held_up(late)
            names = set(self.fleet.names)
            for name in names - set(self._pumps):
                self._heard[name] = looked + FIRST_SILENT - SILENT
                self._pumps[name] = self._start(self._pump(name))
            for name, pump in list(self._pumps.items()):
                if pump.done() or (name not in names and not self.fleet.having(name)):
                    pump.cancel()
                    del self._pumps[name]
            for name in list(self._heard):  # also of a replica that Serve has dropped, which ends its answers
                self._look(name, looked - self._heard[name])

    async def _revive(self) -> None:
        """Without replicas, look now and then whether they have to start elsewhere."""
        await asyncio.sleep(REVIVE)
        if self.fleet.alive:
            return
        try:
            if note := await in_daemon(self._wire.revive, lambda note: None):
                log.warning("%s", note)
        except Exception as error:  # the cluster may be gone; it is tried again
            if (line := _line(error)) != self._unrevived:
                self._unrevived = line
                log.warning("the replicas do not start elsewhere: %s", line)

    def _look(self, name: str, silent: float) -> None:
        reports, pump = self._reports.get(name), self._pumps.get(name)
        if reports is not None and reports.lost and pump is not None:
            log.warning("a report of replica %s is lost; its requests are sent again", name)
            self._lose(name)
            pump.cancel()  # and begins again
        if silent > SILENT and self.fleet.having(name):
            log.warning("replica %s is silent for %.1f s; its requests go to others", name, silent)
            self._lose(name)
        if silent > KILLED and name not in self._killed and name in self._pumps:
            self._killed.add(name)
            log.warning("replica %s is silent for %.1f s; it is ended and starts again", name, silent)
            self.fleet.suspect(name)
            if (origin := self.origins.get(name)) is not None:
                self._start(self._wire.kill(origin))


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {printable(text[0], 100) if text else ''}"
