"""The state that emitters share while a plan is lowered to kernel calls: the buffers of its values, and the calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from localllm.backends.allocation import Allocator, Buffer
from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cpu import weights
from localllm.backends.cpu.arguments import Rows, Struct
from localllm.backends.cpu.buffers import activation_stride, float_stride
from localllm.backends.cpu.cache_layout import layout_of
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.kernels import attention_shape, indexer, rowwise
from localllm.backends.cpu.kernels.common import PlanKernel
from localllm.backends.cpu.memory import aligned
from localllm.backends.cpu.panels import Activations
from localllm.backends.cpu.places import BufferOf, CountOf, ListOf, Scratch, ScratchOf, VectorOf, rows_in
from localllm.backends.cpu.program import Domain, KernelCall
from localllm.backends.cpu.simd import LANES
from localllm.backends.cpu.unpack import activations_of
from localllm.plan import Attention, IndexerTopK, Operation, Plan, Value, Weight, flattened

Arguments = TypeVar("Arguments", bound=Struct)


class Lowering:
    """A plan being lowered to calls. `panels` holds every matrix by name."""

    def __init__(
        self, plan: Plan, limits: Limits, threads: int, cache: CacheTypes, keep: Collection[Value], isa: Isa
    ) -> None:
        self.plan, self.limits, self.threads, self.cache, self.keep = plan, limits, threads, cache, keep
        self.panels = weights.shapes(plan.matrices.values(), isa)
        self.scratch = _scratch(plan, limits, cache, self.panels.values(), threads)
        self.scratch_rows: dict[Scratch, Rows] = {  # scratch memory, one row per thread
            what: Rows(address=ScratchOf(what), stride=stride) for what, stride in self.scratch.items()
        }
        self.calls: list[KernelCall] = []
        self.operations: list[Operation] = []  # the operation of each call
        self.kernels: dict[str, Kernel] = {}
        self.routings: dict[int, tuple[ListOf, Buffer]] = {}
        self.values: Allocator[Activations | None] = Allocator()  # form None is float32
        self.received: list[tuple[Value, Buffer]] = []  # values that the stage being lowered receives
        self.sent: list[tuple[Value, Buffer]] = []
        self.looked_up: list[tuple[Value, Buffer]] = []
        self._lists = 0
        self._multiplied = {
            (x.index, activations_of(weight.format)) for op in plan.operations for x, weight in op.products
        }

    # -- values ------------------------------------------------------------------------------------------------------

    def make(self, value: Value) -> Buffer:
        """Allocate a float32 buffer for a value that an operation computes."""
        return self.values.make(value, None, float_stride(value.width))

    def floats(self, value: Value) -> Buffer:
        """Return the float32 buffer of a value."""
        buffer = self.values.find(value, None)
        assert buffer is not None, f"{value.name} is read before it is written, or after its last use"
        return buffer

    def copies(self, value: Value) -> rowwise.Copies:
        """Return the quantized copies that products read of a value, for the kernel that computes the value."""
        return copies(
            {kind: self._quantized(value, kind) for kind in Activations if (value.index, kind) in self._multiplied},
            value.width,
        )

    def operand(self, value: Value, weight: Weight) -> Buffer:
        """Return a value in the form that products with this matrix read: float32, or quantized on demand."""
        kind = activations_of(weight.format)
        if kind is None:
            return self.floats(value)
        found = self.values.find(value, kind)
        if found is not None:
            return found
        quantized = self._quantized(value, kind)
        arguments = rowwise.QuantizeArguments(
            x=rows_in(self.floats(value)), rows=CountOf(value.rows), copies=copies({kind: quantized}, value.width)
        )
        self.call(rowwise.quantize_rows(), arguments, value.rows, "quantize")
        return quantized

    def _quantized(self, value: Value, kind: Activations) -> Buffer:
        return self.values.make(value, kind, activation_stride(kind, value.width))

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(
        self, kernel: PlanKernel[Arguments], arguments: Arguments, domain: Domain, label: str, products: int = 0
    ) -> None:
        self.kernels[kernel.name] = kernel
        self.calls.append(KernelCall(kernel.name, arguments, domain, label, products))

    def list(self, size: int) -> ListOf:
        """Reserve `size` bytes for one operation."""
        self._lists += 1
        return ListOf(self._lists, size)


def vector_of(weight: Weight | None) -> VectorOf | int:
    """Return the place of a small float32 tensor, or 0 for None."""
    return VectorOf(weight, LANES) if weight is not None else 0


NO_COPY = rowwise.Quantized(address=0, stride=0, values=0)


def copies(made: dict[Activations, Buffer], width: int) -> rowwise.Copies:
    """Return the quantized copies for a kernel to write, with `NO_COPY` for the kinds that are not in `made`."""

    def quantized(kind: Activations) -> rowwise.Quantized:
        if kind not in made:
            return NO_COPY
        return rowwise.Quantized(address=BufferOf(made[kind]), stride=made[kind].stride, values=width)

    return rowwise.Copies(
        blocks=quantized(Activations.BLOCKS),
        super_blocks=quantized(Activations.SUPER_BLOCKS),
        bfloats=quantized(Activations.BFLOATS),
    )


def shape_of(plan: Plan, op: Attention, cache: CacheTypes) -> attention_shape.AttentionShape:
    """Return the shape for which the kernels of this attention are compiled."""
    layer, every, chosen = plan.attention_layer(op.layer), 0, 0
    layout = layout_of(layer, cache)
    if op.pools is not None:
        every = plan.attention_layer(op.pools).every
        chosen = plan.attention_layer(op.pools).selected // every
    return attention_shape.AttentionShape(
        layer.head_dim, layer.value_dim, op.heads // layer.kv_heads, layer.kv_heads, cache.keys, cache.values,
        op.window > 0 and not every, op.softcap > 0.0, op.sinks is not None, op.slopes is not None,
        op.chunked, op.causal, op.after, op.reach, layer.selected, op.slices, layer.whole, layout.once, every, chosen,
        op.spans,
    )  # fmt: skip


def index_shape_of(plan: Plan, op: IndexerTopK, cache: CacheTypes) -> indexer.IndexerShape:
    """Return the shape for which the kernels of this indexer are compiled."""
    layer = plan.attention_layer(op.layer)
    return indexer.IndexerShape(
        op.heads, layer.head_dim, op.count, op.block, op.local, op.weights is not None, op.pooled, cache.keys,
        layer.every,
    )  # fmt: skip


def _scratch(
    plan: Plan, limits: Limits, cache: CacheTypes, panels: Collection[weights.RepackedWeight], threads: int
) -> dict[Scratch, int]:
    """Return the scratch bytes per thread.

    The size is the same for all calls, so that threads never share scratch memory.
    """
    operations = flattened(plan.operations)
    shapes = [shape_of(plan, op, cache) for op in operations if isinstance(op, Attention)]
    indexers = [index_shape_of(plan, op, cache) for op in operations if isinstance(op, IndexerTopK)]
    return {
        "attention": aligned(max((attention_shape.scratch_bytes(shape) for shape in shapes), default=64)),
        "indexer": aligned(max((indexer.scratch_bytes(shape, limits) for shape in indexers), default=0)),
        "unpacked weights": aligned(max((p.scratch_bytes(threads) for p in panels), default=0)),
    }
