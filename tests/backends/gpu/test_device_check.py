"""The check of a device before a model uses it: the check detects injected bugs and stores its results."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.backends.base import F16_CACHE, Backend, CacheTypes, Limits
from localllm.backends.gpu.bind import program
from localllm.backends.gpu.conformance import verdicts
from localllm.backends.gpu.conformance.running import Verdict
from localllm.backends.gpu.conformance.segments import segments
from localllm.backends.gpu.conformance.verdicts import Conformance, examine
from localllm.backends.opencl.backend import OpenClBackend
from localllm.plan import BLOCK
from tests.backends.gpu.conftest import UNOPTIMIZED, pocl
from tests.backends.gpu.faults import FAULTS, LIMITS, Faulty, bound, checked
from tests.backends.gpu.small import PLANS
from tests.backends.support import LLAMA, plan, record
from tests.plan.support import MODELS, tiny_plan


@pytest.fixture(scope="module")
def device() -> Iterator[Faulty]:
    with_pocl = pocl()
    yield Faulty(with_pocl.device._device, cache=None)
    with_pocl.close()


@pytest.fixture(scope="module")
def faulty(device: Faulty) -> Faulty:
    """Provide a device that compiles many kernels and runs each of them once, so that it does not optimize them."""
    made = Faulty(device._device, cache=None)
    made.options = UNOPTIMIZED
    return made


# -- planted faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_kernel_is_caught(faulty: Faulty, name: str) -> None:
    fault = FAULTS[name]
    faulty.old, faulty.new, faulty.met = fault.old, fault.new, False
    try:
        found = checked(faulty, fault.small, fault.kernel)
    finally:
        faulty.old = ""
    assert faulty.met, "the kernels no longer have this text"
    failed = [verdict for verdict in found if verdict.failed]
    assert failed
    assert all(fault.kernel in verdict.kernels for verdict in failed)
    assert not [verdict for verdict in found if verdict.skipped]


@pytest.mark.parametrize("name", PLANS)
def test_without_faults_everything_passes(gpu: Backend, name: str) -> None:
    """The check covers every kernel, format and cache type."""
    for small in PLANS[name]:
        for verdict in examine(gpu.device, segments(record(small.table, small.build)), LIMITS, small.cache):
            assert verdict.status == "passed", verdict


@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_that_are_checked_are_those_of_the_model(name: str) -> None:
    """The checked kernels have the same constants as the model's kernels: nothing is compiled twice, and none is
    missing.
    """
    own = tiny_plan(name)
    for compute in ("", "sm_90"):
        for cache in (F16_CACHE, CacheTypes("q8_0", "q4_0")):
            wanted = set(program(own, LIMITS, cache, (), compute).kernels())
            found = {k for each in segments(own) for k in program(each.plan, LIMITS, cache, (), compute).kernels()}
            assert wanted <= found


@pytest.mark.parametrize("limits", [Limits(1, 1, 1, BLOCK), Limits(17, 3, 2, 20), Limits(600, 600, 12, 700)], ids=str)
def test_limits_of_any_size_can_be_checked(device: Faulty, tmp_path: Path, limits: Limits) -> None:
    backend = OpenClBackend(device.facts.name, cache=None, conformance=Conformance(tmp_path))
    backend.device = device
    backend.bind(plan("F32", LLAMA), limits).close()
    assert len(list(tmp_path.iterdir())) == 1


# -- stored results --------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of segments in each check."""
    found: list[int] = []

    def counting(device: Any, own: Any, *others: Any) -> list[Verdict]:
        found.append(len(own))
        return examine(device, own, *others)

    monkeypatch.setattr(verdicts, "examine", counting)
    return found


def test_a_result_is_kept_for_device_driver_and_kernels(device: Faulty, tmp_path: Path, runs: list[int]) -> None:
    for _ in range(3):
        bound(device, tmp_path)
    assert len(runs) == 1
    assert len(list(tmp_path.iterdir())) == 1
    facts = device.facts
    try:
        device.facts = replace(facts, api=facts.api + " (updated)")
        bound(device, tmp_path)
        assert len(runs) == 2
    finally:
        device.facts = facts
    bound(device, tmp_path)
    assert len(runs) == 2


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b'{"verdicts": [{"operation": 3}]}', b'{"verdicts": []}', b"\xff" * 99]
)
def test_a_damaged_result_is_ignored(device: Faulty, tmp_path: Path, runs: list[int], content: bytes) -> None:
    bound(device, tmp_path)
    (kept,) = tmp_path.iterdir()
    for damaged in (content, hashlib.sha256(content).digest() + content):
        kept.write_bytes(damaged)
        bound(device, tmp_path)
    assert len(runs) == 3
