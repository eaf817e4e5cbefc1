"""The common part of all executables, on every backend of a test machine: checks, RoPE tables, stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from localllm.backends.base import Backend, BackendError, Executable, Limits, TopKExecutable
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.backends.shell import ROPE_STEP, RopeTables, Shell
from localllm.plan import BLOCK, Batch, Rope, Send
from tests.backends.gpu.conftest import pocl
from tests.backends.support import bind, model, plan, tokens
from tests.models.support import Driver, MemoryWeight, plan_of
from tests.models.tiny_families import FAMILIES

OPEN: dict[str, Callable[[], Backend]] = {"cpu": lambda: CpuBackend(2), "reference": ReferenceBackend, "gpu": pocl}


@pytest.fixture(scope="module", params=OPEN)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    opened = OPEN[request.param]()
    yield opened
    opened.close()


ROWS = np.zeros(1, np.int32)
BATCH = Batch(ROWS, ROWS, ROWS, ROWS, np.zeros((1, 1), np.int32), ROWS)
MODEL = model("Q8_0")
WEIGHT = MODEL[1]["blk.0.ffn_up.weight"]
VALUE = plan_of(*MODEL).values[0]

CALLS: dict[str, Callable[[Executable], object]] = {
    "step": lambda e: e.step(BATCH),
    "begin": lambda e: e.begin(BATCH),
    "run": lambda e: e.run(),
    "value": lambda e: e.value(VALUE),
    "routing": lambda e: e.routing(VALUE),
    "replace": lambda e: e.replace(WEIGHT),
    "copy_blocks": lambda e: e.copy_blocks(ROWS, ROWS),
    "read_blocks": lambda e: e.read_blocks(0, ROWS),
    "write_blocks": lambda e: e.write_blocks(0, ROWS, np.zeros((1, e.block_bytes[0]), np.uint8)),
    "read_bandwidth": lambda e: e.read_bandwidth(),
}


def test_a_closed_executable_refuses_every_call_and_its_logits_stay(backend: Backend) -> None:
    executable = bind(backend, plan_of(*MODEL))
    logits = executable.step(BATCH)
    before = logits.copy()
    executable.close()
    executable.close()
    np.testing.assert_array_equal(logits, before)
    calls = list(CALLS.values())
    if isinstance(executable, TopKExecutable):
        calls += [lambda e: e.step_top_k(BATCH, 5), lambda e: e.result_top_k(5)]
    for call in calls:
        with pytest.raises(BackendError, match="this executable is closed; bind the plan again"):
            call(executable)


def test_bad_blocks_weights_and_batches_are_refused_before_anything_changes(backend: Backend) -> None:
    executable = bind(backend, plan_of(*MODEL), blocks=2)
    ids = tokens(20)
    truth = Driver(executable).step([(0, ids)])
    before = executable.read_blocks(1, np.array([0, 1]))
    far, short = np.array([2]), np.zeros((1, executable.block_bytes[1] - 1), np.uint8)
    infinite = np.full((1, executable.block_bytes[1]), 0x7C, np.uint8)
    refused: list[tuple[str, Callable[[], object]]] = [
        ("block numbers below 2", lambda: executable.copy_blocks(far, ROWS)),
        ("block numbers below 2", lambda: executable.read_blocks(1, far)),
        ("block numbers below 2", lambda: executable.write_blocks(1, far, before[:1])),
        ("bytes are expected", lambda: executable.write_blocks(1, ROWS, short)),
        ("not finite", lambda: executable.write_blocks(1, ROWS, infinite)),
        ("cannot take its place", lambda: executable.replace(MemoryWeight.of("other", WEIGHT.values(), "Q8_0"))),
        ("tokens must be from 0", lambda: executable.begin(Batch(ROWS + 97, *[ROWS] * 3, BATCH.tables, ROWS))),
    ]
    for message, call in refused:
        with pytest.raises(BackendError, match=message):
            call()
    np.testing.assert_array_equal(executable.read_blocks(1, np.array([0, 1])), before)
    np.testing.assert_array_equal(Driver(executable).step([(0, ids)]), truth)
    executable.close()


def test_blocks_are_copied_in_layers_with_a_window_or_in_the_others(backend: Backend) -> None:
    made = plan_of(*FAMILIES["gemma3 pattern"]())
    executable = backend.bind(made, Limits(16, 16, 2, 2 * BLOCK, window_blocks=2))
    rows = np.arange(9, dtype=np.int32)
    tables = np.zeros((1, 1), np.int32)
    executable.step(Batch(rows, rows, rows, 0 * rows, tables, rows[:1], rows, tables))

    def same(layer: int) -> bool:
        first, second = executable.read_blocks(layer, np.array([0, 1]))
        return bool((first == second).all())

    windows = [layer.window > 0 for layer in made.layers]
    assert set(windows) == {False, True}
    assert not any(same(layer) for layer in range(len(windows)))
    executable.copy_blocks(np.array([0]), np.array([1]), windowed=True)
    assert [same(layer) for layer in range(len(windows))] == windows
    executable.copy_blocks(np.array([0]), np.array([1]))
    assert all(same(layer) for layer in range(len(windows)))
    executable.close()


def test_a_batch_gives_the_same_bits_stage_by_stage(backend: Backend) -> None:
    executable = bind(backend, plan("Q8_0"))
    whole = executable.step(BATCH).copy()
    executable.begin(BATCH)
    assert executable.run() == []
    np.testing.assert_array_equal(executable.result(), whole)
    executable.close()


def test_a_plan_of_several_stages_has_no_single_step(backend: Backend) -> None:
    made = plan("F32")
    first = made.operations[0].outputs
    executable = bind(backend, replace(made, operations=(made.operations[0], Send(first), *made.operations[1:])))
    assert isinstance(executable, Shell)
    with pytest.raises(AssertionError, match="in stages"):
        executable.step(BATCH)
    executable.close()


def test_rope_tables_grow_by_whole_steps_up_to_the_last_position_each_row_once() -> None:
    ropes = [Rope("neox", 4, (1.0, 0.5)), Rope("interleaved", 2, (1.0,))]
    filled: list[tuple[Rope, int, int]] = []
    tables = RopeTables(ropes, 2 * ROPE_STEP + 10, lambda *row: filled.append(row))
    found = []
    for positions in (1, ROPE_STEP, ROPE_STEP + 1, 5, 2 * ROPE_STEP + 10, 1):
        tables.reach(positions)
        found.append([(start, stop) for _, start, stop in filled])
        assert [rope for rope, *_ in filled] == ropes * bool(filled)
        filled.clear()
    assert found == [
        [(0, ROPE_STEP)] * 2, [], [(ROPE_STEP, 2 * ROPE_STEP)] * 2, [], [(2 * ROPE_STEP, 2 * ROPE_STEP + 10)] * 2, []
    ]  # fmt: skip
