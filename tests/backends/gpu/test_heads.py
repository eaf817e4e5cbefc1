"""Prediction heads, EAGLE-3 files and Gemma 4 assistants on a device: llama.cpp's logits, and answers as without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.backends.base import Backend
from localllm.base.notices import NotUsed
from localllm.engine import DraftRows, SequenceRows
from localllm.generation.speculation.errors import SpeculationError
from tests.backends import test_assistant, test_eagle3
from tests.localllm.generation.speculation.support import eager
from tests.models.drafters import ASSISTANTS, DRAFTERS, EAGLES
from tests.models.kit import KIT, LIMIT
from tests.models.support import nmse

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
NAMES = ("qwen35-mtp", "step35-mtp", "own", "assistant, shared")


@pytest.mark.parametrize("name", EAGLES)
def test_logits_of_eagle3(gpu: Backend, name: str) -> None:
    _, plan = test_eagle3.plans(name)
    stored = test_eagle3.STORED[name]
    known = np.isfinite(stored[0])
    _, ours = test_eagle3.run(gpu, plan, KIT[EAGLES[name].model].tokens, test_eagle3.THEIRS)
    assert nmse(ours[:, known], stored[:, known]).max() < LIMIT


def test_logits_of_an_assistant(gpu: Backend) -> None:
    for name, given in ASSISTANTS.items():
        _, ours = test_assistant.run(gpu, test_assistant.plans(name)[1], KIT[given.model].tokens)
        assert nmse(ours, test_assistant.STORED[name]).max() < test_assistant.LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same(tmp_path: Path, backend_name: str, name: str) -> None:
    """Alone and at once; and a head's rows do not depend on the rows of other sequences."""
    given = DRAFTERS.get(name)
    path = KIT[given.model if given else name].write(tmp_path / "model.gguf")
    options: dict[str, Any] = {"ctx_size": 100, "threads": 1, "backend": backend_name}
    drafter = {"model_draft": given.write(tmp_path / "drafter.gguf")} if given else {}
    with (
        localllm.load(path, **options) as plain,
        localllm.load(path, spec="mtp", **drafter, **options) as drafting,
    ):
        eager(drafting)
        prompts = [np.random.default_rng(count).integers(3, 128, count).tolist() for count in (5, 30, 41)]
        expected = [plain.generate(ids, max_tokens=16, **GREEDY).tokens for ids in prompts]
        replies = [drafting.generate(ids, max_tokens=16, **GREEDY) for ids in prompts]
        assert [reply.tokens for reply in replies] == expected
        assert sum(reply.usage.drafted for reply in replies) > 40

        def answer(ids: list[int]) -> list[int]:
            return drafting.generate(ids, max_tokens=16, **GREEDY).tokens

        with ThreadPoolExecutor(len(prompts)) as threads:
            assert list(threads.map(answer, prompts)) == expected
        _rows_alone_and_together(drafting, prompts)


def _rows_alone_and_together(model: localllm.Model, prompts: list[list[int]]) -> None:
    model.stepper.core.running.end(None)  # frees the cache
    engine, parts = model.engine, []
    for ids in prompts:
        sequence = engine.add()
        hidden = engine.step([SequenceRows(sequence, ids)])[0].hidden[-1:].copy()
        parts.append(DraftRows(sequence, len(ids) - 1, [7], hidden, 1))
    with engine.drafting([(part.sequence, 1) for part in parts]):
        alone = [tuple(each[0].copy() for each in engine.draft([part])) for part in parts]
        logits, following = engine.draft(parts)
        for number, (own, state) in enumerate(alone):
            np.testing.assert_array_equal(logits[number], own)
            np.testing.assert_array_equal(following[number], state)
    for part in parts:
        engine.release(part.sequence)


def test_with_a_part_of_the_layers_the_file_is_not_used(tmp_path: Path, backend_name: str) -> None:
    given = DRAFTERS["own"]
    path, drafter = KIT[given.model].write(tmp_path / "m.gguf"), given.write(tmp_path / "drafter.gguf")
    options: dict[str, Any] = {"ctx_size": 64, "threads": 1, "backend": backend_name, "model_draft": drafter}
    with (
        pytest.warns(NotUsed, match="not used, because only a part of the model is on a graphics card"),
        localllm.load(path, gpu_layers=2, **options) as model,
    ):
        assert not model.engine.draft_heads
    with localllm.load(path, gpu_layers=0, spec="draft", **options) as model:  # all on the CPU
        assert model.engine.draft_heads
    with pytest.raises(SpeculationError, match="no multi-token-prediction head can draft"):
        localllm.load(path, gpu_layers=2, spec="mtp", **options)
