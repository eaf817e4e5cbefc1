"""EAGLE-3 drafts against llama.cpp's logits: position t gets token t + 1 and the combined hidden states of token t."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.backends.base import Backend, CacheTypes, DraftingExecutable, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.models import Drafter, architecture_of, read_config, record, record_with_drafter
from localllm.plan import BLOCK, Batch, Plan
from tests.backends.support import chunks
from tests.models.drafters import EAGLES
from tests.models.kit import KIT, LIMIT
from tests.models.support import Driver, nmse

with np.load(Path(__file__).parents[1] / "models" / "data" / "drafter_logits.npz") as file:
    STORED = dict(file)  # (rows and drafts, vocabulary)
LIMITS, CACHE, CHAIN = Limits(rows=64, logit_rows=64, blocks=1, positions=BLOCK), CacheTypes("f32", "f32"), 3
THEIRS = [32] + [1] * 7


def plans(name: str) -> tuple[Plan, Plan]:
    """Return the plan of the model alone, and with the drafter."""
    metadata, tensors = KIT[EAGLES[name].model].loaded()
    architecture = architecture_of(metadata)
    alone = record(read_config(metadata, architecture.name), architecture, tensors)
    return alone, record_with_drafter(metadata, architecture, tensors, Drafter(*EAGLES[name].loaded()))


def run(backend: Backend, plan: Plan, tokens: list[int], sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the model's logits, and the drafter's logits: of all tokens, and of drafts from the last one."""
    (head,) = plan.drafts
    executable, found = backend.bind(plan, LIMITS, CACHE, keep=[head.hidden, head.logits, head.following]), []
    assert isinstance(executable, DraftingExecutable)

    def draft(start: int, read: list[int], rows: np.ndarray) -> np.ndarray:
        places, of = np.arange(start, start + len(read), dtype=np.int32), np.zeros(len(read), np.int32)
        wanted = np.arange(len(read), dtype=np.int32)
        own = np.array(read, np.int32)
        executable.draft(Batch(own, places, places.copy(), of, np.zeros((1, 1), np.int32), wanted), rows)
        found.extend(head.spread(row) for row in executable.value(head.logits).copy())
        return executable.value(head.following)[-1:].copy()

    try:
        logits = Driver(executable).step([(0, tokens)]).copy()
        rows = executable.value(head.hidden).copy()
        for start, stop in chunks(len(tokens) - 1, sizes):
            following = draft(start, tokens[start + 1 : stop + 1], rows[start:stop])
        for number in range(CHAIN):
            following = draft(len(tokens) - 1 + number, [int(found[-1].argmax())], following)
    finally:
        executable.close()
    return logits, np.array(found)


@pytest.mark.parametrize("on", ["reference", "cpu"])
@pytest.mark.parametrize("name", EAGLES)
def test_every_row_and_three_drafts(cpu: CpuBackend, name: str, on: str) -> None:
    backend, tokens = cpu if on == "cpu" else ReferenceBackend(), KIT[EAGLES[name].model].tokens
    alone, plan = plans(name)
    logits, ours = run(backend, plan, tokens, THEIRS)
    known = np.isfinite(STORED[name][0])
    assert known.sum() == (EAGLES[name].tokens or len(known))
    assert np.isneginf(ours[:, ~known]).all()
    assert nmse(ours[:, known], STORED[name][:, known]).max() < LIMIT
    executable = backend.bind(alone, LIMITS, CACHE)
    try:
        np.testing.assert_array_equal(logits, Driver(executable).step([(0, tokens)]))  # the drafter changes no logits
    finally:
        executable.close()
    if on == "cpu":
        for sizes in ([], [1] * 39, [5, 17, 2]):
            np.testing.assert_array_equal(run(backend, plan, tokens, sizes)[1], ours)


def test_weights_are_held_once() -> None:
    _, plan = plans("shared")
    names = [name for name in plan.weights if name.removeprefix("eagle3: ").startswith(("token_embd", "output."))]
    assert sorted(names) == ["output.weight", "token_embd.weight"]
    _, plan = plans("own")
    assert {"eagle3: output.weight", "eagle3: token_embd.weight", "output.weight"} <= set(plan.weights)
    assert not any(name.startswith("eagle3: ") for name in plans("own")[0].tensors)
