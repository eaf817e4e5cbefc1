"""Measures the two roofline limits of a processor on the threads of a pool: memory bandwidth, and int8 products."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localllm.backends.cpu.jit import Library
from localllm.backends.cpu.kernels import bandwidth, peak
from localllm.backends.cpu.kernels.executor import Entry
from localllm.backends.cpu.memory import address
from localllm.backends.cpu.pool import ThreadPool


def read_rates(library: Library, pool: ThreadPool, start: int, size: int, passes: int) -> list[float]:
    """Return the bytes per second of each pass over the `size` bytes at `start`, or [] if `size` is too small."""
    if size < bandwidth.LEAST:
        return []
    piece = min(bandwidth.PIECE, size // bandwidth.STEP * bandwidth.STEP)
    pieces = size // piece
    counters, sink = np.zeros((pool.threads, 8), np.int64), np.zeros(8 * pool.threads, np.int64)
    arguments = bandwidth.ReadArguments(
        start=start, pieces=pieces, piece=piece, counter=address(counters), sink=address(sink)
    ).pack()
    library.load([bandwidth.read_memory()])
    read = Entry.whole(library.address("read"), address(arguments))
    return [pieces * piece / seconds for seconds, _ in _timed(pool, read, counters, passes)]


def product_rates(library: Library, pool: ThreadPool, turns: int, passes: int) -> list[float]:
    """Return the throughput of each pass of int8 multiply-adds in operations per second.

    Each thread runs `turns` iterations.
    """
    return [operations for operations, _ in clocked_products(library, pool, turns, passes)]


def clocked_products(library: Library, pool: ThreadPool, turns: int, passes: int) -> list[tuple[float, float]]:
    """Return the operations per second of each pass, and the frequency of the clock that times plans."""
    library.load([peak.byte_products()])
    data = np.ones(peak.OPERANDS, np.uint8)
    sink, counters = np.zeros(peak.SINK * pool.threads, np.uint8), np.zeros((1, 8), np.int64)
    arguments = peak.PeakArguments(data=address(data), turns=turns, sink=address(sink)).pack()
    code = library.address("byte_products")
    multiply = Entry.whole(code, address(arguments))
    operations = pool.threads * turns * peak.OPERATIONS
    return [(operations / seconds, cycles / seconds) for seconds, cycles in _timed(pool, multiply, counters, passes)]


def _timed(
    pool: ThreadPool, entry: NDArray[np.int64], counters: NDArray[np.int64], passes: int
) -> list[tuple[float, int]]:
    """Return the seconds and the clock cycles of each pass."""
    entries, times = entry[None], []
    for _ in range(passes):
        entries[0, Entry.ticks] = 0
        start = perf_counter()
        pool.run(entries, counters)
        times.append((max(perf_counter() - start, 1e-9), int(entries[0, Entry.ticks])))
    return times
