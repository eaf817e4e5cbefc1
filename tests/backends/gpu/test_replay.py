"""Decode steps are recorded once per shape and replayed. A replay gives the same bits as separate launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from localllm.backends.base import Backend, BackendError
from localllm.backends.cuda.graph import Graph
from localllm.backends.gpu.executable import GpuExecutable
from localllm.backends.gpu.kernels.attention import PARTITION
from localllm.backends.gpu.replay import MOST, Replays, bucket
from tests.backends.attending import Heads, attend
from tests.backends.cases import VOCABULARY
from tests.backends.support import bind, record
from tests.models.support import Driver, MemoryWeight

PLAN = record(
    MemoryWeight.of("table", np.random.RandomState(3).standard_normal((VOCABULARY, 128)).astype(np.float32)),
    attend(Heads(4, 2, 16)),
)
STEPS = [[(0, 1)]] * 5 + [[(0, 1), (1, 1)]] * 3 + [[(0, 4)]] * 3 + [[(1, 200)], [(0, 1)], [(1, 1)], [(1, 1), (0, 3)]]


class Spied:
    """A wrapper of a device's `record` that counts calls and fails on demand."""

    def __init__(self, device: Any, monkeypatch: pytest.MonkeyPatch, refuse: bool = False) -> None:
        self.recorded, self.replayed, self._real, self._refuse = 0, 0, device.record, refuse
        monkeypatch.setattr(device, "record", self.record)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        if self._refuse:
            raise BackendError("this card records nothing")
        self.recorded += 1
        made = self._real(work)

        def replay() -> None:
            self.replayed += 1
            made()

        return replay


def opened(gpu: Backend) -> tuple[Driver, GpuExecutable]:
    executable = bind(gpu, PLAN, rows=300, blocks=32)
    assert isinstance(executable, GpuExecutable)
    return Driver(executable, sequences=2), executable


def test_replays_have_the_bits_of_launches(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay has the bits of separate launches for one token, several tokens and sequences, after a prefill, past a
    partition, and for top-k logits.
    """
    results = []
    for refuse in (False, True):
        spied = Spied(gpu.device, monkeypatch, refuse)
        driver, executable = opened(gpu)
        tokens = np.random.RandomState(1).randint(0, VOCABULARY, 4000)
        rows = [driver.step([(0, tokens[: PARTITION - 8])])]
        for at, parts in enumerate(STEPS * 2):
            rows.append(driver.step([(s, tokens[at + 9 * s :][:n]) for s, n in parts]))
        results.append(np.concatenate(rows))
        assert executable.replays.refused == ("this card records nothing" if refuse else "")
        assert (spied.replayed > 12) == (not refuse)
        monkeypatch.undo()
    np.testing.assert_array_equal(*results)


def test_recorded_once_a_shape_and_again_when_partitions_double(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spied = Spied(gpu.device, monkeypatch)
    driver, _ = opened(gpu)
    found = []
    for position in range(2 * PARTITION + 4):
        driver.step([(0, [position % VOCABULARY])])
        found.append(spied.recorded)
    # The first step of a shape is not recorded. The shapes are 1 partition, 2 partitions, and 3 or 4.
    assert [found[i] for i in (0, 1, PARTITION, PARTITION + 1, 2 * PARTITION, 2 * PARTITION + 1)] == [0, 1, 1, 2, 2, 3]
    assert found[-1] == 3
    assert spied.replayed == len(found) - 3
    driver.step([(0, [1])], logit_rows=[])  # another shape, run twice
    driver.step([(0, [1])], logit_rows=[])
    assert spied.recorded == 4


def test_shapes_that_are_held_are_few() -> None:
    class Device:
        synced = 0

        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            return work

        def sync(self) -> None:
            self.synced += 1

    device, calls = Device(), []
    replays = Replays(device)  # type: ignore[arg-type]
    for _ in range(3):
        for shape in range(MOST + 6):
            replays.run(shape, lambda n=shape: calls.append(n))  # type: ignore[misc]
    assert calls == 3 * list(range(MOST + 6))
    assert device.synced == 2
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 500)] == [1, 2, 4, 4, 8, 8, 16, 512]


class Driver12:
    """The libcuda functions that a graph needs. The function named by `fails` returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            self.calls.append(name.removeprefix("cu"))
            if name in ("cuStreamEndCapture", "cuGraphInstantiateWithFlags"):
                target = arguments[1] if name == "cuStreamEndCapture" else arguments[0]
                target._obj.value = 0x77
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"operation not permitted"
            return 900 if name == self.fails else 0

        return function


def test_a_cuda_graph_is_captured_once_and_launched_often() -> None:
    driver = Driver12()
    graph = Graph(driver, 0x1234, lambda: driver.calls.append("work"))
    for _ in range(3):
        graph()
    del graph
    assert driver.calls == [
        "StreamBeginCapture_v2", "work", "StreamEndCapture", "GraphInstantiateWithFlags", "GraphDestroy",
        "GraphLaunch", "GraphLaunch", "GraphLaunch", "GraphExecDestroy",
    ]  # fmt: skip


def test_a_cuda_graph_that_fails_says_why_and_leaves_the_stream_usable() -> None:
    for name in ("cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"):
        driver = Driver12(name)
        with pytest.raises(BackendError, match="CUDA graph: operation not permitted"):
            Graph(driver, 1, lambda: None)
        assert (
            driver.calls.count("StreamBeginCapture_v2") == driver.calls.count("StreamEndCapture")
        ) or "Begin" in name
    driver = Driver12()
    with pytest.raises(ZeroDivisionError):
        Graph(driver, 1, lambda: [1 // 0][0])  # type: ignore[arg-type, return-value]
    assert driver.calls == ["StreamBeginCapture_v2", "StreamEndCapture"]


def test_nothing_is_replayed_after_the_end(gpu: Any) -> None:
    driver, executable = opened(gpu)
    for _ in range(3):
        driver.step([(0, [1])])
    executable.close()
    assert not executable.replays._recorded
    with pytest.raises(BackendError, match="closed"):
        driver.step([(0, [1])])
