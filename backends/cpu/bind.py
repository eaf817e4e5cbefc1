"""From a plan to entries that threads replay: fuse, assign buffers, and place barriers where data requires them.

Fusions: an addition moves into the linear that feeds it; norm and glu write the quantized activations for their
readers; linears that share an input run without a barrier in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from localllm.backends.base import F16_CACHE, BackendError, CacheTypes, Limits
from localllm.backends.cpu.buffers import Buffer, Buffers, activation_stride, float_stride
from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.kernels import append, attention, experts, linear, matrix, rowwise
from localllm.backends.cpu.panels import Activations, panel_count
from localllm.backends.cpu.program import (
    Call,
    Domain,
    Program,
    Resource,
    Slot,
    place_barriers,
)  # fmt: skip
from localllm.backends.cpu.simd import LANES
from localllm.backends.cpu.unpack import INTEGER_PANELS, activations_of
from localllm.backends.stages import Stage
from localllm.notice import Notice, Setting
from localllm.plan import (
    Activate,
    Add,
    Append,
    Attention,
    Embed,
    Experts,
    Glu,
    Linear,
    LinearAdd,
    Norm,
    Operation,
    Plan,
    Receive,
    Rotate,
    Scale,
    SelectRows,
    Send,
    Softcap,
    Stack,
    Value,
    Weight,
)  # fmt: skip
from localllm.plan.rewrites.fusion import fuse, fuse_additions

PASSES = (fuse_additions,)


def activation_slots(first: int, kind: Activations, rows: Buffer, width: int) -> dict[int, Slot]:
    """Slots from `first` on, for a kernel that writes activations of one kind."""
    at = first + 3 * kind
    return {at: rows, at + 1: rows.stride, at + 2: width}


class _Binder:
    def __init__(self, plan: Plan, limits: Limits, threads: int, cache: CacheTypes, keep: Collection[Value]) -> None:
        self.plan = plan = fuse(plan, PASSES, keep)
        self.threads, self.cache = threads, cache
        self.buffers = Buffers(limits)
        self.calls: list[Call] = []
        self.kernels: dict[str, Kernel] = {}
        self.where: dict[int, Buffer] = {}  # value -> float32 rows
        self.quantized: dict[tuple[int, Activations], Buffer] = {}  # value, kind -> rows of that kind
        self.uses = plan.uses
        self.keep = keep
        self.uses.update(value.index for value in keep)  # a use that never comes
        self.routings: dict[int, tuple[str, Buffer]] = {}
        self.lists: dict[str, int] = {}
        self.limits = limits
        self.received: list[tuple[Value, Buffer]] = []  # by the stage
        self.sent: list[tuple[Value, Buffer]] = []
        self.wanted = {(x.index, activations_of(weight.format)) for op in plan.operations for x, weight in op.products}

    # -- values ----------------------------------------------------------------------------------------------------

    def take(self, value: Value) -> Buffer:
        buffer = self.buffers.take(value.rows, float_stride(value.width))
        self.where[value.index] = buffer
        return buffer

    def take_quantized(self, value: Value, kind: Activations) -> Buffer:
        buffer = self.buffers.take(value.rows, activation_stride(kind, value.width))
        self.quantized[value.index, kind] = buffer
        return buffer

    def used(self, *values: Value) -> None:
        """Count one use less of each; the last use returns its buffers."""
        for value in values:
            self.uses[value.index] -= 1
            if not self.uses[value.index]:
                self.buffers.give(self.where.pop(value.index))
                for kind in Activations:
                    if (value.index, kind) in self.quantized:
                        self.buffers.give(self.quantized.pop((value.index, kind)))

    def call(
        self, kernel: Kernel, size: int, slots: dict[int, Slot], domain: Domain, label: str,
        reads: set[Resource] | None = None, writes: set[Resource] | None = None,
    ) -> None:  # fmt: skip
        self.kernels[kernel.name] = kernel
        self.calls.append(Call(kernel.name, size, slots, domain, reads or set(), writes or set(), label))

    def quantize_slots(self, value: Value, first: int) -> tuple[dict[int, Slot], set[Resource]]:
        """Slots for a kernel that also writes the value's activations of every required kind."""
        slots: dict[int, Slot] = {}
        writes: set[Resource] = set()
        for kind in Activations:
            if (value.index, kind) in self.wanted:
                q = self.take_quantized(value, kind)
                slots |= activation_slots(first, kind, q, value.width)
                writes.add(q.number)
        return slots, writes

    def input_of(self, value: Value, weight: Weight) -> Buffer:
        """The input of a product with `weight`: float rows, or activations of its kind."""
        kind = activations_of(weight.format)
        if kind is None:
            return self.where[value.index]
        if (value.index, kind) not in self.quantized:
            self.quantize(value, kind)
        return self.quantized[value.index, kind]

    # -- operations ------------------------------------------------------------------------------------------------

    def run(self) -> Program:
        stages = [self.stage(numbers) for numbers in self.plan.stages]
        place_barriers(self.calls, stages)
        kept = {value.index: self.where[value.index] for value in self.keep}
        logits = self.where.get(self.plan.logits.index)
        return Program(self.calls, self.buffers, self.kernels, logits, self.lists, kept, self.routings, stages)

    def stage(self, numbers: range) -> Stage[Buffer]:
        first, self.received, self.sent = len(self.calls), [], []
        self.emit(numbers)
        return Stage(slice(first, len(self.calls)), tuple(self.received), tuple(self.sent))

    def receive(self, op: Receive) -> None:
        self.received += [(value, self.take(value)) for value in op.values]

    def send(self, op: Send) -> None:
        self.sent += [(value, self.where[value.index]) for value in op.values]
        self.used(*op.values)

    def emit(self, numbers: range) -> None:
        """Emit the calls of the operations with these numbers."""
        emit: dict[type[Operation], Callable[..., None]] = {
            Embed: self.embed, Norm: self.norm, Rotate: self.rotate, Append: self.append, Attention: self.attention,
            Glu: self.glu, Add: self.add, Scale: self.scale, SelectRows: self.select,
            Activate: self.activate, Softcap: self.softcap, Experts: self.experts, Linear: self.linear,
            LinearAdd: self.linear_add, Receive: self.receive, Send: self.send,
        }  # fmt: skip
        for number in numbers:
            op = self.plan.operations[number]
            if type(op) not in emit:
                problem = f"the cpu backend has no kernels for {type(op).__name__.lower()} yet"
                raise BackendError(Notice(problem, "; ", Setting("backend", "reference"), " runs it, slowly"))
            emit[type(op)](op)

    def embed(self, op: Embed) -> None:
        y = self.take(op.out)
        a, name = matrix.EmbedArg, op.table.name
        slots: dict[int, Slot] = {
            a.STEP: "step", a.WEIGHTS: f"weights:{name}", a.BLOCKS: f"blocks:{name}",
            a.PANEL_BYTES: f"panel_bytes:{name}", a.Y: y, a.Y_STRIDE: y.stride,
        }  # fmt: skip
        self.call(matrix.embed(op.table.format), a.SIZE, slots, "batch", "embed", writes={y.number})

    def norm(self, op: Norm) -> None:
        x, y, a = self.where[op.x.index], self.take(op.out), rowwise.NormArg
        q, q_writes = self.quantize_slots(op.out, a.Q)
        slots: dict[int, Slot] = {
            a.X: x, a.X_STRIDE: x.stride, a.Y: y, a.Y_STRIDE: y.stride, a.WEIGHT: f"vector:{op.weight.name}",
            a.BIAS: f"vector:{op.bias.name}" if op.bias else 0,
            a.GROUP_STRIDE: 4 * op.weight.shape[-1] if len(op.weight.shape) > 1 else 0,
            a.WIDTH: op.x.width // op.groups, a.GROUPS: op.groups, a.EPS: float(op.eps),
            a.ROWS: f"rows:{op.x.rows}", **q,
        }  # fmt: skip
        self.call(rowwise.norm(op.kind), a.SIZE, slots, op.x.rows, "norm", {x.number}, {y.number, *q_writes})
        self.used(op.x)

    def linear_add(self, op: LinearAdd) -> None:
        self.linear(op.linear, op)

    def linear(self, op: Linear, fused: LinearAdd | None = None) -> None:
        a, name, x = linear.LinearArg, op.weight.name, self.input_of(op.x, op.weight)
        residual: dict[int, Slot] = {}
        reads: set[Resource] = {x.number}
        out = op.out
        if fused is not None:
            r = self.where[fused.other.index]
            residual = {a.RESIDUAL: r, a.RESIDUAL_STRIDE: r.stride}
            reads.add(r.number)
            out = fused.add.out
            if fused.other != op.x:
                self.used(fused.other)  # the sum may replace it: the thread that writes an element also reads it
        y = self.take(out)
        slots: dict[int, Slot] = {
            a.WEIGHTS: f"weights:{name}", a.BLOCKS: f"blocks:{name}", a.PANELS: f"panels:{name}",
            a.PANEL_BYTES: f"panel_bytes:{name}", a.CHUNK: f"chunk:{name}",
            a.TILE_CHUNK: f"tile_chunk:{name}", a.SCRATCH: "tiles", a.SCRATCH_STRIDE: "tiles_stride",
            a.X: x, a.X_STRIDE: x.stride, a.Y: y, a.Y_STRIDE: y.stride,
            a.BIAS: f"panel_vector:{op.bias.name}" if op.bias else 0,
            a.SCALE: float(op.scale), a.ROWS: f"rows:{op.x.rows}", a.COUNTER: "counter", **residual,
        }  # fmt: skip
        self.call(linear.linear(op.weight.format), a.SIZE, slots, "tasks", name, reads, {y.number})
        self.used(op.x)

    def quantize(self, value: Value, kind: Activations) -> None:
        x, q, a = self.where[value.index], self.take_quantized(value, kind), rowwise.QuantizeArg
        slots: dict[int, Slot] = {
            a.X: x, a.X_STRIDE: x.stride, a.ROWS: f"rows:{value.rows}", **activation_slots(a.Q, kind, q, value.width),
        }  # fmt: skip
        self.call(rowwise.quantize(), a.SIZE, slots, value.rows, "quantize", {x.number}, {q.number})

    def rotate(self, op: Rotate) -> None:
        x = self.where[op.x.index]
        self.used(op.x)  # in place after the last use: a pair is read before it is written
        y, a = self.take(op.out), rowwise.RotateArg
        slots: dict[int, Slot] = {
            a.STEP: "step", a.X: x, a.X_STRIDE: x.stride, a.Y: y, a.Y_STRIDE: y.stride,
            a.HEADS: op.x.width // op.head_dim, a.TABLE: ("rope", op.rope),
        }  # fmt: skip
        kernel = rowwise.rotate(op.rope.style, op.head_dim, op.rope.n_rot)
        self.call(kernel, a.SIZE, slots, "batch", "rotate", {x.number}, {y.number})

    def step_of(self, layer: int) -> str:
        """The step block with this layer's slots and tables."""
        return "window_step" if self.plan.layers[layer].window and self.limits.window_blocks else "step"

    def append(self, op: Append) -> None:
        k, v, a = self.where[op.k.index], self.where[op.v.index], append.AppendArg
        layer = self.plan.layers[op.layer]
        slots: dict[int, Slot] = {
            a.STEP: self.step_of(op.layer), a.K: k, a.K_STRIDE: k.stride, a.V: v, a.V_STRIDE: v.stride,
            a.K_CACHE: f"k_cache:{op.layer}", a.V_CACHE: f"v_cache:{op.layer}", a.HEADS: layer.kv_heads,
        }  # fmt: skip
        kernel = append.append(layer.head_dim, self.cache.keys, self.cache.values)
        self.call(kernel, a.SIZE, slots, "batch", "append", {k.number, v.number}, {f"cache.{op.layer}"})
        self.used(op.k, op.v)

    def attention(self, op: Attention) -> None:
        q, y, a = self.where[op.q.index], self.take(op.out), attention.AttentionArg
        layer = self.plan.layers[op.layer]
        shape = attention_shape(self.plan, op, self.cache)
        slots: dict[int, Slot] = {
            a.STEP: self.step_of(op.layer), a.Q: q, a.Q_STRIDE: q.stride, a.Y: y, a.Y_STRIDE: y.stride,
            a.K_CACHE: f"k_cache:{op.layer}", a.V_CACHE: f"v_cache:{op.layer}", a.KV_HEADS: layer.kv_heads,
            a.SCALE: float(op.scale), a.COUNTER: "counter", a.SCRATCH: "scratch", a.SCRATCH_STRIDE: "scratch_stride",
            a.WORK: ("work", shape, op.window), a.WINDOW: op.window, a.SOFTCAP: float(op.softcap),
            a.SINKS: f"vector:{op.sinks.name}" if op.sinks else 0, a.PARTIALS: "partials",
        }  # fmt: skip
        own: set[Resource] = {y.number, "scratch", "partials"}
        reads: set[Resource] = {q.number, f"cache.{op.layer}"}
        self.call(attention.attention(shape), a.SIZE, slots, "tasks", "attention", reads, own)
        self.call(attention.merge(shape), a.SIZE, slots, "tasks", "attention", {"partials"}, {y.number, "scratch"})
        self.used(op.q)

    def glu(self, op: Glu) -> None:
        gate, up, a = self.where[op.gate.index], self.where[op.up.index], rowwise.GluArg
        self.used(op.gate, op.up)
        y = self.take(op.out)
        q, q_writes = self.quantize_slots(op.out, a.Q)
        slots: dict[int, Slot] = {
            a.GATE: gate, a.GATE_STRIDE: gate.stride, a.UP: up, a.UP_STRIDE: up.stride, a.Y: y, a.Y_STRIDE: y.stride,
            a.WIDTH: op.out.width, a.ROWS: f"rows:{op.out.rows}", **q,
        }  # fmt: skip
        reads: set[Resource] = {gate.number, up.number}
        kernel = rowwise.glu(op.activation, row_gate=op.gate.width == 1 and op.up.width > 1)
        self.call(kernel, a.SIZE, slots, op.out.rows, "glu", reads, {y.number, *q_writes})

    def experts(self, op: Experts) -> None:
        """Route, sort by expert, gate and up, glu, down, combine; here a row is a pair of a row and one of its
        experts."""
        rows, used, count = op.x.rows, op.used, op.gate.weight.shape[0]
        pairs = {"batch": self.limits.rows, "logits": self.limits.logit_rows}[rows] * used
        own = f"experts.{op.out.index}"
        choices, weights, starts, order, scratch = (
            f"{own}.{what}" for what in ("choices", "weights", "starts", "order", "scratch")
        )
        stride = 2 * 4 * (-(-count // 16) * 16)
        self.lists |= {
            choices: 4 * pairs, weights: 4 * pairs, starts: 8 * (count + 1), order: 8 * pairs,
            scratch: stride * self.threads,
        }  # fmt: skip
        router, r = self.where[op.router.index], experts.RouteArg
        slots: dict[int, Slot] = {
            r.LOGITS: router, r.LOGITS_STRIDE: router.stride, r.CHOICES: choices, r.WEIGHTS: weights, r.EXPERTS: count,
            r.SCALE: float(op.scale), r.BIAS: f"vector:{op.choice_bias.name}" if op.choice_bias else 0,
            r.ROWS: f"rows:{rows}", r.SCRATCH: scratch, r.SCRATCH_STRIDE: stride,
        }  # fmt: skip
        kernel = experts.route(op.gating, used, op.normalize)
        self.call(kernel, r.SIZE, slots, rows, "route", {router.number}, {choices, weights, scratch})
        g = experts.GroupArg
        slots = {
            g.CHOICES: choices, g.EXPERTS: count, g.USED: used, g.ROWS: f"rows:{rows}", g.STARTS: starts,
            g.ORDER: order,
        }  # fmt: skip
        self.call(experts.group(), g.SIZE, slots, "select", "group", {choices}, {starts, order})

        ffn, width = op.gate.weight.shape[1], op.down.weight.shape[1]
        lists: set[Resource] = {starts, order}
        inputs = [self.input_of(op.x, stack.weight) for stack in (op.gate, op.up)]
        hidden = [self.buffers.take(rows, float_stride(ffn), used) for _ in range(2)]
        for stack, x, y in zip((op.gate, op.up), inputs, hidden, strict=True):
            self._multiply(stack, x, y, used, lists, own)
        self.used(op.x, op.router)
        gate, up = hidden
        a, quantized = rowwise.GluArg, None
        slots = {
            a.GATE: gate, a.GATE_STRIDE: gate.stride, a.UP: up, a.UP_STRIDE: up.stride, a.Y: gate,
            a.Y_STRIDE: gate.stride, a.WIDTH: ffn, a.ROWS: (starts, 8 * count),
        }  # fmt: skip
        touched: set[Resource] = {gate.number}
        kind = activations_of(op.down.weight.format)
        if kind is not None:
            quantized = self.buffers.take(rows, activation_stride(kind, ffn), used)
            slots |= activation_slots(a.Q, kind, quantized, ffn)
            touched.add(quantized.number)
        self.call(rowwise.glu(op.activation), a.SIZE, slots, "select", "glu", {gate.number, up.number, starts}, touched)
        mixed = self.buffers.take(rows, float_stride(width), used)
        self._multiply(op.down, quantized or gate, mixed, 1, lists, own)
        y = self.take(op.out)
        c = experts.CombineArg
        slots = {
            c.X: mixed, c.X_STRIDE: mixed.stride, c.Y: y, c.Y_STRIDE: y.stride, c.WEIGHTS: weights, c.USED: used,
            c.WIDTH: op.out.width, c.ROWS: f"rows:{rows}",
        }  # fmt: skip
        self.call(experts.combine(), c.SIZE, slots, rows, "combine", {mixed.number, weights}, {y.number})
        if op.out in self.keep:
            self.routings[op.out.index] = choices, gate
        else:
            self.buffers.give(gate)
        for buffer in (up, mixed, *([quantized] if quantized else [])):
            self.buffers.give(buffer)

    def _multiply(self, stack: Stack, x: Buffer, y: Buffer, per_row: int, lists: set[Resource], own: str) -> None:
        """One product of all pairs with their experts' matrices."""
        a, e, name = linear.LinearArg, experts.ExpertArg, stack.weight.name
        integer = stack.weight.format in INTEGER_PANELS
        slots: dict[int, Slot] = {
            a.WEIGHTS: f"weights:{name}", a.BLOCKS: f"blocks:{name}", a.PANELS: f"panels:{name}",
            a.PANEL_BYTES: f"panel_bytes:{name}", a.CHUNK: f"{'tile_' * integer}chunk:{name}", a.SCRATCH: "tiles",
            a.SCRATCH_STRIDE: "tiles_stride", a.X: x, a.X_STRIDE: x.stride, a.Y: y, a.Y_STRIDE: y.stride,
            a.COUNTER: "counter", a.BIAS: f"experts_vector:{stack.bias.name}" if stack.bias else 0,
            e.EXPERTS: stack.weight.shape[0], e.EXPERT_BYTES: f"expert_bytes:{name}", e.STARTS: f"{own}.starts",
            e.ORDER: f"{own}.order", e.PAIRS_PER_ROW: per_row,
            e.SCALES: f"vector:{stack.scale.name}" if stack.scale else 0,
            e.BIAS_STRIDE: panel_count(stack.weight.shape[1]) * 4 * LANES,
        }  # fmt: skip
        kernel = experts.multiply(stack.weight.format)
        self.call(kernel, e.SIZE, slots, "tasks", name, {x.number, *lists}, {y.number})

    def add(self, op: Add) -> None:
        self._pair(rowwise.add(), op.out, (op.a, op.b), {}, "add")

    def scale(self, op: Scale) -> None:
        self._pair(rowwise.scale(), op.out, (op.x,), {rowwise.PairArg.FACTOR: float(op.factor)}, "scale")

    def activate(self, op: Activate) -> None:
        self._pair(rowwise.apply(op.activation), op.out, (op.x,), {}, op.activation)

    def softcap(self, op: Softcap) -> None:
        self._pair(rowwise.softcap(), op.out, (op.x,), {rowwise.PairArg.FACTOR: float(op.cap)}, "softcap")

    def _pair(self, kernel: Kernel, out: Value, inputs: tuple[Value, ...], more: dict[int, Slot], label: str) -> None:
        buffers, a = [self.where[value.index] for value in inputs], rowwise.PairArg
        self.used(*inputs)
        y = self.take(out)
        slots: dict[int, Slot] = {
            a.Y: y, a.Y_STRIDE: y.stride, a.WIDTH: out.width, a.ROWS: f"rows:{out.rows}", **more,
        }  # fmt: skip
        for slot, buffer in zip((a.A, a.B), buffers, strict=False):
            slots |= {slot: buffer, slot + 1: buffer.stride}
        self.call(kernel, a.SIZE, slots, out.rows, label, {b.number for b in buffers}, {y.number})

    def select(self, op: SelectRows) -> None:
        x, y, a = self.where[op.x.index], self.take(op.out), rowwise.SelectArg
        slots: dict[int, Slot] = {
            a.STEP: "step", a.X: x, a.X_STRIDE: x.stride, a.Y: y, a.Y_STRIDE: y.stride, a.WIDTH: op.out.width,
        }  # fmt: skip
        self.call(rowwise.select(), a.SIZE, slots, "select", "select", {x.number}, {y.number})
        self.used(op.x)


def attention_shape(plan: Plan, op: Attention, cache: CacheTypes) -> attention.Shape:
    """The shape that this attention's kernel is compiled for."""
    layer = plan.layers[op.layer]
    return attention.Shape(
        layer.head_dim, op.heads // layer.kv_heads, layer.kv_heads, cache.keys, cache.values,
        op.window > 0, op.softcap > 0.0, op.sinks is not None,
    )  # fmt: skip


def program(
    plan: Plan, limits: Limits, threads: int, cache: CacheTypes = F16_CACHE, keep: Collection[Value] = ()
) -> Program:
    """Calls, buffers and kernels of a plan."""
    return _Binder(plan, limits, threads, cache, keep).run()
