"""Slots: which answer gets which slot, what a slot contains after the answer, and restoring a slot into a
full KV cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import localllm
from localllm.engine import CacheSequence, SequenceRows
from localllm.generation.errors import Stopped
from localllm.generation.request import Request
from localllm.generation.scheduler import Scheduler
from localllm.options import SamplingOptions
from localllm.plan import BLOCK
from tests.localllm.generation.support import Stepped, stepper_of

GREEDY = SamplingOptions(temperature=0.0)


@pytest.fixture
def model() -> Iterator[localllm.Model]:
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=4 * BLOCK, sequences=1) as model:
        yield model


def tokens_of(it: Stepped, place: int) -> list[int]:
    """Return the tokens that saving a slot would write."""
    found: list[int] = []

    def write(sequence: CacheSequence) -> int:
        found.extend(sequence.tokens)
        return 0

    assert it.running.slots.save(place, write) == (len(found), 0)
    return found


def test_requests_take_the_place_they_name_or_a_free_one(model: localllm.Model) -> None:
    with Stepped(model, parallel=3) as it:
        places = [-1, 1, -1, 9]
        ones = [
            it.ask(Request([5 + n] * 8, GREEDY, 4 + n, ignore_eos=True, slot=place))[0]
            for n, place in enumerate(places)
        ]
        it.finish()
        assert [one.slot for one in ones] == [0, 1, 2, 0]  # slot 0 is free again, and slot 9 does not exist
        assert tokens_of(it, 1) == ones[1].tokens[:-1]
        assert tokens_of(it, 0) == ones[3].tokens[:-1]
        assert it.running.slots.erase(1) == 12
        assert tokens_of(it, 1) == []
        assert tokens_of(it, 2) == ones[2].tokens[:-1]


def test_what_is_not_to_be_reused_is_not_saved(model: localllm.Model) -> None:
    with Stepped(model) as it:
        it.ask(Request([5] * 8, GREEDY, 4, slot=0, reuse=False))
        it.finish()
        assert tokens_of(it, 0) == []


def test_erasing_leaves_longer_texts_of_others(model: localllm.Model) -> None:
    with Stepped(model) as it:
        it.ask(Request([5] * 8, GREEDY, 2, ignore_eos=True, slot=0))
        it.finish()
        short = tokens_of(it, 0)
        other = it.ask(Request([*short, 7, 8, 9], GREEDY, 2, ignore_eos=True, slot=1))[0]
        it.finish()
        it.running.slots.erase(0)
        assert tokens_of(it, 1) == other.tokens[:-1]


def test_loading_makes_room_by_dropping_what_was_not_used_longest(model: localllm.Model) -> None:
    with Stepped(model) as it:
        for first in (5, 6):
            it.ask(Request([first] * (2 * BLOCK - 5), GREEDY, 2, ignore_eos=True, slot=first - 5))
            it.finish()

        def read() -> tuple[CacheSequence, int]:
            sequence = it.engine.add()
            it.engine.step([SequenceRows(sequence, [9] * (2 * BLOCK))])
            return sequence, 77

        assert it.running.slots.load(2, read) == (2 * BLOCK, 77)
        assert tokens_of(it, 2) == [9] * (2 * BLOCK)
        assert tokens_of(it, 0) == []
        assert it.running.slots.load(1, read) == (2 * BLOCK, 77)
        assert len(it.running.prefixes) == 1  # the prefix is not kept twice


def test_what_is_taken_up_replaces_its_beginning(model: localllm.Model) -> None:
    """As the turns of a conversation whose prompts another replica evaluates."""
    with Stepped(model) as it:
        for length in (BLOCK, BLOCK + 9, 3 * BLOCK):

            def read(length: int = length) -> tuple[CacheSequence, int]:
                sequence = it.engine.add()
                it.engine.step([SequenceRows(sequence, [7] * length)])
                return sequence, 0

            assert it.running.slots.take_up(read) == ([7] * length, 0)
            assert [sequence.length for sequence in it.running.prefixes] == [length]


def test_jobs_run_between_steps_and_tell_their_errors(model: localllm.Model) -> None:
    with Scheduler(stepper_of(model)) as scheduler:
        assert scheduler.between(lambda places: places.erase(0)).result(60) == 0
        with pytest.raises(ZeroDivisionError):
            scheduler.between(lambda _: 1 // 0).result(60)
    with pytest.raises(Stopped):
        scheduler.between(lambda _: 0)


def test_a_job_that_is_cancelled_before_it_runs_is_left_out(model: localllm.Model) -> None:
    """A client that leaves cancels what it waits for."""
    ran: list[int] = []
    with Scheduler(stepper_of(model)) as scheduler:
        begun, go_on = threading.Event(), threading.Event()
        busy = scheduler.between(lambda _: (begun.set(), go_on.wait(60)))
        assert begun.wait(60)
        given_up = scheduler.between(lambda _: ran.append(1))
        assert given_up.cancel()
        go_on.set()
        busy.result(60)
        assert scheduler.between(lambda places: places.erase(0)).result(60) == 0
    assert ran == []
