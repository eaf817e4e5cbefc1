"""From a plan to launches: every value gets a buffer, every operation one or a few kernels. Nothing is allocated here.

A stage has launches for few rows and, where another kernel is better, for many. Few rows (decode, verify) have kernels
whose sums have one order whatever else is in the batch; many rows (prefill) have tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.base import BackendError, Limits
from backends.gpu import formats, kernels, largest
from backends.gpu.kernels import COLUMNS, FEW_ROWS, GROUPED, SORTED, Kernel
from backends.plan import (
    BLOCK,
    Activate,
    Add,
    Append,
    Attention,
    CacheLayer,
    Embed,
    Experts,
    Glu,
    Linear,
    Norm,
    Operation,
    Plan,
    Rope,
    Rotate,
    Rows,
    Scale,
    SelectRows,
    Softcap,
    Stack,
    Value,
    Weight,
)  # fmt: skip
from backends.usage import additions_into_linears, uses_of

NOTHING = "nothing"  # a small buffer, where a kernel reads no such argument
PICKED, KEYS = "picked", ("keys: even passes", "keys: odd passes")  # of the search for the largest logits

Count = str  # "batch", "logits", "tiles", "partitions", "keys 0" and so on
Dimension = int | tuple[Count, int, int]  # (count, of a group, times): ceil(count / of a group) * times


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows of 4-byte elements for the values of a plan, one after the other."""

    number: int
    rows: Rows
    stride: int  # elements of a row


Argument = Buffer | Rope | str


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Kernel
    grid: tuple[Dimension, Dimension, Dimension]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Launches of one operation, in order; `one` and `many` where a row, or more than FEW_ROWS, have their own."""

    label: str
    rows: Rows
    few: tuple[Launch, ...]
    many: tuple[Launch, ...] = ()
    one: tuple[Launch, ...] = ()

    def launches(self, rows: int) -> tuple[Launch, ...]:
        """For this many rows."""
        if rows > FEW_ROWS:
            return self.many or self.few
        return self.one if rows == 1 and self.one else self.few


@dataclass(slots=True)
class Program:
    """All that binding decides."""

    stages: list[Stage] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    matrices: dict[str, Weight] = field(default_factory=dict)
    vectors: dict[str, Weight] = field(default_factory=dict)
    ropes: set[Rope] = field(default_factory=set)
    lists: dict[str, int] = field(default_factory=dict)  # name of a buffer -> bytes
    where: dict[int, Buffer] = field(default_factory=dict)  # of values that outlive the step
    routings: dict[int, tuple[str, Buffer, int]] = field(default_factory=dict)  # choices, hidden rows, chosen
    picks: list[Launch] = field(default_factory=list)  # passes of the search for the largest logits

    def kernels(self) -> list[Kernel]:
        """Each once, in order."""
        launches = (launch for s in self.stages for launch in (*s.one, *s.few, *s.many))
        return list(dict.fromkeys(launch.kernel for launch in (*launches, *self.picks)))

    def scratch(self, limits: Limits) -> int:
        rows = {"batch": limits.rows, "logits": limits.logit_rows}
        return sum(4 * b.stride * rows[b.rows] for b in self.buffers) + sum(self.lists.values())


class _Binder:
    def __init__(self, plan: Plan, limits: Limits, keep: Collection[Value]) -> None:
        self.plan, self.limits, self.keep = plan, limits, keep
        self.out = Program()
        self.where: dict[int, Buffer] = {}
        self.quantized: dict[int, Buffer] = {}
        self.free: dict[tuple[Rows, int], list[Buffer]] = {}
        self.uses = uses_of(plan)
        self.uses.update(value.index for value in keep)  # a use that never comes

    # -- buffers ---------------------------------------------------------------------------------------------------

    def take(self, rows: Rows, stride: int) -> Buffer:
        free = self.free.get((rows, stride))
        if free:
            return free.pop()
        buffer = Buffer(len(self.out.buffers), rows, stride)
        self.out.buffers.append(buffer)
        return buffer

    def give(self, buffer: Buffer) -> None:
        self.free.setdefault((buffer.rows, buffer.stride), []).append(buffer)

    def value(self, value: Value) -> Buffer:
        self.where[value.index] = self.take(value.rows, value.width)
        return self.where[value.index]

    def used(self, *values: Value) -> None:
        for value in values:
            self.uses[value.index] -= 1
            if not self.uses[value.index]:
                self.give(self.where.pop(value.index))
                if value.index in self.quantized:
                    self.give(self.quantized.pop(value.index))

    def stage(
        self, label: str, rows: Rows, few: Sequence[Launch], many: Sequence[Launch] = (), one: Sequence[Launch] = ()
    ) -> None:
        self.out.stages.append(Stage(label, rows, tuple(few), tuple(many), tuple(one)))

    def matrix(self, weight: Weight) -> str:
        formats.check(weight)
        self.out.matrices[weight.name] = weight
        return f"weights:{weight.name}"

    def vector(self, weight: Weight | None) -> str:
        if weight is None:
            return NOTHING
        self.out.vectors[weight.name] = weight
        return f"vector:{weight.name}"

    # -- operations ------------------------------------------------------------------------------------------------

    def run(self) -> Program:
        emit: dict[type[Operation], Callable[[Any], None]] = {
            Embed: self.embed, Norm: self.norm, Rotate: self.rotate, Append: self.append, Attention: self.attention,
            Glu: self.glu, Add: self.add, Scale: self.scale, SelectRows: self.select, Activate: self.activate,
            Softcap: self.softcap, Experts: self.experts,
        }  # fmt: skip
        operations = list(self.plan.operations)
        fused = additions_into_linears(operations, self.uses)
        for number, op in enumerate(operations):
            if number in fused.values():
                continue
            if isinstance(op, Linear):
                other = operations[fused[number]] if number in fused else None
                assert other is None or isinstance(other, Add)
                self.linear(op, other)
            elif type(op) in emit:
                emit[type(op)](op)
            else:
                raise BackendError(
                    f"there are no kernels for {type(op).__name__.lower()} on a graphics card yet; use --backend cpu"
                )
        kept = [*self.keep, self.plan.logits]
        self.out.where = {value.index: self.where[value.index] for value in kept}
        self.largest(self.where[self.plan.logits.index])
        return self.out

    def embed(self, op: Embed) -> None:
        weight, y = op.table, self.value(op.out)
        matrix = self.matrix(weight)
        chunks = op.out.width // 32 if weight.format in formats.QUANTIZED else op.out.width
        constants = {"K": op.out.width, "N": weight.shape[0], "Y_STRIDE": y.stride}
        kernel = kernels.embed(weight.format, self.limits, constants)
        grid = (-(-chunks // 64), ("batch", 1, 1), 1)
        self.stage("embed", "batch", [Launch(kernel, grid, (matrix, "step", y))])

    def norm(self, op: Norm) -> None:
        x, y = self.where[op.x.index], self.value(op.out)
        width = op.x.width // op.groups
        constants = {
            "K": width, "X_STRIDE": x.stride, "Y_STRIDE": y.stride, "LAYER": op.kind == "layer", "EPS": float(op.eps),
            "HAS_BIAS": op.bias is not None, "GROUP_STRIDE": width if len(op.weight.shape) > 1 else 0,
        }  # fmt: skip
        arguments = (x, self.vector(op.weight), self.vector(op.bias), y)
        self.stage("norm", op.x.rows, [Launch(kernels.norm(constants), (op.groups, (op.x.rows, 1, 1), 1), arguments)])
        self.used(op.x)

    def quantize(self, rows: Rows, x: Buffer, width: int, times: int = 1) -> Buffer:
        """Activation blocks of `times` inputs of `width` numbers a row."""
        stride = width * 11 // 32  # words: a byte a value, a scale a block, a sum a half
        y = self.take(rows, stride * times)
        kernel = kernels.quantize({"K": width, "X_STRIDE": width, "Y_STRIDE": stride})
        self.stage("quantize", rows, [Launch(kernel, (-(-width // 128), (rows, 1, times), 1), (x, y))])
        return y

    def input_of(self, value: Value, weight: Weight) -> tuple[Buffer, int]:
        """What a product with `weight` reads, and its stride in words: float rows, or activation blocks."""
        if weight.format not in formats.QUANTIZED:
            return self.where[value.index], value.width
        if value.index not in self.quantized:
            self.quantized[value.index] = self.quantize(value.rows, self.where[value.index], value.width)
        return self.quantized[value.index], value.width * 11 // 32

    def linear(self, op: Linear, addition: Add | None) -> None:
        weight, rows = op.weight, op.x.rows
        matrix = self.matrix(weight)
        x, stride = self.input_of(op.x, weight)
        residual: Argument = NOTHING
        out = op.out
        if addition is not None:
            residual = self.where[(addition.b if addition.a is op.out else addition.a).index]
            out = addition.out
        y = self.value(out)
        constants = {
            "K": weight.shape[-1], "N": weight.shape[0], "X_STRIDE": stride, "Y_STRIDE": y.stride,
            "COUNT_AT": int(rows == "logits"), "FACTOR": float(op.scale), "HAS_BIAS": op.bias is not None,
            "HAS_RESIDUAL": addition is not None, "RESIDUAL_STRIDE": y.stride,
        }  # fmt: skip
        arguments = (matrix, x, y, "step", self.vector(op.bias), residual)
        n = weight.shape[0]
        one, few = (
            Launch(kernels.matvec(weight.format, columns, constants), (-(-n // 4), (rows, columns, 1), 1), arguments)
            for columns in (1, COLUMNS)
        )
        tiles = Launch(kernels.matmul(weight.format, constants), (-(-n // 64), (rows, 32, 1), 1), arguments)
        self.stage(weight.name, rows, [few], [tiles], [one])
        if addition is not None:
            self.used(addition.b if addition.a is op.out else addition.a)
        self.used(op.x)

    def rotate(self, op: Rotate) -> None:
        x, y = self.where[op.x.index], self.value(op.out)
        constants = {
            "WIDTH": op.x.width, "STRIDE": x.stride, "HEAD": op.head_dim, "N_ROT": op.rope.n_rot,
            "NEOX": op.rope.style == "neox",
        }  # fmt: skip
        self.out.ropes.add(op.rope)
        kernel = kernels.rotate(self.limits, constants)
        grid = (-(-op.x.width // 128), ("batch", 1, 1), 1)
        self.stage("rotate", "batch", [Launch(kernel, grid, (x, "step", op.rope, y))])
        self.used(op.x)

    def append(self, op: Append) -> None:
        k, v, layer = self.where[op.k.index], self.where[op.v.index], self.plan.layers[op.layer]
        constants = {
            "WIDTH": op.k.width, "STRIDE": k.stride, "HEAD": layer.head_dim, "KV_HEADS": layer.kv_heads,
            "SLOTS_AT": 6 if has_own_blocks(layer, self.limits) else 2,
        }  # fmt: skip
        kernel = kernels.append(self.limits, constants)
        arguments = (k, v, "step", f"keys:{op.layer}", f"values:{op.layer}")
        self.stage("append", "batch", [Launch(kernel, (-(-op.k.width // 128), ("batch", 1, 1), 1), arguments)])
        self.used(op.k, op.v)

    def attention(self, op: Attention) -> None:
        q, y, layer = self.where[op.q.index], self.value(op.out), self.plan.layers[op.layer]
        group = op.heads // layer.kv_heads
        constants = {
            "HEADS": op.heads, "KV_HEADS": layer.kv_heads, "HEAD": layer.head_dim, "Q_STRIDE": q.stride,
            "FACTOR": float(op.scale), "WINDOW": op.window, "HAS_SOFTCAP": op.softcap > 0.0,
            "SOFTCAP": float(op.softcap), "HAS_SINKS": op.sinks is not None,
            "TABLE_STRIDE_AT": 3 if has_own_blocks(layer, self.limits) else 2,
        }  # fmt: skip
        tables = "window tables" if has_own_blocks(layer, self.limits) else "tables"
        grouped = min(group, GROUPED)
        made = {
            stage: kernels.attention(stage, self.limits, grouped, constants)
            for stage in ("attend_partition", "attend_combine", "attend_tile")
        }
        partial = FEW_ROWS * op.heads * kernels.partitions(self.limits) * (layer.head_dim + 2) * 4
        self.out.lists["partial"] = max(self.out.lists.get("partial", 0), partial)
        cache, sinks = (f"keys:{op.layer}", f"values:{op.layer}"), self.vector(op.sinks)
        heads = layer.kv_heads * -(-group // grouped)
        few = [
            Launch(
                made["attend_partition"], (heads, ("partitions", 1, 1), ("batch", 1, 1)),
                (q, "step", tables, *cache, "partial"),
            ),
            Launch(made["attend_combine"], (op.heads, ("batch", 1, 1), 1), ("partial", "step", sinks, y)),
        ]  # fmt: skip
        arguments = (q, "step", tables, *cache, sinks, y)
        self.stage("attention", "batch", few, [Launch(made["attend_tile"], (op.heads, ("tiles", 1, 1), 1), arguments)])
        self.used(op.q)

    def elements(self, label: str, operation: str, out: Value, a: Value, b: Value, **more: float) -> None:
        of = self.where[a.index], self.where[b.index]
        y = self.value(out)
        kernel = kernels.elements(operation, {"WIDTH": out.width, "STRIDE": y.stride, **more})
        self.stage(label, out.rows, [Launch(kernel, (-(-out.width // 128), (out.rows, 1, 1), 1), (*of, y))])

    def add(self, op: Add) -> None:
        self.elements("add", "(a) + (b)", op.out, op.a, op.b)
        self.used(op.a, op.b)

    def scale(self, op: Scale) -> None:
        self.elements("scale", "(a) * FACTOR", op.out, op.x, op.x, FACTOR=float(op.factor))
        self.used(op.x)

    def activate(self, op: Activate) -> None:
        self.elements(op.activation, f"{op.activation}(a)", op.out, op.x, op.x)
        self.used(op.x)

    def softcap(self, op: Softcap) -> None:
        operation = "FACTOR * hyperbolic_tangent((a) / FACTOR)"
        self.elements("softcap", operation, op.out, op.x, op.x, FACTOR=float(op.cap))
        self.used(op.x)

    def glu(self, op: Glu) -> None:
        one_a_row = {"GATE_STRIDE": 1} if op.gate.width == 1 and op.up.width > 1 else {}
        self.elements("glu", _glu(op.activation), op.out, op.gate, op.up, **one_a_row)
        self.used(op.gate, op.up)

    def select(self, op: SelectRows) -> None:
        x, y = self.where[op.x.index], self.value(op.out)
        kernel = kernels.select_rows(self.limits, {"WIDTH": op.out.width, "STRIDE": y.stride})
        grid = (-(-op.out.width // 128), ("logits", 1, 1), 1)
        self.stage("select", "logits", [Launch(kernel, grid, (x, "step", y))])
        self.used(op.x)

    def largest(self, logits: Buffer) -> None:
        reads = largest.passes(logits.stride, largest.MOST)
        self.out.lists[PICKED] = 4 * largest.NUMBERS
        for number, count in enumerate(reads):
            keys = -(-count // SORTED) * largest.MOST * self.limits.logit_rows
            self.out.lists[KEYS[number % 2]] = max(8 * keys, self.out.lists.get(KEYS[number % 2], 0))
            kernel = kernels.largest(number, {"STRIDE": logits.stride})
            read = KEYS[(number + 1) % 2] if number else NOTHING
            grid: tuple[Dimension, Dimension, Dimension] = ((f"keys {number}", SORTED, 1), ("logits", 1, 1), 1)
            self.out.picks.append(Launch(kernel, grid, (logits, PICKED, read, KEYS[number % 2])))

    # -- mixture of experts: a row and an expert of its choice are a pair ---------------------------------------------

    def experts(self, op: Experts) -> None:
        rows, used, ffn = op.x.rows, op.used, op.gate.weight.shape[1]
        router = self.where[op.router.index]
        pairs = {"batch": self.limits.rows, "logits": self.limits.logit_rows}[rows] * used
        choices, weights = f"choices:{op.out.index}", f"weights of choices:{op.out.index}"
        self.out.lists |= {choices: 4 * pairs, weights: 4 * pairs}
        for stack in (op.gate, op.up, op.down):
            formats.check(stack.weight)
        constants: dict[str, Any] = {
            "STRIDE": router.stride, "GATING": ("softmax", "sigmoid", "softmax_of_chosen").index(op.gating),
            "NORMALIZE": op.normalize, "FACTOR": float(op.scale), "HAS_BIAS": op.choice_bias is not None,
        }  # fmt: skip
        kernel = kernels.route(op.router.width, used, constants)
        arguments: tuple[Argument, ...] = (router, self.vector(op.choice_bias), choices, weights)
        self.stage("route", rows, [Launch(kernel, ((rows, 1, 1), 1, 1), arguments)])
        gate, up = (self.take(rows, ffn * used) for _ in range(2))
        for stack, y in ((op.gate, gate), (op.up, up)):
            x, stride = self.input_of(op.x, stack.weight)
            self.multiply(stack, rows, x, stride, y, used, used, choices)
        self.used(op.x, op.router)
        hidden = self.take(rows, ffn * used)
        kernel = kernels.elements(_glu(op.activation), {"WIDTH": ffn * used, "STRIDE": ffn * used})
        self.stage("glu", rows, [Launch(kernel, (-(-ffn * used // 128), (rows, 1, 1), 1), (gate, up, hidden))])
        x, stride = hidden, ffn
        if op.down.weight.format in formats.QUANTIZED:
            x, stride = self.quantize(rows, hidden, ffn, used), ffn * 11 // 32
        mixed = self.take(rows, op.out.width * used)
        self.multiply(op.down, rows, x, stride, mixed, 1, used, choices)
        y = self.value(op.out)
        kernel = kernels.combine({"WIDTH": op.out.width, "STRIDE": op.out.width, "USED": used})
        grid = (-(-op.out.width // 128), (rows, 1, 1), 1)
        self.stage("combine", rows, [Launch(kernel, grid, (mixed, weights, y))])
        if op.out in self.keep:
            self.out.routings[op.out.index] = choices, hidden, used
        else:
            self.give(hidden)
        for buffer in {gate, up, mixed, x} - {hidden}:
            self.give(buffer)

    def multiply(
        self, stack: Stack, rows: Rows, x: Buffer, stride: int, y: Buffer, per_row: int, used: int, choices: str
    ) -> None:
        """Every pair's product with its expert's matrix; `per_row` pairs read the same input."""
        weight = stack.weight
        count, n, k = weight.shape
        constants = {
            "K": k, "N": n, "X_STRIDE": stride, "Y_STRIDE": n, "EXPERTS": count, "PER_ROW": per_row,
            "HAS_SCALES": stack.scale is not None, "HAS_BIAS": stack.bias is not None, "HAS_RESIDUAL": False,
            "COUNT_AT": int(rows == "logits"), "FACTOR": 1.0, "RESIDUAL_STRIDE": 0,
        }  # fmt: skip
        arguments = (
            self.matrix(weight), x, y, "step", self.vector(stack.bias), NOTHING, choices, self.vector(stack.scale)
        )  # fmt: skip
        kernel = kernels.matvec(weight.format, 1, constants)
        self.stage(weight.name, rows, [Launch(kernel, (-(-n // 4), (rows, 1, used), 1), arguments)])


def _glu(activation: str) -> str:
    return "swiglu_oai(a, b)" if activation == "swiglu_oai" else f"{activation}(a) * (b)"


def program(plan: Plan, limits: Limits, keep: Collection[Value] = ()) -> Program:
    """Stages, buffers and kernels of a plan."""
    return _Binder(plan, limits, keep).run()


def has_own_blocks(layer: CacheLayer, limits: Limits) -> bool:
    """Whether the layer goes by the tables of the window."""
    return bool(layer.window and limits.window_blocks)


def block_bytes(plan: Plan) -> tuple[int, ...]:
    """Of one cache block by layer, half of it keys and half values, as halves."""
    return tuple(BLOCK * layer.kv_heads * layer.head_dim * 4 for layer in plan.layers)


def cache_bytes(plan: Plan, limits: Limits) -> tuple[int, ...]:
    """Of all blocks of a layer, by layer."""
    return tuple(limits.blocks_of(layer) * size for layer, size in zip(plan.layers, block_bytes(plan), strict=True))
