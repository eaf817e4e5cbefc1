"""Computes the memory of a bound plan without reading weights. Binding and `localllm show` use the same calculation."""

from __future__ import annotations

import math

from localllm.backends.base import CacheTypes, Limits, Memory, cache_reads
from localllm.backends.cpu import bind, weights
from localllm.backends.cpu.cache_layout import cache_bytes
from localllm.backends.cpu.isa import host
from localllm.backends.cpu.memory import aligned
from localllm.backends.cpu.places import (
    ColumnsOf,
    EdgedOf,
    ExpertVectorsOf,
    ListOf,
    RopeOf,
    ScoresOf,
    VectorOf,
    WorkOf,
)
from localllm.backends.cpu.program import Program
from localllm.backends.cpu.sharing import Sharing
from localllm.backends.cpu.stores import store_bytes
from localllm.plan import CacheLayer, Embed, Plan


def plan_memory(plan: Plan, limits: Limits, threads: int, cache: CacheTypes) -> Memory:
    """Return the memory that a plan will need. Raises BackendError if the plan cannot be bound."""
    return memory(plan, bind.program(plan, limits, threads, host(), cache), limits, threads, cache)


def step_memory(plan: Plan, limits: Limits, threads: int, cache: CacheTypes) -> int:
    """Return the bytes that a step within these limits uses besides weights, cache and tables."""
    return _step_bytes(bind.program(plan, limits, threads, host(), cache), limits, threads)


def memory(plan: Plan, program: Program, limits: Limits, threads: int, cache: CacheTypes) -> Memory:
    panels, blocks = program.panels, block_bytes(plan, cache)
    vectors = ropes = 0
    for place in program.places:
        match place:
            case VectorOf(weight, lanes):
                vectors += 4 * weights.padded(math.prod(weight.shape), lanes)
            case ColumnsOf(weight, lanes):
                vectors += 4 * weight.shape[1] * (-(-weight.shape[0] // lanes) * lanes)
            case ExpertVectorsOf(weight, width):
                vectors += 4 * weight.shape[0] * width
            case EdgedOf(weight, more):
                vectors += 4 * weight.shape[0] * (weight.shape[1] + 2 * more)
            case RopeOf(rope):
                ropes += limits.positions * 8 * (rope.n_rot // 2)
    counted = [limits.blocks_of(layer) for layer in plan.layers]
    return Memory(
        weights=sum(p.bytes for p in panels.values()) + vectors,
        cache=sum(aligned(count * size) for count, pair in zip(counted, blocks, strict=True) for size in pair),
        scratch=_step_bytes(program, limits, threads) + ropes,
        weights_per_token=_weights_per_token(plan, panels),
        **cache_reads(plan.layers, [k + v for k, v in blocks], limits),
    )


def _step_bytes(program: Program, limits: Limits, threads: int) -> int:
    """Return the bytes of activations and scratch memory."""
    lists = partials = scores = 0
    for place in program.places:
        match place:
            case ListOf(offset=0):
                lists += place.bytes
            case WorkOf(shape, window, rows):
                partials = max(partials, Sharing(shape, window, limits, threads, rows).partial_bytes)
            case ScoresOf(size):
                scores = max(scores, size)
    return program.buffers.size + threads * sum(program.scratch.values()) + partials + scores + lists


def block_bytes(plan: Plan, cache: CacheTypes) -> list[tuple[int, int]]:
    """Return a cache block's bytes by layer: for keys and values, or for the two parts of a recurrent layer's block."""
    return [cache_bytes(layer, cache) if isinstance(layer, CacheLayer) else store_bytes(layer) for layer in plan.layers]


def _weights_per_token(plan: Plan, panels: dict[str, weights.RepackedWeight]) -> int:
    """Return the bytes of weight matrices that one token reads.

    Experts count in proportion to the share used per token.
    """
    products = (op for op in plan.operations if not isinstance(op, Embed))
    reads = (read for op in products for read in op.reads if read.weight.name in panels)
    return sum(read.share(panels[read.weight.name].bytes) for read in reads)
