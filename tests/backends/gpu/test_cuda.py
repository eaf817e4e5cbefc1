"""The whole CUDA backend on an emulated GPU (`fake_cuda`): memory, copies, launches, graphs, error cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.backends.base import BackendError
from localllm.backends.cuda.backend import CudaBackend
from localllm.backends.cuda.nvrtc import Nvrtc
from tests.backends.attending import Heads
from tests.backends.gpu import fake_cuda
from tests.backends.gpu.emulation import COMPILER, WHY_NOT, EmulatedBackend
from tests.backends.gpu.fake_cuda import Card
from tests.backends.gpu.small import PLANS, attended, check
from tests.backends.support import bind, record
from tests.models.support import Driver

needs_compiler = pytest.mark.skipif(COMPILER is None, reason=WHY_NOT)
SMALL = attended(Heads(2, 1, 8))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Card:
    return fake_cuda.install(monkeypatch, folder)


@needs_compiler
def test_plans(card: Card) -> None:
    """The small plans give the reference backend's results, although queued copies and launches run only at
    synchronization.
    """
    backend = CudaBackend("emulated", cache=None)
    assert backend.describe() == "cuda: Emulated card (sm_90), 2.0 GiB"
    assert backend.device.facts.api == "CUDA driver 13.0, NVRTC 13.0"
    assert backend.free_memory() == fake_cuda.FREE
    for small in (SMALL, *PLANS["rows"], *PLANS["experts"]):
        check(backend, small)
    assert not card.memory  # everything was freed
    assert backend.device.seconds(lambda: None) == 2.5e-3
    backend.close()
    assert not card.contexts


@needs_compiler
def test_decoding_is_one_launch_of_a_graph(card: Card) -> None:
    """The second step of a shape captures a graph without running it. Later steps launch the graph, with the
    same bits.
    """
    plan, rows = record(SMALL.table, SMALL.build), []
    backend = CudaBackend(cache=None)
    driver, graphs = Driver(bind(backend, plan, 20, 1)), []
    for token in (3, 5, 7, 9):
        rows.append(driver.step([(0, [token])]))
        graphs.append(len(card.graphs))
    assert graphs == [0, 2, 2, 2]  # a captured graph and its executable instance
    plain = Driver(bind(EmulatedBackend(card.folder), plan, 20, 1))
    np.testing.assert_array_equal(rows, [plain.step([(0, [token])]) for token in (3, 5, 7, 9)])
    backend.close()
    assert card.graphs == [None, None]


@needs_compiler
def test_cache_blocks_move(card: Card) -> None:
    backend = CudaBackend(cache=None)
    driver = Driver(bind(backend, record(SMALL.table, SMALL.build), 20, 4))
    driver.step([(0, np.arange(20))])
    executable, first, second, third = driver.executable, *np.arange(3)[:, None]
    content = executable.read_blocks(0, first)
    assert content.any()
    executable.write_blocks(0, second, content)
    executable.write_blocks(0, first, 0 * content)
    executable.copy_blocks(second, third)
    np.testing.assert_array_equal(executable.read_blocks(0, np.array([1, 2])), np.repeat(content, 2, axis=0))
    backend.close()


@needs_compiler
def test_what_the_driver_refuses_is_said(card: Card) -> None:
    backend = CudaBackend(cache=None)
    plan = record(SMALL.table, SMALL.build)
    card.most = 4096
    with pytest.raises(BackendError, match=r"^Emulated card: out of memory at .* GiB for .*; use fewer layers on it"):
        bind(backend, plan, 20, 1)
    assert not card.memory
    card.most = fake_cuda.TOTAL
    driver = Driver(bind(backend, plan, 20, 1))
    driver.step([(0, [1])])
    card.contexts = 0
    with pytest.raises(BackendError, match="Emulated card: invalid device context at a step"):
        driver.step([(0, [1])])
    card.contexts = 1
    backend.close()
    with pytest.raises(BackendError, match="cuda has no such device; cuda0 is Emulated card"):
        CudaBackend(1, cache=None)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_89", "sm_90"])
def test_nvrtc(architecture: str) -> None:
    """NVRTC turns a kernel into a cubin, and reports its error message for invalid CUDA.

    benchmarks/gpu_compile.py compiles every kernel.
    """
    try:
        nvrtc = Nvrtc()
    except BackendError as error:
        pytest.skip(str(error))
    made = nvrtc.compile('extern "C" __global__ void f(float *x) { x[threadIdx.x] *= 2.0f; }', "f", architecture)
    assert made.cubin[:4] == b"\x7fELF"
    assert 0 < made.registers < 32
    assert (made.spilled, made.stack) == (0, 0)
    with pytest.raises(BackendError, match=f"{architecture}: it refuses broken: .*expected"):
        nvrtc.compile('extern "C" __global__ void broken() { int }', "broken", architecture)
