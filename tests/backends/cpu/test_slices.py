"""Stages in slices of time: each thread pauses between two tasks, and the next slice continues with the rest."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.backends.base import Limits
from localllm.backends.cpu import slices
from localllm.backends.cpu.backend import CpuBackend, CpuExecutable
from localllm.backends.cpu.kernels.common import TaskLine
from localllm.plan import Batch, Recorder, Weight, runs
from tests.models.support import MemoryWeight

ROWS, OUTPUTS = 5, 640  # 40 panels of 16 outputs


@pytest.fixture
def executable() -> Iterator[CpuExecutable]:
    backend = CpuBackend(threads=2)
    recorder, random = Recorder(), np.random.default_rng(0)
    weight = MemoryWeight.of("w", random.standard_normal((OUTPUTS, 64), np.float32), "F16")
    recorder.end_stage(recorder.linear(recorder.receive(64, "x"), Weight.of(weight)))
    executable = backend.bind(recorder.finish_stages(), Limits(64, 1, 4, 128))
    both: Any = SimpleNamespace(threads=2, observe=lambda *_: None)  # on a busy machine, too
    executable.thread_counts = both, both
    yield executable
    executable.close()
    backend.close()


def batch() -> Batch:
    rows, zeros = np.arange(ROWS, dtype=np.int32), np.zeros(ROWS, np.int32)
    return Batch(zeros, rows, rows, zeros, np.zeros((1, 1), np.int32), zeros[:0])


def test_a_slice_ends_between_two_tasks(executable: CpuExecutable, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(1).standard_normal((ROWS, 64), np.float32)
    executable.begin(batch())
    [truth] = [each.copy() for each in executable.run([x])]
    monkeypatch.setattr(slices, "LEAST", 0.0)
    executable.pool.cycles_per_second = 1e9
    executable.begin(batch())
    taken = []
    while (found := executable.run_slice(1e-9, [x])) is None:
        lines = executable._storage.counters[0, :, TaskLine.taken]
        taken.append(int((lines & 0xFFFFFFFF).sum() + (lines >> 32).sum()))
    np.testing.assert_array_equal(found[0], truth)
    assert taken[:3] == [2, 4, 6]  # each of two threads takes one task
    assert taken == list(range(2, 21, 2))  # 20 tasks of two panels


def test_the_input_is_taken_in_bands(executable: CpuExecutable, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(1).standard_normal((ROWS, 64), np.float32)
    executable.begin(batch())
    [truth] = [each.copy() for each in executable.run([x])]
    monkeypatch.setattr(runs, "BAND", 512)  # two rows
    executable.begin(batch())
    (_, into) = executable._stages[0].received[0]
    into[:] = 0.0
    for rows in (2, 4):
        assert executable.run_slice(1e-9, [x]) is None
        assert (into[:ROWS] == x).all(axis=1).tolist() == [n < rows for n in range(ROWS)]
    executable.begin(batch())  # forgets the rest
    while (found := executable.run_slice(1e-9, [x])) is None:
        pass
    np.testing.assert_array_equal(found[0], truth)


def test_a_new_batch_forgets_a_stage_in_slices(executable: CpuExecutable, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = np.random.default_rng(2).standard_normal((2, ROWS, 64), np.float32)
    executable.begin(batch())
    [truth] = [each.copy() for each in executable.run([second])]
    monkeypatch.setattr(slices, "LEAST", 0.0)
    executable.pool.cycles_per_second = 1e9
    executable.begin(batch())
    assert executable.run_slice(1e-9, [first]) is None
    executable.begin(batch())
    np.testing.assert_array_equal(executable.run([second])[0], truth)
    executable.begin(batch())
    while (found := executable.run_slice(1e-9, [second])) is None:
        pass
    np.testing.assert_array_equal(found[0], truth)


def test_without_a_known_clock_a_slice_is_whole_kernels(executable: CpuExecutable) -> None:
    executable.pool.cycles_per_second = 0.0
    executable.begin(batch())
    assert executable.run_slice(1e-9, [np.zeros((ROWS, 64), np.float32)]) is not None
