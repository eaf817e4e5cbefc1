"""Drafts of prediction heads, EAGLE-3 and Gemma 4 assistants: the same answers as without, for hybrids too."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.engine import DraftRows, Pending, SequenceRows
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.speculation import head
from localllm.generation.speculation.errors import SpeculationError
from tests.localllm.generation.speculation.support import eager
from tests.models.drafters import DRAFTERS
from tests.models.kit import KIT

NAMES = ("deepseek2-mtp", "glm4moe-mtp", "mimo2-mtp", "qwen35-mtp", "step35-mtp")
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
OPTIONS = {"greedy": GREEDY, "seeded": {"temperature": 0.8, "seed": 3, "repeat_penalty": 1.1, "ignore_eos": True}}


@pytest.fixture(scope="module", params=[*NAMES, *DRAFTERS])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[localllm.Model, localllm.Model]]:
    """Provide a model without and with drafts. All drafts are verified."""
    folder, given = tmp_path_factory.mktemp("m"), DRAFTERS.get(request.param)
    path = KIT[given.model if given else request.param].write(folder / "model.gguf")
    drafter = {"model_draft": given.write(folder / "drafter.gguf")} if given else {}
    with (
        localllm.load(path, ctx_size=200, threads=1) as plain,
        localllm.load(path, ctx_size=200, threads=1, spec="mtp", **drafter) as drafting,
    ):
        eager(drafting)
        yield plain, drafting


def prompt(model: localllm.Model, count: int = 20) -> list[int]:
    return [int(token) for token in np.random.default_rng(count).integers(3, model.vocabulary, count)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_answers_are_the_same(pair: tuple[localllm.Model, localllm.Model], options: dict[str, Any]) -> None:
    plain, drafting = pair
    expected = plain.generate(prompt(plain), max_tokens=40, **options)
    reply = drafting.generate(prompt(plain), max_tokens=40, **options)
    assert (reply.tokens, reply.end.reason) == (expected.tokens, expected.end.reason)
    assert reply.usage.drafted > 40


def test_a_cached_prefix_and_a_full_context(pair: tuple[localllm.Model, localllm.Model]) -> None:
    plain, drafting = pair
    for model in pair:
        model.new_core(SchedulerLimits())
    for ids in (prompt(plain, 80), prompt(plain, 80)[:70] + prompt(plain, 9), prompt(plain, 80)):
        expected, reply = (list(model.generate(ids, **GREEDY)) for model in pair)
        assert [each.token for each in reply] == [each.token for each in expected]
    assert drafting.pool.free_blocks <= drafting.pool.blocks
    drafting.stepper.core.running.end(None)
    assert drafting.pool.free_blocks == drafting.pool.blocks


def test_several_answers_at_once(pair: tuple[localllm.Model, localllm.Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some evaluate their prompt in parts while others draft; hidden states pile up and are evaluated early."""
    monkeypatch.setattr(head, "MOST_BEHIND", 7)
    plain, drafting = pair
    prompts = [prompt(plain, count) for count in (5, 30, 61)]
    expected = [plain.generate(ids, max_tokens=15, **GREEDY).tokens for ids in prompts]

    def answer(ids: list[int]) -> list[int]:
        return drafting.generate(ids, max_tokens=15, **GREEDY).tokens

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(answer, prompts)) == expected


def test_drafts_are_the_head_s(pair: tuple[localllm.Model, localllm.Model]) -> None:
    """Each head's draft is its likeliest token for the whole text, evaluated from the beginning."""
    _, drafting = pair
    drafting.new_core(SchedulerLimits())
    engine, ids = drafting.engine, prompt(drafting, 30)
    drafted: list[tuple[int, list[int]]] = []

    class Watching:
        """Records the drafts of each step, and the length of the text before them."""

        def step(self, rows: list[SequenceRows]) -> Any:
            [row] = rows
            if len(row.tokens) > 1 and row.sequence.length >= len(ids):
                drafted.append((row.sequence.length + 1, list(row.tokens[1:])))
            return engine.alone

    engine.watch = Watching()  # type: ignore[assignment]
    try:
        tokens = ids + drafting.generate(ids, max_tokens=12, **GREEDY).tokens
    finally:
        engine.watch = None
    heads = drafting.plan.drafts if drafting.plan is not None else ()
    assert len(drafted) > 3
    assert len(heads) == 1 or max(len(drafts) for _, drafts in drafted) == len(heads)
    for length, drafts in drafted:
        assert drafts[: len(heads)] == drafts_of(drafting, tokens[:length])[: len(drafts)]


def drafts_of(model: localllm.Model, tokens: list[int]) -> list[int]:
    """Return the likeliest token of each head for the whole text, evaluated from the beginning."""
    engine, drafts = model.engine, list[int]()
    sequence = engine.add()
    hidden = engine.step([SequenceRows(sequence, tokens)])[0].hidden[:-1].copy()
    received = hidden
    for number in range(len(engine.draft_heads)):
        read = [*tokens, *drafts][number + 1 :]
        if engine.draft_heads[number].shares_cache:
            read, received = read[-1:], received[-1:]
        logits, following = engine.draft([DraftRows(sequence, len(hidden) - len(read), read, received, 1)], number)
        drafts.append(int(engine.draft_heads[number].spread(logits[0]).argmax()))
        received = following.copy() if model.config and model.config.architecture == "step35" else hidden
    engine.release(sequence)
    return drafts


def test_files_without_a_head(tmp_path: Path) -> None:
    with pytest.raises(SpeculationError, match="no multi-token-prediction head"):
        localllm.load("demo", ctx_size=64, spec="mtp")
    with localllm.load(KIT["qwen35-mtp"].write(tmp_path / "m.gguf"), ctx_size=64, threads=1) as model:
        assert model.engine.draft_head is None  # without speculation, the head is not loaded
        assert model.plan is not None
        assert not any("nextn" in name for name in model.plan.tensors)


def test_positions_of_hidden_states(
    pair: tuple[localllm.Model, localllm.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hidden state is evaluated at its position, also after a cached prefix; further drafts follow in order."""
    _, drafting = pair
    drafting.new_core(SchedulerLimits())
    engine, known, last = drafting.engine, dict[bytes, int](), [-1]
    collect, draft = engine.collect, engine.draft
    counts = {"model": 0, "head": 0}

    def collecting(pending: Pending) -> Any:
        found = collect(pending)
        for row, result in zip(pending.rows, found, strict=True):
            first = row.sequence.length - len(result.hidden)
            known.update((hidden.tobytes(), first + at) for at, hidden in enumerate(result.hidden))
        return found

    def watched(parts: list[DraftRows], head: int = 0) -> Any:
        if head:  # it reads the model's hidden states, or those of the head before it
            counts["head"] += 1
            for part in parts:
                assert known.get(part.hidden[0].tobytes(), part.start) == part.start
            return draft(parts, head)
        moves = not engine.draft_heads[0].shares_cache  # else all drafts of a step have the same position
        for part in parts:
            places = [known.get(hidden.tobytes(), last[0] + moves) for hidden in part.hidden]
            assert places == list(range(part.start, part.start + len(part.tokens)))
            counts["model" if part.hidden[0].tobytes() in known else "head"] += 1
            last[0] = places[-1]
        return draft(parts)

    monkeypatch.setattr(engine, "collect", collecting)
    monkeypatch.setattr(engine, "draft", watched)
    for ids in (prompt(drafting, 80), prompt(drafting, 80)[:70] + prompt(drafting, 9)):
        drafting.generate(ids, max_tokens=8, **GREEDY)
        list(drafting.generate(ids, max_tokens=8, **GREEDY))
    assert min(counts.values()) > 5
