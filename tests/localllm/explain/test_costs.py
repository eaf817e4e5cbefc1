"""Bytes and FLOPs per operation add up to the plan's totals, and weight bytes match the file's tensor sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest

import localllm
from localllm.backends.base import Clocked, Roofs
from localllm.backends.cpu.backend import CpuBackend
from localllm.explain.account import Spent
from localllm.explain.costs import CacheRead, Cost, costs_of
from localllm.explain.record import StepRecord
from localllm.plan import Plan
from localllm.plan.summary import summarize
from tests.backends.support import bind
from tests.models.kit import KIT
from tests.models.support import plan_of

# Sliding-window, latent and sparse attention, experts, every kind of recurrent layer, and pooled attention.
MODELS = [
    "llama-gqa",
    "gemma3-12",
    "llama-moe",
    "deepseek2-moe",
    "lfm2-dense",
    "qwen35-mtp",
    "jamba-dense",
    "granitehybrid-dense",
    "deepseek32-8of40",
    "deepseek4-8of50",
]


def step(first: int, count: int, logit_rows: int = 1) -> StepRecord:
    return StepRecord("model", 0.0, 0.0, first, (1,) * count, logit_rows, None)


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=2)
    yield backend
    backend.close()


@pytest.fixture(scope="module", params=MODELS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*KIT[request.param].loaded())


@pytest.mark.parametrize("first", [0, 40, 200])
def test_a_decoding_pass_reads_what_the_memory_plan_says(cpu: CpuBackend, plan: Plan, first: int) -> None:
    executable = bind(cpu, plan)
    try:
        costs, one = costs_of(executable, plan), step(first, 1)
        read = sum(cost.bytes(one) for cost in costs if "embedding" not in cost.kind)
        embedded = [cost for cost in costs if "embedding" in cost.kind]
        assert all(not cost.weights and not cost.cache for cost in embedded)
        assert read == executable.memory.read_after(first + 1)
    finally:
        executable.close()


def test_a_decoding_pass_does_the_operations_of_the_plan(cpu: CpuBackend, plan: Plan) -> None:
    executable = bind(cpu, plan)
    try:
        costs, summary = costs_of(executable, plan), summarize(plan)
        assert sum(cost.operations(step(0, 1)) for cost in costs) >= summary.flops_per_token
        assert sum(cost.flops for cost in costs) == summary.flops_per_token
        if not plan.window and not executable.memory.selected:
            expected = summary.flops_per_token + 100 * summary.attention_flops_per_position
            assert sum(cost.operations(step(99, 1)) for cost in costs) == expected
    finally:
        executable.close()


def test_calls_match_the_clock(cpu: CpuBackend, plan: Plan) -> None:
    executable = bind(cpu, plan)
    try:
        assert isinstance(executable, Clocked)
        assert len(costs_of(executable, plan)) == len(executable.clocks()) == len(executable.barriers)
    finally:
        executable.close()


def test_bytes_of_every_matrix_are_those_of_the_file() -> None:
    """Bytes read per matrix equal the sizes in the file, because the reference backend keeps weights as stored."""
    with localllm.load("demo", backend="reference", ctx_size=128) as model:
        assert model.plan is not None
        found: dict[str, int] = defaultdict(int)
        for cost in costs_of(model.executable, model.plan):
            found[cost.kind] += cost.bytes(step(9, 1)) - 10 * sum(read.bytes for read in cost.cache)
        expected: dict[str, int] = defaultdict(int)
        for name, tensor in model.file.tensors.items():
            if len(tensor.shape) == 2:
                role = name.split(".")[2] if name.startswith("blk.") else name.split(".")[0]
                expected[role] += len(tensor.read(0, tensor.shape[0]).reshape(-1))
        table = model.file.tensors["token_embd.weight"]
        row = expected.pop("token_embd")
        assert found.pop("embedding") == row // table.shape[0]
        assert found.pop("output") == expected.pop("output", row)  # tied models read the embedding matrix
        assert {kind: size for kind, size in found.items() if size} == dict(expected)


def test_a_prompt_reads_weights_once_and_multiplies_for_every_row(cpu: CpuBackend) -> None:
    plan = plan_of(*KIT["llama-gqa"].loaded())
    executable = bind(cpu, plan)
    try:
        costs = [cost for cost in costs_of(executable, plan) if cost.weights]
        for cost in costs:
            if cost.batch and cost.weights[0][1] == cost.weights[0][2]:
                assert cost.bytes(step(0, 50)) == cost.bytes(step(0, 1))
                assert cost.operations(step(0, 50)) == 50 * cost.operations(step(0, 1))
            if not cost.batch:
                assert cost.operations(step(0, 50)) == cost.operations(step(0, 1)) > 0
                assert cost.operations(step(0, 50, logit_rows=50)) == 50 * cost.operations(step(0, 1))
        assert any(not cost.batch for cost in costs), "the last rows alone become logits"
    finally:
        executable.close()


def test_operations_without_a_barrier_between_them_are_named_together() -> None:
    """Operations without a barrier in between share one name.

    Threads may run such operations at the same time, so only the total time is known.
    """
    with localllm.load("demo", ctx_size=128, threads=1) as model:
        executable = model.executable
        assert model.plan is not None
        assert isinstance(executable, Clocked)
        kinds = [cost.kind for cost in costs_of(executable, model.plan)]
        assert {"attn_q, attn_k, attn_v", "ffn_gate, ffn_up", "ffn_down", "output"} <= set(kinds)
        for number, barrier in enumerate(executable.barriers[:-1]):
            assert barrier or kinds[number] == kinds[number + 1]


def test_attention_of_a_chunk_sees_each_position_that_it_may() -> None:
    """Attention costs equal a count of the visible positions, with and without a sliding window."""
    whole = Cost("attention", True, (), 0, (CacheRead(10, 4, 0),), 0)
    some = Cost("attention", True, (), 0, (CacheRead(10, 4, 8),), 0)
    assert whole.operations(step(5, 6)) == 4 * sum(position + 1 for position in range(5, 11))
    assert some.operations(step(5, 6)) == 4 * sum(min(position + 1, 8) for position in range(5, 11))
    assert whole.bytes(step(5, 6)) == 10 * 11
    seen = {p for position in range(5, 11) for p in range(max(0, position - 7), position + 1)}
    assert some.bytes(step(5, 6)) == 10 * len(seen)
    assert some.bytes(step(30, 6)) == 10 * 13


def test_experts_are_read_at_most_once() -> None:
    cost = Cost("experts", True, ((800, 2, 8),), 0, (), 0)
    assert [cost.bytes(step(0, rows)) for rows in (1, 2, 3, 4, 5, 50)] == [200, 400, 600, 800, 800, 800]


def test_a_time_shorter_than_reading_takes_gives_no_rates() -> None:
    """No rates are given if the time is shorter than reading the bytes would take.

    Time is measured on the first thread only, and other threads may do the work. Shares of 1854 % used to appear.
    """
    roofs = Roofs(60e9, 1e12, 3e9)
    usual = Spent("output", 1, 1e-3, 1e-4, 30_000_000, 10_000_000, roofs)
    assert (usual.memory_share, usual.bandwidth) == (0.5, 30e9)
    assert usual.compute_share > 0
    assert usual.bound == "memory"
    other = replace(usual, seconds=2e-6)
    assert (other.memory_share, other.compute_share, other.bandwidth, other.rate) == (0, 0, 0, 0)
    assert other.bytes == usual.bytes


def test_what_waited_most_of_its_time_is_bound_by_waiting() -> None:
    phase = Spent("all operations", 9, 1e-2, 6e-3, 1_000_000, 10**9, Roofs(60e9, 1e12, 3e9))
    assert phase.bound == "waiting"
    assert replace(phase, waited=4e-3).bound == "arithmetic"
