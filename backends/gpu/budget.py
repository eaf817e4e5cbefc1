"""Computes the memory that a program will need on a device, and measures the device's copy bandwidth."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from localllm.backends.base import BackendError, CacheTypes, Limits, Memory, cache_reads
from localllm.backends.gpu import formats
from localllm.backends.gpu.cachetypes import block_bytes
from localllm.backends.gpu.device import LESS_MEMORY, Device
from localllm.backends.gpu.program import Program
from localllm.base.notices import Notice
from localllm.plan import Plan


def memory_of(program: Program, plan: Plan, limits: Limits, cache: CacheTypes) -> Memory:
    """Compute the memory of a program, before anything is allocated."""
    matrices = sum(formats.size_of(weight) for weight in program.matrices.values())
    vectors = sum(4 * int(np.prod(weight.shape)) for weight in program.vectors.values())
    of_block = block_bytes(plan, cache)
    ropes = sum(4 * limits.positions * rope.n_rot for rope in program.ropes)
    shares = dict.fromkeys(program.matrices, 0.0)
    for read in plan.reads:
        if read.weight.name in shares:  # an embedding table that is also the output matrix is read completely, once
            shares[read.weight.name] = max(shares[read.weight.name], read.used / read.of)
    read_bytes = sum(formats.size_of(program.matrices[name]) * share for name, share in shares.items())
    return Memory(
        weights=matrices + vectors,
        cache=sum(limits.blocks_of(layer) * size for layer, size in zip(plan.layers, of_block, strict=True)),
        scratch=program.scratch_bytes(limits) + ropes,
        weights_per_token=int(read_bytes) + vectors,
        **cache_reads(plan.layers, of_block, limits),
    )


def must_fit(device: Device, memory: Memory) -> None:
    needed, free = memory.weights + memory.cache + memory.scratch, device.facts.free
    if needed > free:
        sizes = f"weights {memory.weights / 2**30:.2f}, cache {memory.cache / 2**30:.2f}"
        counts = f"{needed / 2**30:.2f} GiB are needed ({sizes}), {free / 2**30:.2f} are free"
        raise BackendError(Notice(f"{device.facts.name}: {counts}; ", LESS_MEMORY))


def copy_bandwidth(device: Device, size: int) -> float:
    """Measure a copy within device memory in bytes per second, counting reads and writes.

    Return the highest bandwidth of several runs.
    """
    size = max(1 << 20, min(size, 256 << 20))
    buffers = [device.alloc(size, "a measurement of bandwidth") for _ in range(2)]
    try:
        best, start = 0.0, perf_counter()
        for _ in range(5):
            seconds = device.seconds(lambda: device.copy(buffers[0], 0, buffers[1], 0, size))
            best = max(best, 2 * size / max(seconds, 1e-9))
            if perf_counter() - start > 0.2:
                break
    finally:
        for buffer in buffers:
            device.free(buffer)
    return best
