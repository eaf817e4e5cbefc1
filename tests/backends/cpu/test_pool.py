"""Worker threads: waking and sleeping, more threads than cores, interrupts at any moment, closing, and
garbage collection.
"""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from localllm.backends.base import BackendError, Executable
from localllm.backends.cpu import pool
from localllm.backends.cpu.adaptive import AdaptiveThreads
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.kernels import executor
from localllm.plan import Recorder, Value
from tests.backends.support import bind, feed, record
from tests.models.support import MemoryWeight

WIDTH = 32
TABLE = MemoryWeight.of("table", np.random.RandomState(0).standard_normal((11, WIDTH)))
MATRIX = MemoryWeight.of("w", np.random.RandomState(1).standard_normal((WIDTH, WIDTH)) / 6)
TOKENS = np.arange(8)


def chain(length: int = 6) -> Executable | object:
    """Build a chain of products, each with the previous result as its input, with a barrier after each."""

    def build(r: Recorder, x: Value) -> Value:
        for _ in range(length):
            x = r.linear(x, MATRIX)
        return x

    return record(TABLE, build)


def expected(length: int = 6) -> np.ndarray:
    x = TABLE.values()[TOKENS].astype(np.float64)
    for _ in range(length):
        x = x @ MATRIX.values().astype(np.float64).T
    return x


def right(logits: np.ndarray, length: int = 6) -> bool:
    return np.allclose(logits, expected(length), rtol=1e-4, atol=1e-5)


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("localllm-cpu")]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_many_small_steps(threads: int) -> None:
    backend = CpuBackend(threads)
    executable = bind(backend, chain())
    first = feed(executable, TOKENS)
    assert right(first)
    for _ in range(100 if threads <= 2 else 20):
        assert (feed(executable, TOKENS) == first).all()
    backend.close()


@pytest.mark.parametrize("nap", [0.0, 0.002, 0.02])
def test_workers_that_fell_asleep_wake_up(monkeypatch: pytest.MonkeyPatch, nap: float) -> None:
    """Pauses between steps are shorter than, close to and longer than a worker's spin time, which is reduced
    to make the middle case likely.
    """
    monkeypatch.setattr(pool, "IDLE_SPINS", 2000)
    backend = CpuBackend(2)
    executable = bind(backend, chain())
    for _ in range(20):
        time.sleep(nap)
        assert right(feed(executable, TOKENS))
    backend.close()


LONG = 1 << 19
WIDE = MemoryWeight.of("wide", np.random.RandomState(2).standard_normal((11, LONG)))
ONE_PANEL = MemoryWeight.of("narrow", np.random.RandomState(3).standard_normal((8, LONG)) / LONG)


def voluntary(thread: int) -> int:
    """Return the number of voluntary context switches of a thread of this process."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)
    assert found
    return int(found[1])


@pytest.mark.skipif(sys.platform != "linux", reason="threads sleep by futexes, and /proc counts")
def test_a_thread_that_waits_long_at_a_barrier_sleeps(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One thread computes a product of few rows for four milliseconds, while the other waits at the barrier.

    Threads spin for 20 to 600 microseconds, depending on the machine, before they sleep. So the wait is long enough.
    """
    monkeypatch.setattr(pool, "IDLE_SPINS", 1 << 40)  # workers sleep only at barriers
    plan = record(WIDE, lambda r, x: r.linear(x, ONE_PANEL))
    backend = CpuBackend(2)
    request.addfinalizer(backend.close)  # stop the worker even if the test fails, because it never sleeps
    [worker] = [thread for thread in ours() if thread in backend.pool._workers]
    assert worker.native_id is not None
    mine = threading.get_native_id()

    def run(spins: int) -> tuple[np.ndarray, int, int]:
        backend.pool.spins = spins
        slept, switched = backend.pool.slept, voluntary(worker.native_id) + voluntary(mine)
        logits = [feed(executable, TOKENS) for _ in range(10)]
        assert all((each == logits[0]).all() for each in logits)
        switched = voluntary(worker.native_id) + voluntary(mine) - switched
        return logits[0], backend.pool.slept - slept, switched

    executable = bind(backend, plan)
    monkeypatch.setattr(AdaptiveThreads, "observe", lambda *given: None)  # every step runs on both threads
    feed(executable, TOKENS)
    spinning, never, _ = run(1 << 40)
    assert never == 0
    sleeping, often, switched = run(executor.SPINS)
    assert often >= 8
    assert switched >= often - 2  # a sleep that is cancelled before it starts does not count
    assert (sleeping == spinning).all()
    expected = WIDE.values()[TOKENS].astype(np.float64) @ ONE_PANEL.values().astype(np.float64).T
    assert np.allclose(sleeping, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("spins", [1, 30])
def test_threads_that_sleep_at_every_barrier_all_wake_up(threads: int, spins: int) -> None:
    """A wake-up is never lost between the decision to sleep and the sleep. After thousands of barriers, no thread is
    left asleep.
    """
    backend = CpuBackend(threads)
    backend.pool.spins = spins
    executable = bind(backend, chain(40))
    first = feed(executable, TOKENS)
    for _ in range(40):
        assert (feed(executable, TOKENS) == first).all()
    assert np.allclose(first, expected(40), rtol=1e-3, atol=1e-5)
    if sys.platform == "linux":
        assert backend.pool.slept  # how many threads slept depends on the system load
    backend.close()


def test_idle_workers_use_no_processor(cpu: CpuBackend) -> None:
    feed(bind(cpu, chain()), TOKENS)
    time.sleep(0.3)  # much longer than the 10 ms for which a worker spins
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_two_executables_in_turn(cpu: CpuBackend) -> None:
    short, long = bind(cpu, chain(2)), bind(cpu, chain(9))
    for _ in range(20):
        assert right(feed(short, TOKENS), 2)
        assert right(feed(long, TOKENS), 9)


def test_two_python_threads_on_one_backend(cpu: CpuBackend) -> None:
    """Each Python thread has its own executable. Their batches run one after another."""
    wrong: list[int] = []

    def work(length: int) -> None:
        executable = bind(cpu, chain(length))
        wrong.extend(length for _ in range(30) if not right(feed(executable, TOKENS), length))

    workers = [threading.Thread(target=work, args=(length,)) for length in (3, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert not wrong
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timer")
def test_an_interrupt_at_any_moment_leaves_the_backend_usable() -> None:
    """Ctrl-C raises between any two bytecode instructions: before, within and after a batch."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    backend = CpuBackend(2)
    executable = bind(backend, chain(2))
    truth = feed(executable, TOKENS)
    random = np.random.RandomState(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-5, 1e-3))
                while True:
                    feed(executable, TOKENS[:2])
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert (feed(executable, TOKENS) == truth).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    backend.close()


def test_close_ends_the_threads_and_twice_is_once() -> None:
    before = len(ours())
    backend = CpuBackend(4)
    assert len(ours()) == before + 3
    executable = bind(backend, chain())
    logits = feed(executable, TOKENS)
    backend.close()
    backend.close()
    assert len(ours()) == before
    assert right(logits)
    with pytest.raises(BackendError, match="the cpu backend is closed"):
        feed(executable, TOKENS)


def test_a_closed_executable_says_so_and_its_logits_stay(cpu: CpuBackend) -> None:
    executable = bind(cpu, chain())
    logits = feed(executable, TOKENS)
    executable.close()
    executable.close()
    assert right(logits)
    with pytest.raises(BackendError, match="closed"):
        feed(executable, TOKENS)
    with pytest.raises(BackendError, match="closed"):
        executable.copy_blocks(np.array([0]), np.array([1]))
    with pytest.raises(BackendError, match="closed"):
        executable.read_bandwidth()


def test_a_forgotten_backend_ends_its_threads() -> None:
    """The last reference to the backend is dropped right after a step, while its workers still run compiled code.

    The threads end only when the last executable is gone.
    """
    before = set(ours())  # threads of other tests may end meanwhile
    for _ in range(10):
        backend = CpuBackend(2)
        executable = bind(backend, chain(1))
        del backend
        gc.collect()
        assert right(feed(executable, TOKENS), 1)
        del executable
        gc.collect()
        assert not set(ours()) - before


def test_a_program_that_closes_nothing_ends_well() -> None:
    script = (
        "from tests.backends.cpu.test_pool import *\n"
        "backend = CpuBackend(3)\n"
        "assert right(feed(bind(backend, chain()), TOKENS))\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3], capture_output=True, timeout=120, check=False
    )
    assert (child.returncode, child.stderr) == (0, b"")


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_a_number_of_threads_that_makes_no_sense(threads: int) -> None:
    with pytest.raises(BackendError, match=f"threads is {threads}; give a number from 1 to 1024"):
        CpuBackend(threads)


def test_bandwidth_is_plausible_and_needs_weights(cpu: CpuBackend) -> None:
    """The measured bandwidth is between disk bandwidth and register bandwidth. The bandwidth is unknown if
    the weights are too small to measure.
    """
    big, table = MemoryWeight.of("w", np.zeros((8192, 256))), MemoryWeight.of("t", np.zeros((2, 256)))
    assert 1e8 < bind(cpu, record(table, lambda r, x: r.linear(x, big))).read_bandwidth() < 2e12
    assert bind(cpu, chain()).read_bandwidth() == 0.0


def test_too_many_threads_for_the_memory_are_an_error_that_says_so() -> None:
    """The threads that did start have ended, so the backend can open again with fewer threads."""
    script = (
        "import resource, threading\n"
        "from localllm.backends.base import BackendError\n"
        "from localllm.backends.cpu.backend import CpuBackend\n"
        "CpuBackend(1).close()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "limits = resource.getrlimit(resource.RLIMIT_AS)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (500 << 20), limits[1]))\n"
        "try: CpuBackend(1024)\n"
        "except BackendError as error: print(error)\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "CpuBackend(3).close()\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert re.fullmatch(r"only \d+ of 1024 threads can be started; give fewer \(threads\)\n", child.stdout)
