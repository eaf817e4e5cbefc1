"""Pictures whose tokens see each other run in slices: the same bits, unseen until they are complete, and given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.backends.base import F16_CACHE, BackendError
from localllm.backends.cpu.backend import CpuExecutable
from localllm.backends.cpu.budget import step_memory
from localllm.base.errors import LocalLLMError
from localllm.engine import SequenceRows
from localllm.generation.request_state import RequestState
from localllm.generation.speculation.rule import DraftToken
from localllm.loading import loader
from localllm.sampling.sampler import Sampler
from tests.localllm.generation.speculation.support import Told, drafting_by
from tests.localllm.generation.support import Stepped
from tests.localllm.generation.test_media import (
    TEXT,
    Pictures,
    Recorded,
    alone,
    opened,
    prompt_of,
    request,
)

FAMILIES = ["gemma3-12", "gemma4-31b"]
MOST = 1000  # kernels of a step


@contextmanager
def short(stepped: Stepped) -> Iterator[Stepped]:
    """Let the encoder and the slices run for one kernel, or one segment, at a time."""
    stepped.core._schedule.encoder_seconds = lambda: 1e-9  # type: ignore[method-assign]
    yield stepped


@contextmanager
def sliced(
    family: str, folder: Path, threads: int = 1, drafts: Any = None, **options: Any
) -> Iterator[tuple[localllm.Model, Pictures, Stepped]]:
    with (
        opened(family, folder, threads, **options) as (model, pictures),
        Stepped(model, drafts) as stepped,
        short(stepped),
    ):
        yield model, pictures, stepped


def until_paused(stepped: Stepped, one: RequestState, slices: int = 5) -> None:
    """Step until the picture of a request is evaluated, and has run for some slices."""
    for _ in range(MOST):
        if stepped.running.flights.slices(one):
            stepped.turn(slices)
            assert stepped.running.flights.slices(one), "the step has ended"
            return
        stepped.turn()
    raise AssertionError("no step runs in slices")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_between_slices_change_no_bit(family: str, threads: int, tmp_path: Path) -> None:
    """Neither of the picture's logits and cache, nor of the other sequences'."""
    with opened(family, tmp_path, threads) as (model, pictures):
        engine, picture, encoded = model.engine, pictures(3), pictures(3).encode()
        media = engine.pool.media.of(picture.key, picture.tokens, picture.positions, picture.advance, picture.causal)
        while not encoded.advance():
            pass
        found: list[list[np.ndarray]] = []
        for slices in (False, True):
            mate, one, logits = engine.add(), engine.add(), list[np.ndarray]()
            engine.step([SequenceRows(one, TEXT), SequenceRows(mate, TEXT[::-1])])
            rows = SequenceRows(one, list(media.ids), media=encoded.embeddings)
            count, ended = 0, None
            if slices:
                pending = engine.begin_sliced([rows])
                while ended is None:
                    ended = engine.advance(pending, 1e-9)
                    count += 1
                    if count < 40:  # steps of one row and of many
                        tokens = [count] * (1 if count % 3 else 9)
                        logits.append(engine.step([SequenceRows(mate, tokens, "all")])[0].logits.copy())
                assert 40 < count < MOST
            else:
                for n in range(1, 40):
                    tokens = [n] * (1 if n % 3 else 9)
                    logits.append(engine.step([SequenceRows(mate, tokens, "all")])[0].logits.copy())
                ended = engine.step([rows])
            logits.append(ended[0].logits.copy())
            logits.append(engine.step([SequenceRows(one, [4])])[0].logits.copy())  # reads the picture's cache rows
            logits.append(engine.step([SequenceRows(mate, [4])])[0].logits.copy())
            found.append(logits)
            engine.release(one)
            engine.release(mate)
        for whole, part in zip(*found, strict=True):
            np.testing.assert_array_equal(whole, part)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_same_with_and_without_interruptions(family: str, tmp_path: Path) -> None:
    """Of readers, with drafts, and of prompts that fork before, at and behind a picture under way."""
    with opened(family, tmp_path) as (model, pictures):
        prompts = [prompt_of(pictures, 1, 2), prompt_of(pictures, 1, 3), [*prompt_of(pictures, 1), 9], [1, 2, 3, *TEXT]]
        model.engine.interruptible, interruptible = None, model.engine.interruptible
        expected = [alone(model, prompt) for prompt in prompts]
        model.engine.interruptible = interruptible
    for drafts in (False, True):
        with opened(family, tmp_path) as (model, pictures):
            known, length = expected[0][0], len(prompts[0]) + 38

            def guess(text: list[int], sampler: Sampler) -> DraftToken:
                place = len(text) - length  # noqa: B023
                return DraftToken(known[place] if 0 <= place < len(known) and place % 3 else 1, 0)  # noqa: B023

            told = Told(guess)
            with drafting_by(model, told), Stepped(model, told if drafts else None) as stepped, short(stepped):
                reader = stepped.ask(request([7, 7, 7], most=220))[1]
                stepped.turn(2)
                crowd = [(Recorded(), each) for each in prompts]
                first, *_ = answers = [stepped.ask(request(prompt, each)) for each, prompt in crowd[:1]]
                until_paused(stepped, first[0])
                answers += [stepped.ask(request(prompt, each)) for each, prompt in crowd[1:]]
                before, turns = len(reader.tokens), 0
                while stepped.running.flights.slices(first[0]) and len(reader.tokens) < 200:
                    stepped.turn()
                    turns += 1
                assert turns > 10
                assert len(reader.tokens) - before >= turns  # at least one token per turn
                stepped.finish()
            for (tokens, rows), (_, answer), (recorded, _) in zip(expected, answers, crowd, strict=True):
                assert answer.tokens == tokens
                np.testing.assert_array_equal(recorded.rows[-1], rows[-1])
            assert all(answer.reused >= 11 for _, answer in answers[1:])


def test_an_unfinished_picture_is_not_reused(tmp_path: Path) -> None:
    with sliced("gemma3-12", tmp_path) as (_, pictures, stepped):
        text = [*range(20, 84)]
        one, answer = stepped.ask(request([*text, pictures(1), *text]))
        until_paused(stepped, one)
        assert one.sequence is not None
        assert one.flown_from == 64
        assert one.sequence.length == 84
        same, again = stepped.ask(request([*text, pictures(1), *text]))
        other, interruptible = stepped.ask(request([*text, 1, 2, 3]))
        stepped.turn(3)
        assert same.sequence is None  # waits for the picture
        assert other.sequence is not None
        assert other.sequence.length >= 67  # past the text
        assert stepped.running.flights.slices(one)
        stepped.finish()
        assert pictures.encoded == [1]
        assert again.reused >= 84
        assert again.tokens == answer.tokens
        assert interruptible.reused == 64


def test_a_cancelled_request_frees_its_blocks_in_the_middle(tmp_path: Path) -> None:
    with sliced("gemma3-12", tmp_path) as (model, pictures, stepped):
        free = stepped.engine.free_blocks
        one, answer = stepped.ask(request([*TEXT, pictures(1), 5], reuse=False))
        until_paused(stepped, one)
        assert stepped.engine.free_blocks < free
        assert answer.ticket is not None
        answer.ticket.cancel()
        stepped.running.drop_cancelled()
        assert stepped.engine.free_blocks == free
        assert not stepped.running.busy
        _, following = stepped.ask(request(prompt_of(pictures, 2)))
        stepped.finish()
        assert following.tokens == alone(model, prompt_of(pictures, 2))[0]


def test_a_cancelled_request_keeps_what_is_complete(tmp_path: Path) -> None:
    with sliced("gemma3-12", tmp_path) as (model, pictures, stepped):
        one, answer = stepped.ask(request(prompt_of(pictures, 1)))
        until_paused(stepped, one)
        assert answer.ticket is not None
        answer.ticket.cancel()
        stepped.finish()
        _, again = stepped.ask(request(prompt_of(pictures, 1)))
        stepped.finish()
        assert again.reused == 12
        assert again.tokens == alone(model, prompt_of(pictures, 1))[0]


def test_a_full_cache_gives_up_the_newest_picture(tmp_path: Path) -> None:
    """The older request continues, and the picture is evaluated again."""
    with opened("gemma3-12", tmp_path, ctx_size=128, sequences=2) as (model, pictures):
        prompt = prompt_of(pictures, 1)
        expected = alone(model, prompt)[0]
        with Stepped(model, parallel=2) as busy, short(busy):
            held = [busy.engine.add()]
            busy.engine.step([SequenceRows(held[0], [1] * 64)])
            _, reader = busy.ask(request([*range(10, 30)], most=100))
            busy.turn(3)
            one, answer = busy.ask(request(prompt))
            until_paused(busy, one)
            while busy.running.flights.slices(one) and len(reader.tokens) < 99:
                if busy.engine.free_blocks:  # other sequences take the rest
                    held.append(busy.engine.add())
                    busy.engine.step([SequenceRows(held[-1], [1])])
                busy.turn()
            assert not busy.running.flights.slices(one)
            assert one.sequence is None  # preempted
            for sequence in held:
                busy.engine.release(sequence)
            busy.finish()
            assert len(reader.tokens) == 100
            assert answer.tokens == expected


def test_room_for_other_work_gives_up_a_picture(tmp_path: Path) -> None:
    with sliced("gemma4-31b", tmp_path) as (model, pictures, stepped):
        recorded = Recorded()
        one, answer = stepped.ask(request(prompt_of(pictures, 1), recorded))
        until_paused(stepped, one)
        stepped.running.make_room(10_000)
        assert one.sequence is None
        assert stepped.running.flights.sliced is None
        stepped.finish()
        tokens, rows = alone(model, prompt_of(pictures, 1))
        assert answer.tokens == tokens
        np.testing.assert_array_equal(recorded.rows, rows)


@pytest.mark.parametrize("error", [BackendError("no memory"), LocalLLMError("broken")])
def test_an_error_in_the_middle_fails_one_request(error: Exception, tmp_path: Path) -> None:
    with sliced("gemma3-12", tmp_path) as (model, pictures, stepped):
        _, reader = stepped.ask(request([7, 7], most=60))
        one, answer = stepped.ask(request(prompt_of(pictures, 1)))
        until_paused(stepped, one)
        interruptible = stepped.engine.interruptible
        assert interruptible is not None
        with pytest.MonkeyPatch.context() as patch:

            def fail(seconds: float) -> None:
                raise error

            patch.setattr(interruptible, "run_slice", fail)
            stepped.turn()
        assert str(answer.error().error) == str(error)
        _, following = stepped.ask(request(prompt_of(pictures, 2)))
        stepped.finish()
        assert len(reader.tokens) == 60
        assert following.tokens == alone(model, prompt_of(pictures, 2))[0]


def test_two_pictures_take_turns(tmp_path: Path) -> None:
    """One runs at a time; the request of the higher priority is next."""
    with sliced("gemma3-12", tmp_path) as (_, pictures, stepped):
        states = [stepped.ask(request([1, pictures(1), 2]))[0]]
        until_paused(stepped, states[0])
        states += [stepped.ask(request([n, pictures(n), 2], priority=n))[0] for n in (2, 3)]
        order = []
        for _ in range(10 * MOST):
            order += [n for n, one in enumerate(states) if stepped.running.flights.slices(one) and n not in order]
            if not stepped.running.busy:
                break
            stepped.turn()
        assert order == [0, 2, 1]


def test_an_observer_sees_a_whole_step(tmp_path: Path) -> None:
    with sliced("gemma3-12", tmp_path) as (model, pictures, stepped):
        one, answer = stepped.ask(request(prompt_of(pictures, 1)))
        until_paused(stepped, one)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model.engine), "slices", False)  # as for an observer that begins in the middle
            stepped.finish()
        assert len(answer.tokens) == 12
    with opened("gemma3-12", tmp_path) as (model, _):
        assert model.engine.slices
        model.engine.watch = object()  # type: ignore[assignment]
        assert not model.engine.slices
        model.engine.watch = None
    with opened("gemma3-12", tmp_path, sequences=1) as (model, _):  # no other request can wait
        assert model.engine.interruptible is None
    with opened("qwen3vl-dense", tmp_path) as (model, _):
        assert model.engine.interruptible is None


def test_the_memory_of_slices_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("gemma3-12", tmp_path) as (model, _):
        executable, interruptible = model.engine.executable, model.engine.interruptible
        assert model.plan is not None
        assert isinstance(executable, CpuExecutable)
        assert isinstance(interruptible, CpuExecutable)
        own = interruptible._storage
        arenas = [own.activations, own._partials, own._scores, *own._scratch.values()]
        allocated = sum(arena.size for arena in arenas) + sum(each.nbytes for each in own._lists.values())
        assert step_memory(model.plan, executable.limits, 1, F16_CACHE) == allocated
        assert interruptible.memory.bytes >= allocated
        short = loader.interruptible_bytes(model.plan, replace(executable.limits, rows=30, logit_rows=1), F16_CACHE, 1)
        assert 0 < short < allocated
    counted = []
    monkeypatch.setattr(loader, "interruptible_bytes", lambda *_: counted.append(1) or 1 << 40)
    with pytest.raises(LocalLLMError, match="are left by weights and encoders"), opened("gemma3-12", tmp_path):
        pass
    assert counted == [1]


def test_a_sliced_step_of_a_model_that_was_closed_leaves_no_tokens(tmp_path: Path) -> None:
    with opened(FAMILIES[0], tmp_path, 1) as (model, pictures):
        engine, picture, encoded = model.engine, pictures(3), pictures(3).encode()
        media = engine.pool.media.of(picture.key, picture.tokens, picture.positions, picture.advance, picture.causal)
        while not encoded.advance():
            pass
        one = engine.add()
        engine.step([SequenceRows(one, TEXT)])
        pending = engine.begin_sliced([SequenceRows(one, list(media.ids), media=encoded.embeddings)])
        assert engine.advance(pending, 1e-9) is None
        assert one.length > len(TEXT)
        engine.closed = True
        with pytest.raises(LocalLLMError, match="the model is closed"):
            engine.advance(pending, 1e-9)
        assert one.length == len(TEXT)
        engine.closed = False
