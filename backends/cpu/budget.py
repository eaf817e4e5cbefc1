"""Memory of a bound plan in bytes, computed without reading weights; `localllm show` and binding share this account."""

from __future__ import annotations

import math

from backends.base import CacheTypes, Limits, Memory, cache_reads
from backends.cpu import bind, weights
from backends.cpu.cache import CACHE
from backends.cpu.isa import Isa, host
from backends.cpu.kernels import attention
from backends.cpu.memory import aligned
from backends.cpu.panels import panel_count
from backends.cpu.program import Program
from backends.cpu.sharing import Sharing
from backends.cpu.simd import LANES
from backends.plan import Attention, Embed, Experts, Linear, Norm, Plan, Rotate, Weight

Uses = set[tuple[attention.Shape, int]]  # kernels of attention, with the window


def plan_memory(plan: Plan, limits: Limits, threads: int, cache: CacheTypes) -> Memory:
    """Memory of a plan before it is bound; BackendError if it cannot be bound."""
    return memory(plan, bind.program(plan, limits, threads, cache), limits, threads, cache, host())


def memory(plan: Plan, program: Program, limits: Limits, threads: int, cache: CacheTypes, isa: Isa) -> Memory:
    panels = weights.shapes(matrices(plan), isa)
    uses, blocks = attention_uses(plan, cache), block_bytes(plan, cache)
    vectors = sum(4 * weights.padded(math.prod(weight.shape), lanes) for _, weight, lanes in vector_uses(plan))
    biases = sum(4 * weight.shape[0] * width for _, weight, width in expert_biases(plan))
    sharing = (Sharing(*use, limits, threads).partial_bytes for use in uses)
    ropes = {op.rope: limits.positions * 8 * (op.rope.n_rot // 2) for op in plan.operations if isinstance(op, Rotate)}
    scratch = (
        program.buffers.size,
        threads * attention_stride(uses),
        threads * tile_stride(panels, threads),
        max(sharing, default=0),
        sum(ropes.values()),
        sum(program.lists.values()),
    )
    counted = [limits.blocks_of(layer) for layer in plan.layers]
    return Memory(
        weights=sum(p.bytes for p in panels.values()) + vectors + biases,
        cache=sum(aligned(count * size) for count, pair in zip(counted, blocks, strict=True) for size in pair),
        scratch=sum(scratch),
        weights_per_token=_weights_per_token(plan, panels),
        **cache_reads(plan.layers, [k + v for k, v in blocks]),
    )


def block_bytes(plan: Plan, cache: CacheTypes) -> list[tuple[int, int]]:
    """Bytes of keys and values per cache block, by layer."""
    keys, values = CACHE[cache.keys], CACHE[cache.values]
    return [
        (layer.kv_heads * keys.key_bytes(layer.head_dim), layer.kv_heads * values.value_bytes(layer.head_dim))
        for layer in plan.layers
    ]


def attention_uses(plan: Plan, cache: CacheTypes) -> Uses:
    return {(bind.attention_shape(plan, op, cache), op.window) for op in plan.operations if isinstance(op, Attention)}


def attention_stride(uses: Uses) -> int:
    """Bytes of one thread's scratch in attention."""
    return aligned(max((attention.scratch_bytes(shape) for shape, _ in uses), default=64))


def tile_stride(panels: dict[str, weights.Panels], threads: int) -> int:
    """Bytes of one thread's unpacked weights, and of the activations beside them."""
    return aligned(max((p.scratch_bytes(threads) for p in panels.values()), default=0))


def matrices(plan: Plan) -> list[Weight]:
    """Every matrix stored in panels, once."""
    found: dict[str, Weight] = {}
    for op in plan.operations:
        if isinstance(op, Embed):
            found[op.table.name] = op.table
        elif isinstance(op, Linear):
            found[op.weight.name] = op.weight
        elif isinstance(op, Experts):
            found |= {stack.weight.name: stack.weight for stack in (op.gate, op.up, op.down)}
    return list(found.values())


def vector_uses(plan: Plan) -> list[tuple[str, Weight, int]]:
    """(address name, tensor, lanes to pad to): a linear's bias is as long as its panels."""
    found: dict[str, tuple[str, Weight, int]] = {}
    for op in plan.operations:
        if isinstance(op, Norm):
            for weight in (op.weight, op.bias):
                if weight is not None:
                    found[f"vector:{weight.name}"] = (f"vector:{weight.name}", weight, LANES)
        elif isinstance(op, Experts):
            for weight in (op.choice_bias, op.gate.scale, op.up.scale, op.down.scale):
                if weight is not None:
                    found[f"vector:{weight.name}"] = (f"vector:{weight.name}", weight, LANES)
        elif isinstance(op, Attention) and op.sinks is not None:
            found[f"vector:{op.sinks.name}"] = (f"vector:{op.sinks.name}", op.sinks, LANES)
        elif isinstance(op, Linear) and op.bias is not None:
            found[f"panel_vector:{op.bias.name}"] = (f"panel_vector:{op.bias.name}", op.bias, 2 * LANES)
    return list(found.values())


def expert_biases(plan: Plan) -> list[tuple[str, Weight, int]]:
    """(address name, biases of expert matrices, padded length per expert)."""
    return [
        (f"experts_vector:{stack.bias.name}", stack.bias, panel_count(stack.weight.shape[1]) * LANES)
        for op in plan.operations
        if isinstance(op, Experts)
        for stack in (op.gate, op.up, op.down)
        if stack.bias is not None
    ]


def _weights_per_token(plan: Plan, panels: dict[str, weights.Panels]) -> int:
    """Bytes of all matrices in products, and of the chosen experts alone."""
    total = 0
    for op in plan.operations:
        if isinstance(op, Linear):
            total += panels[op.weight.name].bytes
        elif isinstance(op, Experts):
            stacks = (op.gate, op.up, op.down)
            total += sum(panels[stack.weight.name].expert_bytes * op.used for stack in stacks)
    return total
