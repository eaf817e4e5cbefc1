"""Kept intermediate values: the CPU backend keeps the same values as the reference, for every token and every expert.

Bound matrices can also get new weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm.backends.base import BackendError, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK, Experts, Linear, Plan, Value
from tests.backends.support import feed, model, plan, record, tokens
from tests.backends.test_experts import TABLE, TOKENS, mixture
from tests.models.support import Driver, MemoryWeight, plan_of

ROWS = 24


def inputs(plan: Plan) -> list[Value]:
    """Return the values that enter matrices or leave experts."""
    found = {op.x.index: op.x for op in plan.operations if isinstance(op, Linear)}
    found |= {op.out.index: op.out for op in plan.operations if isinstance(op, Experts)}
    return list(found.values())


def bound(backend: Any, plan: Plan, keep: list[Value], rows: int = ROWS) -> Any:
    return backend.bind(plan, Limits(rows, rows, 8, 8 * BLOCK), keep=keep)


def test_inputs_of_matrices_are_left_readable(cpu: CpuBackend) -> None:
    """For float matrices, the kept values differ only by rounding, including the rounding of the KV cache to F16."""
    made = plan("F32")
    keep = inputs(made)
    ours, theirs = bound(cpu, made, keep), bound(ReferenceBackend(), made, [])
    for executable in (ours, theirs):
        driver = Driver(executable)
        driver.step([(0, tokens(9))])
        driver.step([(0, tokens(5, seed=6))])
    # Per layer: inputs of q, k, v; of the attention output; of gate and up; of down. Plus the input of the
    # output matrix.
    assert len(keep) == 9
    for value in keep:
        a, b = ours.value(value), theirs.value(value)
        assert a.shape == b.shape == (5, value.width)
        assert np.abs(a - b).max() < 1e-3 * np.abs(b).max(), value.name


def test_keeping_changes_no_result(cpu: CpuBackend) -> None:
    made = plan("Q4_0")
    np.testing.assert_array_equal(
        feed(bound(cpu, made, inputs(made)), tokens(20)), feed(bound(cpu, made, []), tokens(20))
    )


def test_every_expert_s_rows_are_left_readable(cpu: CpuBackend) -> None:
    made = record(TABLE, mixture("softmax", 3))
    keep = inputs(made)
    ours, theirs = bound(cpu, made, keep, TOKENS), bound(ReferenceBackend(), made, [], TOKENS)
    for executable in (ours, theirs):
        feed(executable, np.arange(TOKENS))
    (out,) = [op.out for op in made.operations if isinstance(op, Experts)]
    a, b = ours.routing(out), theirs.routing(out)
    np.testing.assert_array_equal(a.choices, b.choices)
    assert a.hidden.shape == (TOKENS, 3, 96)
    np.testing.assert_allclose(a.hidden, b.hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [None, ReferenceBackend()])
def test_a_matrix_with_other_numbers_is_as_if_bound_with_them(cpu: CpuBackend, backend: Any) -> None:
    backend = backend or cpu
    metadata, tensors = model("Q4_0")
    name = "blk.1.ffn_down.weight"
    other = MemoryWeight.of(name, np.random.RandomState(8).standard_normal(tensors[name].shape) / 8, "Q4_0")
    executable = bound(backend, plan_of(metadata, tensors), [])
    before = feed(executable, tokens(12)).copy()
    executable.replace(other)
    after = feed(executable, tokens(12)).copy()
    expected = feed(bound(backend, plan_of(metadata, {**tensors, name: other}), []), tokens(12))
    assert not np.array_equal(after, before)
    np.testing.assert_array_equal(after, expected)
    executable.replace(tensors[name])
    np.testing.assert_array_equal(feed(executable, tokens(12)), before)


@pytest.mark.parametrize("backend", [None, ReferenceBackend()])
@pytest.mark.parametrize("change", ["name", "format", "shape"])
def test_only_a_matrix_of_the_same_kind_takes_a_place(cpu: CpuBackend, backend: Any, change: str) -> None:
    shape = (64, 64) if change == "shape" else (64, 96)
    name = "blk.9.ffn_down.weight" if change == "name" else "blk.1.ffn_down.weight"
    other = MemoryWeight.of(name, np.zeros(shape), "Q8_0" if change == "format" else "Q4_0")
    with pytest.raises(BackendError, match="cannot take its place"):
        bound(backend or cpu, plan("Q4_0"), []).replace(other)
