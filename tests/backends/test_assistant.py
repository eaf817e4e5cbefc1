"""Gemma 4 assistants against llama.cpp's logits: drafts from the model's cache, for 8 lengths of a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.backends.base import Backend, CacheTypes, DraftingExecutable, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.models import Drafter, architecture_of, read_config, record, record_with_drafter
from localllm.plan import BLOCK, Batch, Plan
from tests.models.drafters import ASSISTANTS
from tests.models.kit import KIT
from tests.models.support import Driver, nmse

with np.load(Path(__file__).parents[1] / "models" / "data" / "drafter_logits.npz") as file:
    STORED = dict(file)  # (lengths * (1 + drafts), vocabulary)
LIMIT = 1e-4  # llama.cpp reads GELU from a float16 table; a wrong position or window gives errors above 1
LIMITS, CACHE, PROMPT, CHAIN = (
    Limits(rows=64, logit_rows=64, blocks=1, positions=BLOCK),
    CacheTypes("f32", "f32"),
    32,
    3,
)


def plans(name: str) -> tuple[Plan, Plan]:
    """Return the plan of the model alone, and with the drafter."""
    metadata, tensors = KIT[ASSISTANTS[name].model].loaded()
    architecture = architecture_of(metadata)
    alone = record(read_config(metadata, architecture.name), architecture, tensors)
    return alone, record_with_drafter(metadata, architecture, tensors, Drafter(*ASSISTANTS[name].loaded()))


def run(backend: Backend, plan: Plan, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the model's logits, and the drafter's logits after the prompt and after each later token."""
    (head,) = plan.drafts
    executable = backend.bind(plan, LIMITS, CACHE, keep=[head.hidden, head.logits, head.following])
    assert isinstance(executable, DraftingExecutable)
    driver, logits, found = Driver(executable), [], []
    zero = np.zeros(1, np.int32)
    try:
        for start, stop in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, len(tokens) - 1))]:
            logits.append(driver.step([(0, tokens[start:stop])]).copy())
            state, token = executable.value(head.hidden)[-1:].copy(), tokens[stop]
            for _ in range(1 + CHAIN):
                place = np.array([stop - 1], np.int32)
                own = np.array([token], np.int32)
                executable.draft(Batch(own, place, place.copy(), zero, np.zeros((1, 1), np.int32), zero), state)
                found.append(executable.value(head.logits)[0].copy())
                state, token = executable.value(head.following).copy(), int(found[-1].argmax())
    finally:
        executable.close()
    return np.concatenate(logits), np.array(found)


@pytest.mark.parametrize("on", ["reference", "cpu"])
@pytest.mark.parametrize("name", ASSISTANTS)
def test_drafts_after_every_length(cpu: CpuBackend, name: str, on: str) -> None:
    backend, model = cpu if on == "cpu" else ReferenceBackend(), KIT[ASSISTANTS[name].model]
    alone, plan = plans(name)
    assert plan.layers == alone.layers  # no cache layer of its own
    logits, ours = run(backend, plan, model.tokens)
    assert nmse(ours, STORED[name]).max() < LIMIT
    if on == "cpu":
        executable = backend.bind(alone, LIMITS, CACHE)
        try:
            expected = Driver(executable).step([(0, model.tokens[:-1])])
        finally:
            executable.close()
        np.testing.assert_array_equal(logits, expected[-len(logits) :])  # the drafter changes no logits
