"""The two limits of the processor for `localllm doctor`: memory bandwidth and int8 multiplication.

Each limit is the best of several short measurements. If other programs run at the same time, the values are too low;
remarks report this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time

from localllm.backends.base import BackendError
from localllm.base.machine.memory import SystemMemory
from localllm.base.machine.processor import usable_threads
from localllm.cli.flags import typed

READ = 256 << 20  # bytes read per pass, if memory permits: several times the size of any CPU cache
PASSES = 9
SECONDS = 0.02  # duration of one measurement of products
FIRST_TURNS = 1 << 12
FIRST_PASSES = 8  # passes for a first estimate; the fastest counts, since interruptions slow some passes a lot
STEADY = 1.25  # maximum ratio of the best measurement to the median
OURS = 0.9  # minimum share of the time in which the measuring threads were running
LOAD = 0.5  # maximum number of runnable programs before the measurement


@dataclass(frozen=True, slots=True)
class Speed:
    """Bandwidth and operations per second with all threads. A limit that could not be measured is 0, with a remark."""

    threads: int
    read_bytes: float
    byte_operations: float
    remarks: tuple[str, ...]  # why the values may be too low


def measure_speed(main: SystemMemory) -> Speed:
    """Measure the memory bandwidth and int8 operations per second, which takes about half a second."""
    from localllm.backends.cpu.backend import CpuBackend
    from localllm.backends.cpu.memory import Arena
    from localllm.backends.cpu.roofs import product_rates, read_rates

    busy = load_remark()
    try:
        backend = CpuBackend(usable_threads())
    except BackendError as error:
        return Speed(0, 0.0, 0.0, (typed(error),))
    try:
        library, pool = backend.library, backend.pool
        arena = Arena(max(1 << 20, min(READ, main.free // 8 or READ)), "a measurement of bandwidth")
        at = arena.take(arena.size)
        arena.view(at, arena.size)[:] = 1  # write every page, since unwritten pages all map to one cached zero page
        reading = _watch(pool.threads, lambda: read_rates(library, pool, at, arena.size, PASSES))
        rate = max(product_rates(library, pool, FIRST_TURNS, FIRST_PASSES))
        per_turn = product_operations(pool.threads)
        turns = max(FIRST_TURNS, int(SECONDS * rate / per_turn))
        multiplying = _watch(pool.threads, lambda: product_rates(library, pool, turns, PASSES))
    except BackendError as error:
        return Speed(backend.pool.threads, 0.0, 0.0, (typed(error),))
    finally:
        backend.close()
    remarks = (busy, *_doubts("reading", reading), *_doubts("multiplying", multiplying))
    return Speed(pool.threads, max(reading.rates), max(multiplying.rates), tuple(each for each in remarks if each))


def product_operations(threads: int) -> int:
    """Return the number of int8 operations that all threads execute in one iteration of `product_rates`."""
    from localllm.backends.cpu.kernels.peak import OPERATIONS

    return threads * OPERATIONS


@dataclass(frozen=True, slots=True)
class WatchedSpeed:
    """The results of some measurements, and the share of the time in which each thread was running."""

    rates: list[float]
    ours: float


def _watch(threads: int, measure: Callable[[], list[float]]) -> WatchedSpeed:
    began, worked = perf_counter(), process_time()
    rates = measure()
    return WatchedSpeed(rates, (process_time() - worked) / ((perf_counter() - began) * threads))


def _doubts(what: str, watched: WatchedSpeed) -> list[str]:
    """Return the reasons why a measurement may be too low."""
    found = []
    if watched.ours < OURS:
        found.append(f"while {what}, other programs took {1 - watched.ours:.0%} of the processors")
    spread = max(watched.rates) / median(watched.rates)
    if spread > STEADY:
        found.append(f"{what} was {spread:.1f} times as fast in the best pass as in the middle one")
    return found


def load_remark(limit: float = LOAD) -> str:
    """Return a remark if other programs are running, judging by the load average over a minute."""
    try:
        waiting = os.getloadavg()[0]
    except (AttributeError, OSError):
        return ""
    return f"the 1-minute load average was {waiting:.1f}" if waiting > limit else ""
