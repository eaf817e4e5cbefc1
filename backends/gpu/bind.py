"""From a plan to launches: every value gets a buffer, every operation one or a few kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from localllm.backends.base import BackendError, CacheTypes, Limits
from localllm.backends.gpu import cachetypes, formats, kernels, largest
from localllm.backends.gpu.bind_experts import Mixtures
from localllm.backends.gpu.binding import Delivery
from localllm.backends.gpu.cachetypes import CACHE
from localllm.backends.gpu.kernels import FEW_ROWS, SORTED, TILE_ROWS
from localllm.backends.gpu.program import (
    KEYS,
    NOTHING,
    PICKED,
    Argument,
    Buffer,
    Dimension,
    Launch,
    Program,
)
from localllm.backends.stages import Stage
from localllm.plan import (
    Activate,
    Add,
    Append,
    Attention,
    Embed,
    Experts,
    Glu,
    HeadsAppend,
    Linear,
    LinearAdd,
    LinearGlu,
    LinearGroup,
    Norm,
    Operation,
    Plan,
    Receive,
    Rotate,
    Scale,
    SelectRows,
    Send,
    Softcap,
    Value,
)  # fmt: skip
from localllm.plan.rewrites.fusion import fuse, fuse_additions, fuse_heads, fuse_linears

PASSES = (fuse_additions, fuse_linears, fuse_heads)  # fuse_linears makes groups of as many as MOST_TOGETHER
QUERY = ("HEAD", "HEADS", "Q_STRIDE", "KEY_TYPE", "KEY_SIZE", "ROTATION")  # what preparing queries is told


class _Binder(Mixtures):
    def run(self) -> Program:
        plan = self.plan
        for numbers in plan.stages:
            first, self.received, self.sent = len(self.out.dispatches), [], []
            self.emit(numbers)
            work = slice(first, len(self.out.dispatches))
            self.out.stages.append(Stage(work, tuple(self.received), tuple(self.sent)))
        self.out.where = {value.index: self.where[value.index] for value in self.keep}
        if logits := self.where.get(plan.logits.index):
            self.out.where[plan.logits.index] = logits
            self.largest(logits)
        return self.out

    def receive(self, op: Receive) -> None:
        self.received += [(value, self.value(value)) for value in op.values]

    def send(self, op: Send) -> None:
        self.sent += [(value, self.where[value.index]) for value in op.values]
        self.used(*op.values)

    def emit(self, numbers: range) -> None:
        """Emit the dispatches of the operations with these numbers."""
        emit: dict[type[Operation], Callable[[Any], None]] = {
            Embed: self.embed, Norm: self.norm, Rotate: self.rotate, Attention: self.attention, Glu: self.glu,
            Add: self.add, Scale: self.scale, SelectRows: self.select, Activate: self.activate, Softcap: self.softcap,
            Experts: self.experts, Linear: self.linear, LinearAdd: self.linear_add, LinearGroup: self.group_of_linears,
            LinearGlu: self.gated, Append: self.append, HeadsAppend: self.heads_append,
            Receive: self.receive, Send: self.send,
        }  # fmt: skip
        for number in numbers:
            op = self.plan.operations[number]
            if type(op) not in emit:
                raise BackendError(
                    f"there are no kernels for {type(op).__name__.lower()} on a graphics card yet; use --backend cpu"
                )
            emit[type(op)](op)

    def embed(self, op: Embed) -> None:
        weight, y = op.table, self.value(op.out)
        matrix = self.matrix(weight)
        chunks = op.out.width // 32 if weight.format in formats.QUANTIZED else op.out.width
        constants = {"K": op.out.width, "N": weight.shape[0], "Y_STRIDE": y.stride}
        kernel = kernels.embed(weight.format, self.limits, constants)
        grid = (-(-chunks // 64), ("batch", 1, 1), 1)
        self.dispatch("embed", "batch", [Launch(kernel, grid, (matrix, "step", y))])

    def norm(self, op: Norm) -> None:
        x, width = self.where[op.x.index], op.x.width // op.groups
        to = self.deliver(op.out) if op.groups == 1 else Delivery(self.value(op.out))
        constants = {
            "K": width, "X_STRIDE": x.stride, "Y_STRIDE": op.out.width, "LAYER": op.kind == "layer",
            "EPS": float(op.eps), "HAS_BIAS": op.bias is not None,
            "GROUP_STRIDE": width if len(op.weight.shape) > 1 else 0, **to.constants,
        }  # fmt: skip
        arguments = (x, self.vector(op.weight), self.vector(op.bias), *to.arguments)
        self.dispatch(
            "norm", op.x.rows, [Launch(kernels.norm(constants), (op.groups, (op.x.rows, 1, 1), 1), arguments)]
        )
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
        self.dispatch("rotate", "batch", [Launch(kernel, grid, (x, "step", op.rope, y))])
        self.used(op.x)

    def heads_append(self, op: HeadsAppend) -> None:
        self.append(op.append, op)

    def append(self, op: Append, fused: HeadsAppend | None = None) -> None:
        """Keys and values to the cache; `fused`: queries and keys that are normed and rotated on the way."""
        layer, v = self.plan.layers[op.layer], self.where[op.v.index]
        constants = {
            **cachetypes.constants(self.cache, layer), "STRIDE": v.stride, "ROTATED": fused is not None,
            "SLOTS_AT": 6 if self.limits.own_blocks(layer) else 2,
        }  # fmt: skip
        cache, groups = (f"keys:{op.layer}", f"values:{op.layer}"), 2 * layer.kv_heads
        if fused is None:
            arguments: tuple[Argument, ...] = (self.where[op.k.index], v, "step", *cache)
        else:
            query, key = fused.query, fused.key
            q, k, rope = self.where[query.x.index], self.where[key.x.index], key.rotation.rope
            constants |= {"Q_STRIDE": q.stride, "N_ROT": rope.n_rot, "NEOX": rope.style == "neox"}
            if key.norm is not None:
                constants |= {"NORMED": True, "EPS": float(key.norm.eps)}
            self.out.ropes |= {query.rotation.rope, rope}
            weights = [self.vector(heads.norm.weight if heads.norm else None) for heads in (key, query)]
            arguments = (k, v, "step", *cache, q, rope, query.rotation.rope, *weights, self.value(query.rotation.out))
            groups += query.x.width // layer.head_dim
        kernel = kernels.append(self.limits, constants)
        self.dispatch("append", "batch", [Launch(kernel, (groups, ("batch", 1, 1), 1), arguments)])
        self.used(*(op.inputs if fused is None else fused.inputs))

    def attention(self, op: Attention) -> None:
        q, layer = self.where[op.q.index], self.plan.layers[op.layer]
        to = self.deliver(op.out) if layer.head_dim % 32 == 0 else Delivery(self.value(op.out))
        tiled = to.floats or self.take("batch", op.out.width)  # what tiles make is floats
        group = op.heads // layer.kv_heads
        constants: dict[str, Any] = {
            **cachetypes.constants(self.cache, layer), "HEADS": op.heads, "Q_STRIDE": q.stride,
            "FACTOR": float(op.scale), "WINDOW": op.window, "HAS_SOFTCAP": op.softcap > 0.0,
            "SOFTCAP": float(op.softcap), "HAS_SINKS": op.sinks is not None,
            "TABLE_STRIDE_AT": 3 if self.limits.own_blocks(layer) else 2,
        }  # fmt: skip
        tables = "window tables" if self.limits.own_blocks(layer) else "tables"
        made = {
            stage: kernels.attention(stage, self.limits, {**constants, **more})
            for stage, more in (("attend_partition", {}), ("attend_combine", to.constants), ("attend_tile", {}))
        }
        partial = FEW_ROWS * op.heads * kernels.partitions(self.limits) * (layer.head_dim + 2) * 4
        self.out.lists["partial"] = max(self.out.lists.get("partial", 0), partial)
        cache, sinks = (f"keys:{op.layer}", f"values:{op.layer}"), self.vector(op.sinks)
        heads = layer.kv_heads * -(-group // kernels.grouped(group))
        queries = q
        if CACHE[self.cache.keys].type.blocks:
            queries = self.take("batch", op.heads * constants["KEY_SIZE"] * 5 // 16)  # bytes, two numbers per 32
            kernel = kernels.prepare_queries({name: constants[name] for name in QUERY})
            self.dispatch("queries", "batch", [Launch(kernel, (op.heads, ("batch", 1, 1), 1), (q, queries))])
            self.give(queries)
        few = [
            Launch(
                made["attend_partition"], (heads, ("partitions", 1, 1), ("batch", 1, 1)),
                (queries, "step", tables, *cache, "partial"),
            ),
            Launch(made["attend_combine"], (op.heads, ("batch", 1, 1), 1), ("partial", "step", sinks, *to.arguments)),
        ]  # fmt: skip
        arguments = (queries, "step", tables, *cache, sinks, tiled)
        tile = made["attend_tile"]
        of_tile = TILE_ROWS // kernels.tile(constants)[0]
        many = [Launch(tile, (op.heads, ("tiles", 1, of_tile), 1), arguments)]
        if to.blocks is not None:
            only = Delivery(None, to.blocks, to.block_words)
            many.append(self.rowwise("batch", "a", tiled, tiled, op.out.width, only))
        self.dispatch("attention", "batch", few, many)
        if to.floats is None:
            self.give(tiled)
        self.used(op.q)

    def elements(self, label: str, operation: str, out: Value, a: Value, b: Value, **more: float) -> None:
        of = self.where[a.index], self.where[b.index]
        self.dispatch(label, out.rows, [self.rowwise(out.rows, operation, *of, out.width, self.deliver(out), 1, more)])

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

    def select(self, op: SelectRows) -> None:
        x, to = self.where[op.x.index], self.deliver(op.out)
        kernel = kernels.select_rows(self.limits, {"WIDTH": op.out.width, "STRIDE": x.stride, **to.constants})
        grid = (-(-op.out.width // 128), ("logits", 1, 1), 1)
        self.dispatch("select", "logits", [Launch(kernel, grid, (x, "step", *to.arguments))])
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


def program(plan: Plan, limits: Limits, cache: CacheTypes, keep: Collection[Value] = (), compute: str = "") -> Program:
    """Dispatches, buffers and kernels of a plan on a device of this compute type."""
    return _Binder(fuse(plan, PASSES, keep), limits, cache, keep, compute).run()
