"""What a program takes on a device, before anything is allocated, and how fast the device copies."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from backends.base import BackendError, CacheTypes, Limits, Memory, cache_reads
from backends.gpu import formats
from backends.gpu.cachetypes import block_bytes
from backends.gpu.device import Device
from backends.gpu.program import Program
from plan import Embed, Experts, Plan


def memory_of(program: Program, plan: Plan, limits: Limits, cache: CacheTypes) -> Memory:
    """What a program takes on a device, before anything is allocated."""
    matrices = sum(formats.size_of(weight) for weight in program.matrices.values())
    vectors = sum(4 * int(np.prod(weight.shape)) for weight in program.vectors.values())
    of_block = block_bytes(plan, cache)
    ropes = sum(4 * limits.positions * rope.n_rot for rope in program.ropes)
    read = {w.name: float(formats.size_of(w)) for w in program.matrices.values()}
    for op in plan.operations:
        if isinstance(op, Experts):
            for stack in (op.gate, op.up, op.down):
                read[stack.weight.name] *= op.used / op.router.width
    tables = {op.table.name: op.table for op in plan.operations if isinstance(op, Embed)}
    linear = {op.weight.name for op in plan.operations if not isinstance(op, Embed) and hasattr(op, "weight")}
    for name, table in tables.items():  # a row of it, unless it is the output matrix too
        if name not in linear:
            read[name] = formats.size_of(table) / table.shape[0]
    return Memory(
        weights=matrices + vectors,
        cache=sum(limits.blocks_of(layer) * size for layer, size in zip(plan.layers, of_block, strict=True)),
        scratch=program.scratch(limits) + ropes,
        weights_per_token=int(sum(read.values())) + vectors,
        **cache_reads(plan.layers, of_block),
    )


def must_fit(device: Device, memory: Memory) -> None:
    needed, free = memory.weights + memory.cache + memory.scratch, device.facts.free
    if needed > free:
        sizes = f"weights {memory.weights / 2**30:.2f}, cache {memory.cache / 2**30:.2f}"
        raise BackendError(
            f"{device.facts.name}: {needed / 2**30:.2f} GiB are needed ({sizes}), {free / 2**30:.2f} are free; "
            "use fewer layers on it (-ngl N), a smaller context (-c N) or a smaller model"
        )


def copy_bandwidth(device: Device, size: int) -> float:
    """Bytes a second, read and written, of a copy within the device's memory; the best of some."""
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
