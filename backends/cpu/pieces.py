"""Divides the kernel calls of a stage into pieces of few rows, between which a slice of time may end.

A piece of a row-wise kernel is the share of a few of many threads. A piece of a product has arguments that begin at
other rows. The cost of a piece is counted from the sizes of its rows, so all pieces are short, also the first ones,
whose memory the system has to provide. Other kernels have short tasks, except `group`, which sorts the experts of a
step's rows in one thread. No result depends on the division.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.backends.cpu.arguments import SLOT
from localllm.backends.cpu.arguments import Rows as RowsOf
from localllm.backends.cpu.kernels.executor import Entry
from localllm.backends.cpu.kernels.linear import LinearArguments
from localllm.backends.cpu.memory import address
from localllm.backends.cpu.places import BufferOf, ListOf
from localllm.backends.cpu.program import KernelCall
from localllm.plan import Rows

BYTES = 1 << 20  # of the rows that a thread reads and writes in a piece of a row-wise kernel
PRODUCTS = 1 << 26  # multiplications of a task of a product, which take about two milliseconds in float32
WRITTEN = 4 << 20  # bytes of the rows that a piece of a product writes: its first task touches all of their pages
LEAST_ROWS = 64  # of a piece of a product, whose tasks read and unpack the weights once per piece


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a stage in order, as entries of a plan, and which call of the stage each belongs to."""

    entries: NDArray[np.int64]  # (pieces, Entry.size)
    calls: NDArray[np.intp]  # (pieces,)
    arguments: Sequence[NDArray[np.int64]]  # memory that entries point to


def divided(
    calls: Sequence[KernelCall],
    entries: NDArray[np.int64],
    arguments: Sequence[NDArray[np.int64]],
    counts: Mapping[Rows, int],
    threads: int,
) -> Pieces:
    """Return the pieces of the calls. `counts` are the rows of the step."""
    found, kept = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    for call, entry, packed in zip(calls, entries, arguments, strict=True):
        if call.products:
            own, memory = _of_product(call, entry, packed)
            kept += memory
        else:
            number = row_pieces(call, counts, threads)
            own = np.repeat(entry[None], number, axis=0)
            own[:, Entry.piece], own[:, Entry.pieces] = np.arange(number), number
        own[:, Entry.barrier] = 1  # each entry is a batch
        found.append(own)
    lengths = [len(own) for own in found]
    return Pieces(np.concatenate([entries[:0], *found]), np.repeat(np.arange(len(found)), lengths), kept)


def row_pieces(call: KernelCall, counts: Mapping[Rows, int], threads: int) -> int:
    """Return the number of pieces of a call that divides rows between the threads; 1 for other calls."""
    if call.domain == "tasks":
        return 1
    places, of = call.reads | call.writes, call.domain
    # A list may be scratch memory of each thread. In the domain "select" it is only read, except by `group`.
    if any(isinstance(place, ListOf) for place in (call.writes if of == "select" else places)):
        return 1
    rows = counts["batch" if of == "select" else of]
    buffers = [place.buffer for place in places if isinstance(place, BufferOf)]
    needed = -(-rows * sum(buffer.stride * buffer.times for buffer in buffers) // (threads * BYTES))
    return max(1, min(needed, -(-rows // threads)))


def product_pieces(products: int, row_bytes: int, rows: int) -> int:
    """Return the number of pieces of a product. A task has `products` multiplications per row."""
    needed = max(-(-rows * products // PRODUCTS), -(-rows * row_bytes // WRITTEN))
    return max(1, min(needed, rows // LEAST_ROWS))


def _of_product(
    call: KernelCall, entry: NDArray[np.int64], packed: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return the entries of a product, and the memory that they point to."""
    of = LinearArguments
    rows = _read(int(packed[of.slot("rows")]))
    number = product_pieces(call.products, int(packed[of.slot("y") + RowsOf.stride]), rows)
    borders = np.arange(number + 1) * rows // number
    arguments, counts = np.repeat(packed[None], number, axis=0), np.diff(borders)
    for name in ("x", "y", "residual"):
        at = of.slot(name)
        if packed[at]:  # a residual may be absent
            arguments[:, at + RowsOf.address] += borders[:-1] * packed[at + RowsOf.stride]
    arguments[:, of.slot("rows")] = address(counts) + SLOT * np.arange(number)
    entries = np.repeat(entry[None], number, axis=0)
    entries[:, Entry.arguments] = address(arguments) + SLOT * of.size * np.arange(number)
    return entries, [arguments, counts]


def _read(at: int) -> int:
    """Return the number at an address."""
    return ctypes.c_int64.from_address(at).value
