"""The memory that a bound plan takes, without reading a weight: `localllm show` and binding count alike."""

from __future__ import annotations

import math

from localllm.backends.base import CacheTypes, Limits, Memory, cache_reads
from localllm.backends.cpu import bind, weights
from localllm.backends.cpu.cache import CACHE
from localllm.backends.cpu.isa import Isa, host
from localllm.backends.cpu.kernels import attention
from localllm.backends.cpu.memory import aligned
from localllm.backends.cpu.panels import panel_count
from localllm.backends.cpu.program import Program
from localllm.backends.cpu.sharing import Sharing
from localllm.backends.cpu.simd import LANES
from localllm.plan import Attention, Embed, Experts, Linear, Plan, Rotate, Weight

Uses = set[tuple[attention.Shape, int]]  # kernels of attention, with the window


def plan_memory(plan: Plan, limits: Limits, threads: int, cache: CacheTypes) -> Memory:
    """Memory of a plan before it is bound; BackendError if it cannot be bound."""
    return memory(plan, bind.program(plan, limits, threads, cache), limits, threads, cache, host())


def memory(plan: Plan, program: Program, limits: Limits, threads: int, cache: CacheTypes, isa: Isa) -> Memory:
    panels = weights.shapes(plan.matrices.values(), isa)
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


def vector_uses(plan: Plan) -> list[tuple[str, Weight, int]]:
    """(address name, tensor, lanes to pad to) of the vectors, `expert_biases` apart.

    The bias of a linear is as long as its panels.
    """
    found: dict[str, tuple[str, Weight, int]] = {}
    apart = {weight.name for _, weight, _ in expert_biases(plan)}
    for op in plan.operations:
        kind, lanes = ("panel_vector", 2 * LANES) if isinstance(op, Linear) else ("vector", LANES)
        uses = [(f"{kind}:{weight.name}", weight, lanes) for weight in op.vectors if weight.name not in apart]
        found |= {use[0]: use for use in uses}
    return list(found.values())


def expert_biases(plan: Plan) -> list[tuple[str, Weight, int]]:
    """(address name, biases of expert matrices, padded length per expert)."""
    return [
        (f"experts_vector:{stack.bias.name}", stack.bias, panel_count(stack.weight.shape[1]) * LANES)
        for op in plan.operations
        if isinstance(op, Experts)
        for stack in op.stacks
        if stack.bias is not None
    ]


def _weights_per_token(plan: Plan, panels: dict[str, weights.Panels]) -> int:
    """Bytes of every matrix of a product, and of the chosen experts' alone."""
    products = (op for op in plan.operations if not isinstance(op, Embed))
    reads = (read for op in products for read in op.reads if read.weight.name in panels)
    return sum(read.share(panels[read.weight.name].bytes) for read in reads)
