"""The front's scheduler with replicas in this process that die, hang or lose something in mid-answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

import localllm
from localllm.constrained.request import Recipe
from localllm.distributed import remote
from localllm.distributed.answer import Answer as Answers
from localllm.distributed.messages import Ask, Report
from localllm.distributed.remote import MOST_TRIES, RemoteScheduler
from localllm.generation.errors import NotRepeated, Stopped
from localllm.generation.request import Event, Finished, Logprob, Prefilled, Request, Started
from localllm.generation.scheduler import Scheduler
from localllm.generation.statistics import Usage
from localllm.options import SamplingOptions
from localllm.options.structure import ConstraintSpec, Structure
from tests.localllm.generation.test_known import told

pytest.importorskip("zmq", reason="replicas send events through pyzmq")
from localllm.distributed import direct
from tests.localllm.distributed.local_replicas import (
    Front,
    LocalReplica,
    request_of,
    undisturbed,
    until,
)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_lost_report_is_noticed_and_its_answers_go_on(
    models: list[localllm.Model], front: Callable[..., Front], replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((remote, "SILENT"), (remote, "FIRST_SILENT"), (remote, "KILLED"), (direct, "QUIET")):
        monkeypatch.setattr(module, name, 60.0)  # on a busy machine, a replica may be silent for a second
    here = front(replicas)
    requests = [replace(request_of(models[2], 400), choice=number) for number in range(3)]
    expected = [told(undisturbed(models[2], request)) for request in requests]
    here.wire.lose_after = 10
    answers = [here.ask(request) for request in requests]
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


def test_with_one_replica_it_waits_for_the_next(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(1)
    request = request_of(models[2], 150)
    expected = undisturbed(models[2], request)
    answers = [here.ask(request) for _ in range(6)]  # some of them wait
    until(lambda: len(answers[0].tokens) > 10)
    here.wire.end("replica0")
    late = here.ask(request)
    until(lambda: here.scheduler.load().waiting == 7)
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
    broken = LocalReplica(models[1], "broken", here.wire)
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


def test_a_front_that_was_held_up_reads_before_it_judges(unanswered: RemoteScheduler) -> None:
    late = list[float]()
    unanswered._reports["one"] = SimpleNamespace(held_up=late.append, lost=False)  # type: ignore[assignment]
    unanswered._soon(time.sleep, 0.5)
    until(lambda: late)
    assert 0.3 < late[0] < 5


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
