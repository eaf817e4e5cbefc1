"""The number of threads follows the load of the machine, which is simulated here, and never changes a result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from localllm.backends.cpu.adaptive import AdaptiveThreads
from localllm.backends.cpu.backend import CpuBackend, CpuExecutable
from tests.backends.cpu.test_pool import TOKENS, chain, right
from tests.backends.support import bind, feed


@dataclass
class Machine:
    """A computer on which a step of one thread takes `work` seconds, if its core runs no other program.

    A thread on a busy core gets less than half of it, and the others wait for it at every barrier. `barriers` is the
    time that threads need to meet, in seconds per step.
    """

    cores: int
    work: float
    barriers: float = 0.0
    busy: int = 0
    now: float = 0.0
    chosen: AdaptiveThreads = field(init=False)

    def __post_init__(self) -> None:
        self.chosen = AdaptiveThreads(self.cores, lambda: self.now)

    def seconds(self, threads: int) -> tuple[float, float]:
        """Return the duration of a step, and the share of it that threads wait too long."""
        seconds = self.work / threads + self.barriers * (threads > 1)
        late = threads > self.cores - self.busy and threads > 1
        return (2.2 * seconds, 0.5) if late else (seconds, 0.0)

    def run(self, seconds: float) -> float:
        """Run steps for `seconds`. Return the duration of a step on average."""
        began, steps = self.now, 0
        while self.now < began + seconds:
            took, late = self.seconds(self.chosen.threads)
            self.now += took
            steps += 1
            self.chosen.observe("step", took, late)
        return (self.now - began) / steps

    def best(self) -> float:
        return min(self.seconds(threads)[0] for threads in range(1, self.cores + 1))


@pytest.mark.parametrize("work", [0.0005, 0.003, 0.1, 2.0])
@pytest.mark.parametrize("cores", [2, 16])
def test_an_idle_machine_keeps_all_its_threads(cores: int, work: float) -> None:
    machine = Machine(cores, work)
    assert machine.run(60) < 1.01 * machine.best()
    assert machine.chosen.threads == cores


@pytest.mark.parametrize("work", [0.0005, 0.003, 0.1])
@pytest.mark.parametrize(("cores", "busy"), [(2, 1), (2, 2), (4, 1), (16, 1), (16, 5)])
def test_fewer_threads_leave_busy_cores_alone(cores: int, busy: int, work: float) -> None:
    machine = Machine(cores, work, busy=busy)
    machine.run(2)
    assert machine.run(20) < 1.15 * machine.best()


@pytest.mark.parametrize("work", [0.0003, 0.004])
@pytest.mark.parametrize(("cores", "busy"), [(2, 1), (16, 5)])
def test_all_threads_come_back(cores: int, busy: int, work: float) -> None:
    machine = Machine(cores, work, busy=busy)
    machine.run(10)
    assert machine.chosen.threads == cores - busy
    machine.busy = 0
    machine.run(6)
    assert machine.run(10) < 1.02 * machine.best()


def test_steps_too_short_for_barriers_run_on_one_thread() -> None:
    """On an idle machine, without a thread that is late."""
    machine = Machine(2, 0.00015, barriers=0.0001)
    machine.run(1)
    assert machine.run(20) < 1.02 * machine.best()
    assert machine.chosen.threads == 1


def test_growing_steps_are_not_taken_for_a_busy_machine() -> None:
    """A context grows, and with it the time of a step, by a third in ten seconds."""
    machine = Machine(2, 0.02)
    for _ in range(100):
        machine.run(0.1)
        machine.work *= 1.003
        assert machine.chosen.threads == 2


# -- real threads ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[2, 3, 8])
def pool_threads(request: pytest.FixtureRequest) -> Iterator[tuple[CpuBackend, CpuExecutable]]:
    backend = CpuBackend(request.param)
    backend.pool.spins = 30  # threads sleep at most barriers
    executable = bind(backend, chain(12))  # type: ignore[arg-type]
    assert isinstance(executable, CpuExecutable)
    yield backend, executable
    backend.close()


def test_any_order_of_thread_counts_gives_the_same_bits(pool_threads: tuple[CpuBackend, CpuExecutable]) -> None:
    """Also with more threads than cores, and if a thread sat out many batches."""
    backend, executable = pool_threads
    first = feed(executable, TOKENS)
    assert right(first, 12)
    random, threads = np.random.RandomState(0), backend.pool.threads
    for _ in range(150):
        executable.result()[:] = 0
        backend.pool.run(executable.entries, executable._storage.counters, random.randint(1, threads + 1))
        assert (executable.result()[: len(TOKENS)] == first[-len(TOKENS) :]).all()


def test_threads_that_sit_out_sleep(pool_threads: tuple[CpuBackend, CpuExecutable]) -> None:
    backend, executable = pool_threads
    feed(executable, TOKENS)
    deadline = time.monotonic() + 30
    while not all(backend.pool._asleep[1:]):
        assert time.monotonic() < deadline
        backend.pool.run(executable.entries, executable._storage.counters, 1)
        time.sleep(0.001)
    for _ in range(20):
        backend.pool.run(executable.entries, executable._storage.counters, 1)
    assert all(backend.pool._asleep[1:])


def test_a_step_runs_on_as_many_threads_as_chosen(cpu: CpuBackend) -> None:
    """The executable chooses separately for steps of few rows and of many."""
    executable = bind(cpu, chain())  # type: ignore[arg-type]
    assert isinstance(executable, CpuExecutable)
    used: list[int] = []
    run = cpu.pool.run
    few, many = executable.thread_counts
    few.threads, many.threads = 1, 2
    few.observe = many.observe = lambda *given: used.append(given[0][1])  # type: ignore[method-assign]
    cpu.pool.run = lambda entries, counters, threads=0: (used.append(-threads), run(entries, counters, threads))[1]  # type: ignore[method-assign, func-returns-value]
    try:
        assert right(feed(executable, TOKENS))
        feed(executable, np.resize(TOKENS, 40))
    finally:
        del cpu.pool.run
    assert used == [-1, 8, -2, 40]
