"""The front's scheduler with replicas in this process: events, faults in mid-answer, cancellation and limits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.constrained.request import Recipe
from localllm.distributed import remote
from localllm.distributed.answer import Answer as Answers
from localllm.distributed.fleet import Fleet
from localllm.distributed.media import MOST_BYTES
from localllm.distributed.messages import Ask, Listen, Origin, Report
from localllm.distributed.remote import MOST_TRIES, RemoteScheduler
from localllm.distributed.replica import Replica
from localllm.engine import MediaSpan
from localllm.generation.errors import NotRepeated, QueueFull, Stopped
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Event, Failed, Finished, Logprob, Prefilled, Request, Started, Token
from localllm.generation.scheduler import Scheduler
from localllm.generation.statistics import Usage
from localllm.options import SamplingOptions
from localllm.options.structure import ConstraintSpec, Structure
from tests.localllm.generation.support import Answer, scheduled
from tests.localllm.generation.test_known import told

pytest.importorskip("zmq", reason="replicas send events through pyzmq")
from localllm.distributed.direct import DirectSender

LIMITS = SchedulerLimits(parallel=3)


class LocalReplica(Replica):
    """A replica without Serve and Ray."""

    def __init__(self, model: localllm.Model, name: str) -> None:
        self.name, self._model, self._outboxes, self._problem = name, model, {}, ""
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
        self._replica, self.sent, self.lose = replica, 0, False

    async def send(self, report: Report) -> bool:
        await self._replica.stopped()
        if self.lose and report.events:
            self.lose = False
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


@pytest.fixture(scope="module")
def models() -> Iterator[list[localllm.Model]]:
    found = [localllm.load("demo", ctx_size=512, threads=1, sequences=3, spec="off") for _ in range(3)]
    yield found
    for model in found:
        model.close()


class Front:
    def __init__(self, models: list[localllm.Model], limits: SchedulerLimits, count: int) -> None:
        self.fleet = Fleet("test", limits.parallel)
        self.wire, self.models = Local(self.fleet), models
        for number in range(count):
            self.start(number)
        self.scheduler = RemoteScheduler(self.wire, "test", self.fleet, limits)

    def start(self, number: int) -> None:
        self.wire.add(LocalReplica(self.models[number], f"replica{number}"))

    def ask(self, request: Request) -> Answer:
        answer = Answer()
        answer.ticket = self.scheduler.submit(request, answer)
        return answer

    def holder(self) -> LocalReplica:
        """Return the replica that has a request."""
        return next(each for name, each in self.wire.replicas.items() if self.fleet.having(name))


@pytest.fixture
def front(models: list[localllm.Model], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Front]]:
    monkeypatch.setattr(LocalReplica, "_where", LocalReplica.where)
    made: list[Front] = []

    def start(count: int = 2, **limits: int) -> Front:
        made.append(Front(models, replace(LIMITS, **limits), count))
        return made[-1]

    yield start
    for each in made:
        each.scheduler.close()
        for replica in each.wire.replicas.values():
            replica._scheduler.close()


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


def test_events_are_those_of_a_scheduler_here(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    request = request_of(models[2], logprobs=2, prompt_logprobs=True, stops=("zzz",))
    expected = undisturbed(models[2], request)
    answer = front().ask(request)
    answer.result()
    assert told(answer.events) == told(expected)
    assert [e for e in answer.events if isinstance(e, Started | Prefilled)] == [
        e for e in expected if isinstance(e, Started | Prefilled)
    ]


def test_events_travel_directly_and_through_ray_without_a_connection(
    models: list[localllm.Model], front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(models[2], 200, logprobs=2, prompt_logprobs=True)
    expected = told(undisturbed(models[2], request))
    here = front(1)
    (sender,) = until(lambda: here.wire.replicas["replica0"].senders)
    for _ in range(2):
        answer = here.ask(request)
        answer.result()
        assert told(answer.events) == expected
    assert sender.sent > 200  # at first, there was no connection
    monkeypatch.setattr(LocalReplica, "_direct", lambda replica, key: None)
    other = front(1)
    answer = other.ask(request)
    answer.result()
    assert told(answer.events) == expected
    assert other.wire.replicas["replica0"].senders == []


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_lost_report_is_noticed_and_its_answers_go_on(
    models: list[localllm.Model], front: Callable[..., Front], replicas: int
) -> None:
    here = front(replicas)
    requests = [replace(request_of(models[2], 400), choice=number) for number in range(3)]
    expected = [told(undisturbed(models[2], request)) for request in requests]
    answers = [here.ask(request) for request in requests]
    until(lambda: len(answers[0].tokens) > 10)
    here.holder().senders[-1].lose = True
    for answer in answers:
        answer.result()
    assert [told(answer.events) for answer in answers] == expected
    assert here.scheduler.lost == 1
    until(lambda: here.fleet.alive == replicas)  # it is used again
    again = here.ask(requests[0])
    again.result()
    assert told(again.events) == expected[0]


def test_a_request_on_its_way_to_a_replica_that_lost_a_report_is_sent_again(
    models: list[localllm.Model], front: Callable[..., Front]
) -> None:
    """Its first events go to a connection that has ended."""
    here = front(1)
    answer = here.ask(request_of(models[2], 400))
    until(lambda: len(answer.tokens) > 10)
    scheduler, done = here.scheduler, threading.Event()
    [name] = here.wire.replicas

    def lose() -> None:
        scheduler._lose(name)
        scheduler._pumps[name].cancel()
        here.fleet.sent(max(scheduler._answers), name, [])  # chosen before the report was lost
        done.set()

    scheduler._loop.call_soon_threadsafe(lose)
    assert done.wait(20)
    answer.result()
    assert scheduler.moved == 2
    assert told(answer.events) == told(undisturbed(models[2], request_of(models[2], 400)))


@pytest.mark.parametrize("fault", ["killed", "hung"])
@pytest.mark.parametrize("structure", [None, Structure(gbnf="root ::= ([a-z]+ [ ,.])+")])
def test_an_answer_goes_on_at_the_other_replica(
    models: list[localllm.Model], front: Callable[..., Front], fault: str, structure: Structure | None
) -> None:
    here = front(2)
    made = Recipe(ConstraintSpec(structure)).made(models[2]) if structure is not None else None
    request = request_of(models[2], 400, logprobs=1, constraint=made)
    expected = undisturbed(models[2], request)
    answer = here.ask(request)
    until(lambda: len(answer.tokens) > 20)
    if fault == "killed":
        here.wire.end(here.holder().name)
    else:
        here.holder().hung = True
    answer.result()
    assert told(answer.events) == told(expected)
    assert sum(isinstance(event, Started) for event in answer.events) == 1
    assert here.scheduler.moved >= 1
    assert here.scheduler.lost >= 1
    if fault == "hung":
        until(lambda: here.wire.killed)


def test_a_later_replica_takes_over_requests_that_wait(
    models: list[localllm.Model], front: Callable[..., Front]
) -> None:
    here = front(1)
    answers = [here.ask(request_of(models[2], 450)) for _ in range(8)]
    until(lambda: sum(bool(answer.tokens) for answer in answers) == LIMITS.parallel)
    assert len(here.fleet.having("replica0")) == 8
    here.start(1)
    until(lambda: len(here.fleet.having("replica1")) == 4)
    until(lambda: sum(bool(answer.tokens) for answer in answers) >= 2 * LIMITS.parallel)
    assert all(answer.tokens for answer in answers[: LIMITS.parallel])  # running requests were not moved
    expected = undisturbed(models[2], request_of(models[2], 450))
    for answer in answers:
        answer.result()
        assert told(answer.events) == told(expected)


def test_with_one_replica_it_waits_for_the_next(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(1)
    request = request_of(models[2], 150)
    expected = undisturbed(models[2], request)
    answers = [here.ask(request) for _ in range(6)]  # some of them wait
    until(lambda: len(answers[0].tokens) > 10)
    here.wire.end("replica0")
    late = here.ask(request)
    assert here.scheduler.load().waiting >= 0
    time.sleep(0.2)
    here.start(1)
    for answer in [*answers, late]:
        answer.result()
        assert told(answer.events) == told(expected)


def test_a_replica_that_waits_for_a_stage_gives_its_requests_away(
    models: list[localllm.Model], front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Scheduler] = []
    monkeypatch.setattr(Scheduler, "recovering", property(lambda scheduler: float(scheduler in waiting)))
    here = front(2)
    request = request_of(models[2], 450)
    answer = here.ask(request)
    until(lambda: len(answer.tokens) > 10)
    holder = here.holder()
    [other] = [each for each in here.wire.replicas.values() if each is not holder]
    waiting.append(holder._scheduler)
    until(lambda: here.fleet.having(other.name))
    answer.result()
    assert told(answer.events) == told(undisturbed(models[2], request))
    assert (here.scheduler.moved, here.scheduler.lost, here.fleet.alive) == (1, 0, 1)
    waiting.clear()
    until(lambda: here.fleet.alive == 2)
    waiting += [each._scheduler for each in here.wire.replicas.values()]  # without another replica, requests stay
    until(lambda: here.fleet.alive == 1)
    answer = here.ask(request)
    answer.result()
    assert told(answer.events) == told(undisturbed(models[2], request))


def test_a_request_that_serve_sends_twice_gives_each_token_once(
    models: list[localllm.Model], front: Callable[..., Front]
) -> None:
    """Serve does so if a replica dies before it has said that it accepts the request: its events may be faster."""
    here = front(2)
    request = request_of(models[2], 450)
    answer = here.ask(request)
    until(lambda: len(answer.tokens) > 10)
    [asked], holder = here.wire.asks, here.holder()
    [other] = [each for each in here.wire.replicas.values() if each is not holder]
    holder.hung = True
    here.scheduler._soon(lambda: other.tasks.add(here.scheduler._start(other.answer(asked))))
    until(lambda: len(here.wire.asks) == 2)
    holder.hung = False
    answer.result()
    assert told(answer.events) == told(undisturbed(models[2], request))


def test_the_last_replica_is_replaced_on_a_machine_that_was_left_out(
    models: list[localllm.Model], front: Callable[..., Front], caplog: pytest.LogCaptureFixture
) -> None:
    here = front(1)
    request = request_of(models[2], 450)
    here.wire.elsewhere = lambda: here.start(1)
    answer = here.ask(request)
    until(lambda: len(answer.tokens) > 10)
    assert here.wire.elsewhere is not None  # as long as a replica runs
    here.wire.end("replica0")
    answer.result()
    assert told(answer.events) == told(undisturbed(models[2], request))
    until(lambda: caplog.text.count("another machine takes them") == 1)


def test_a_request_without_a_seed_goes_on_with_the_same_random_numbers(
    models: list[localllm.Model], front: Callable[..., Front]
) -> None:
    here = front(2)
    request = replace(request_of(models[2], 450), sampling=SamplingOptions(temperature=1.0))
    answer = here.ask(request)
    until(lambda: len(answer.tokens) > 10)
    here.wire.end(here.holder().name)
    answer.result()
    fixed = here.wire.asks[0].request.sampling
    assert fixed.seed >= 0
    assert told(answer.events)[0] == told(undisturbed(models[2], replace(request, sampling=fixed)))[0]


def test_hidden_states_come_once_the_replica_has_them(
    models: list[localllm.Model], front: Callable[..., Front]
) -> None:
    rows, expected = np.zeros((2, 4, models[0].config.width), np.float32)  # type: ignore[union-attr]

    def into(target: Any) -> Callable[[int, Any], None]:
        return lambda start, some: target.__setitem__(slice(start, start + len(some)), some)

    ids = list(range(5, 9))
    undisturbed(models[2], Request(ids, SamplingOptions(), 0, reuse=False, states=into(expected)))
    front().ask(Request(ids, SamplingOptions(), 0, reuse=False, states=into(rows))).result()
    assert rows.any()
    assert np.array_equal(rows, expected)


def test_a_client_that_leaves_ends_its_answer(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(1)
    answer = here.ask(request_of(models[2], 480))
    until(lambda: len(answer.tokens) > 5)
    assert answer.ticket is not None
    answer.ticket.cancel()
    assert answer.result().reason == "cancelled"
    scheduler = here.wire.replicas["replica0"]._scheduler
    until(lambda: not scheduler.load().running, 1)
    assert here.scheduler._open.count == 0
    assert not here.scheduler._answers


def test_errors_of_a_request_come_to_its_client_only(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(2)
    with pytest.raises(LocalLLMError, match="no tokens"):
        here.scheduler.submit(Request([], SamplingOptions()), Answer())
    failed = here.ask(Request([1] * 600, SamplingOptions())).error().error
    assert "the context holds 512" in str(failed)
    here.ask(request_of(models[2], 3)).result()
    assert here.scheduler.moved == 0


def test_the_queue_is_limited_by_account(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(1, parallel=2, waiting=4)
    answers = [here.ask(replace(request_of(models[2], 400), client="one")) for _ in range(4)]
    with pytest.raises(QueueFull):
        here.ask(replace(request_of(models[2]), client="one"))
    here.ask(replace(request_of(models[2], 2), client="two")).result()
    for answer in answers:
        assert answer.ticket is not None
        answer.ticket.cancel()
        answer.result()


def test_closing_ends_all_requests(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(1)
    answer = here.ask(request_of(models[2], 480))
    until(lambda: answer.tokens)
    here.scheduler.close()
    assert isinstance(answer.error().error, Stopped)
    with pytest.raises(Stopped):
        here.ask(request_of(models[2]))


def test_a_request_that_no_replica_can_answer_ends(
    models: list[localllm.Model], front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = front(1)

    async def broken(ask: Ask) -> None:
        here.wire.asks.append(ask)
        raise ConnectionError("broken")

    monkeypatch.setattr(here.wire, "_ask", broken)
    monkeypatch.setattr("localllm.distributed.remote.RETRY", 0.0)
    assert isinstance(here.ask(request_of(models[2])).error().error, Stopped)
    assert len(here.wire.asks) == MOST_TRIES


def test_without_a_replica_that_can_open_the_model_requests_end_with_the_reason(
    models: list[localllm.Model], front: Callable[..., Front]
) -> None:
    """The file was replaced, so the replicas that Serve starts cannot work. A later one can."""
    here = front(1)
    answer = here.ask(request_of(models[2], 450))
    until(lambda: answer.tokens)
    broken = LocalReplica(models[1], "broken")
    broken._problem = "node: model.gguf: this is not the front's model"
    here.wire.end("replica0")
    here.wire.add(broken)
    assert "this is not the front's model" in str(answer.error().error)
    assert "this is not the front's model" in str(here.ask(request_of(models[2])).error().error)
    here.wire.end("broken")
    here.start(2)
    later = here.ask(request_of(models[2], 9))
    later.result()
    assert len(later.tokens) == 9


def test_stages_that_were_started_again_are_counted(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(2)
    for replica, count in zip(here.wire.replicas.values(), (1, 2), strict=True):
        replica._stages = SimpleNamespace(restarted=count, number=2, hop=0.0)  # type: ignore[assignment]

    def restarted() -> int:
        found = here.scheduler.load().replicas
        assert found is not None
        return found.restarted

    until(lambda: restarted() == 3)
    here.wire.end("replica1")
    until(lambda: "replica1" not in here.scheduler.origins)
    assert restarted() == 3  # with the stages of the ended replica


def test_another_answer_after_a_fault_is_told(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(2)
    answer = here.ask(request_of(models[2], 450))
    until(lambda: len(answer.tokens) > 10)
    [sent] = here.scheduler._answers.values()
    holder = here.holder()
    holder.hung = True
    time.sleep(0.05)
    sent.known[3] += 1
    assert isinstance(answer.error().error, NotRepeated)


def test_the_load_is_that_of_all_replicas(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(2)
    until(lambda: here.scheduler.load().blocks == sum(model.pool.blocks for model in models[:2]))
    answers = [here.ask(request_of(models[2], 400)) for _ in range(4)]
    until(lambda: len(here.scheduler.load().running) == 4)
    for answer in answers:
        assert answer.ticket is not None
        answer.ticket.cancel()
    until(lambda: not here.scheduler.load().running)


class Unanswered(Local):
    """The way to replicas that never answer."""

    async def _ask(self, ask: Ask) -> None:
        self.asks.append(ask)
        await asyncio.sleep(60)


@pytest.fixture
def unanswered() -> Iterator[RemoteScheduler]:
    fleet = Fleet("test", LIMITS.parallel)
    with RemoteScheduler(Unanswered(fleet), "test", fleet, replace(LIMITS, waiting=20)) as scheduler:
        yield scheduler


def picture(size: int) -> MediaSpan:
    """Return a picture whose prepared tensor has `size` bytes."""
    source = SimpleNamespace(nbytes=size), 0
    return MediaSpan(b"key of it", 9, np.arange(9, dtype=np.int32), 9, True, lambda: None, source)  # type: ignore[arg-type, return-value]


def test_packing_a_picture_delays_no_other_client(unanswered: RemoteScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    go, packs = threading.Event(), list[int]()

    def packed(prompt: Any) -> Any:
        packs.append(len(prompt))
        assert go.wait(20)
        return ((1, b"packed"),)

    monkeypatch.setattr(remote, "packed", packed)
    asks = unanswered._wire.asks  # type: ignore[attr-defined]
    answers = [Answer() for _ in range(4)]
    tickets = [unanswered.submit(Request([1, picture(9)], SamplingOptions()), each) for each in answers[:3]]
    unanswered.submit(Request([1, 2], SamplingOptions()), answers[3])
    until(lambda: len(asks) == 1)
    assert asks[0].tokens == 2
    tickets[0].cancel()
    assert answers[0].result().reason == "cancelled"
    go.set()
    until(lambda: len(asks) == 3)
    assert [(ask.media, ask.tokens) for ask in asks[1:]] == [(((1, b"packed"),), 10)] * 2
    unanswered._soon(unanswered._move, asks[1].number)
    until(lambda: len(asks) == 4)
    assert asks[3].media == asks[1].media
    assert packs == [2, 2, 2]  # and not again
    unanswered.close()
    assert isinstance(answers[1].error().error, Stopped)


def test_pictures_wait_for_room_in_the_shared_memory(
    unanswered: RemoteScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "packed", lambda prompt: ((len(prompt), b""),))
    asks = unanswered._wire.asks  # type: ignore[attr-defined]
    large, small = MOST_BYTES // 2 + 1, MOST_BYTES // 4
    prompts = [[1, picture(size)] for size in (large, large, small, small)]
    answers = [Answer() for _ in prompts]
    tickets = [
        unanswered.submit(Request(prompt, SamplingOptions()), each)
        for prompt, each in zip(prompts, answers, strict=True)
    ]
    unanswered.submit(Request([1, 2], SamplingOptions()), Answer())  # takes no room
    until(lambda: len(asks) == 2)
    time.sleep(0.1)
    assert len(asks) == 2
    tickets[2].cancel()  # one that waits
    assert answers[2].result().reason == "cancelled"
    tickets[0].cancel()
    until(lambda: len(asks) == 4)  # the next large one, and the last one


def test_the_last_resort_is_tried_again_and_does_not_delay_the_end(
    unanswered: RemoteScheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "REVIVE", 0.0)
    over, threads = threading.Event(), list[threading.Thread]()

    def revive() -> str:
        threads.append(threading.current_thread())
        if len(threads) < 3:
            raise RuntimeError("the controller starts again")
        over.wait(60)
        return ""

    monkeypatch.setattr(unanswered._wire, "revive", revive)
    until(lambda: len(threads) == 3)
    assert all(thread.daemon for thread in threads)  # so the program can end meanwhile
    unanswered.close()
    over.set()
    assert caplog.text.count("do not start elsewhere: RuntimeError: the controller starts again") == 1


def test_a_replica_that_waits_for_a_stage_stays_left_out_after_a_silence(unanswered: RemoteScheduler) -> None:
    unanswered.close()  # so that it does not look for these replicas
    unanswered.fleet.update(["one", "two"])
    unanswered._recovering.add("one")
    unanswered.fleet.suspect("one")
    unanswered._heard["one"] = unanswered._heard["two"] = 0.0
    for name in ("one", "two"):
        unanswered._hear(name, Report(()))
    assert unanswered.fleet.ranked(["one", "two"], [], 1) == ["two"]


def test_slots_are_refused(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    with pytest.raises(LocalLLMError, match="slots of replicas"):
        front(1).scheduler.between(lambda slots: slots.erase(0))


def test_every_thread_may_submit(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(2)
    request = request_of(models[2], 30)
    expected = told(undisturbed(models[2], request))
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(here.ask(request))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        answer.result()
        assert told(answer.events) == expected
    assert not any(isinstance(event, Failed | Finished) for event in answer.events[:-1])
    assert isinstance(answer.events[-2], Token)


def test_what_the_client_knows_of_its_prompt_is_not_sent_again() -> None:
    """The prompt was cut into other parts before the fault."""
    each = [Logprob(number, -1.0) for number in range(9)]  # of the tokens after positions 0 to 8 of a prompt of 10

    def run(answer: Answers, ends: list[int], reused: int = 0) -> list[Event]:
        events: list[Event] = [Started(10, reused)]
        start = reused
        for end in ends:
            events.append(Prefilled(end, tuple(each[start:end])))
            start = end
        answer.reached = 0
        return [new for event in events if (new := answer.fresh(event)) is not None]

    answer = Answers(Request([0] * 10, SamplingOptions()), lambda event: None)
    first = run(answer, [3, 5])
    second = run(answer, [2, 4, 7, 10])
    assert [type(event) for event in first] == [Started, Prefilled, Prefilled]
    assert [event.evaluated for event in second if isinstance(event, Prefilled)] == [7, 10]
    told = [logprob for event in (*first, *second) if isinstance(event, Prefilled) for logprob in event.logprobs]
    assert told == each

    usage = Usage(prompt_tokens=10, reused_tokens=0)
    answer = Answers(Request([0] * 10, SamplingOptions()), lambda event: None)
    run(answer, [10], reused=4)
    assert run(answer, [10]) == []
    end = answer.fresh(Finished("end", "", usage))
    assert isinstance(end, Finished)
    assert end.usage.reused_tokens == 4
