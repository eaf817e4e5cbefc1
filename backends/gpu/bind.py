"""From a plan to launches: every value gets a buffer, every operation one or a few kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from backends.base import BackendError, CacheTypes, Limits
from backends.gpu import cachetypes, formats, kernels, largest
from backends.gpu.bind_products import Products, glu_expression
from backends.gpu.cachetypes import CACHE
from backends.gpu.kernels import FEW_ROWS, SORTED, TILE_ROWS
from backends.gpu.program import KEYS, NOTHING, PICKED, Buffer, Dimension, Launch, PartStages, Program, has_own_blocks
from backends.plan import (
    Activate,
    Add,
    Append,
    Attention,
    Embed,
    Experts,
    Glu,
    Linear,
    Norm,
    Operation,
    Plan,
    Rotate,
    Scale,
    SelectRows,
    Softcap,
    Value,
)  # fmt: skip
from backends.usage import additions_into_linears

QUERY = ("HEAD", "HEADS", "Q_STRIDE", "KEY_TYPE", "KEY_SIZE", "ROTATION")  # what preparing queries is told


class _Binder(Products):
    def run(self) -> Program:
        fused = additions_into_linears(self.plan, self.uses)
        for part in self.plan.parts:
            enters, first = tuple([self.value(value) for value in part.enters]), len(self.out.stages)
            self.emit(range(part.start, part.stop), fused)
            leaves = tuple([self.where[value.index] for value in part.leaves])
            self.used(*part.leaves)
            self.out.parts.append(PartStages(slice(first, len(self.out.stages)), enters, leaves))
        kept = [*self.keep, self.plan.logits]
        self.out.where = {value.index: self.where[value.index] for value in kept}
        self.largest(self.where[self.plan.logits.index])
        return self.out

    def emit(self, numbers: range, fused: dict[int, int]) -> None:
        """Stages of the operations with these numbers; `fused`: additions that linears make."""
        emit: dict[type[Operation], Callable[[Any], None]] = {
            Embed: self.embed, Norm: self.norm, Rotate: self.rotate, Append: self.append, Attention: self.attention,
            Glu: self.glu, Add: self.add, Scale: self.scale, SelectRows: self.select, Activate: self.activate,
            Softcap: self.softcap, Experts: self.experts,
        }  # fmt: skip
        operations = self.plan.operations
        for number in numbers:
            op = operations[number]
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
            **cachetypes.constants(self.cache, layer), "STRIDE": k.stride,
            "SLOTS_AT": 6 if has_own_blocks(layer, self.limits) else 2,
        }  # fmt: skip
        kernel = kernels.append(self.limits, constants)
        arguments = (k, v, "step", f"keys:{op.layer}", f"values:{op.layer}")
        self.stage("append", "batch", [Launch(kernel, (layer.kv_heads, ("batch", 1, 1), 2), arguments)])
        self.used(op.k, op.v)

    def attention(self, op: Attention) -> None:
        q, y, layer = self.where[op.q.index], self.value(op.out), self.plan.layers[op.layer]
        group = op.heads // layer.kv_heads
        constants: dict[str, Any] = {
            **cachetypes.constants(self.cache, layer), "HEADS": op.heads, "Q_STRIDE": q.stride,
            "FACTOR": float(op.scale), "WINDOW": op.window, "HAS_SOFTCAP": op.softcap > 0.0,
            "SOFTCAP": float(op.softcap), "HAS_SINKS": op.sinks is not None,
            "TABLE_STRIDE_AT": 3 if has_own_blocks(layer, self.limits) else 2,
        }  # fmt: skip
        tables = "window tables" if has_own_blocks(layer, self.limits) else "tables"
        made = {
            stage: kernels.attention(stage, self.limits, constants)
            for stage in ("attend_partition", "attend_combine", "attend_tile")
        }
        partial = FEW_ROWS * op.heads * kernels.partitions(self.limits) * (layer.head_dim + 2) * 4
        self.out.lists["partial"] = max(self.out.lists.get("partial", 0), partial)
        cache, sinks = (f"keys:{op.layer}", f"values:{op.layer}"), self.vector(op.sinks)
        heads = layer.kv_heads * -(-group // kernels.grouped(group))
        queries = q
        if CACHE[self.cache.keys].type.blocks:
            queries = self.take("batch", op.heads * constants["KEY_SIZE"] * 5 // 16)  # bytes, two numbers per 32
            kernel = kernels.prepare_queries({name: constants[name] for name in QUERY})
            self.stage("queries", "batch", [Launch(kernel, (op.heads, ("batch", 1, 1), 1), (q, queries))])
            self.give(queries)
        few = [
            Launch(
                made["attend_partition"], (heads, ("partitions", 1, 1), ("batch", 1, 1)),
                (queries, "step", tables, *cache, "partial"),
            ),
            Launch(made["attend_combine"], (op.heads, ("batch", 1, 1), 1), ("partial", "step", sinks, y)),
        ]  # fmt: skip
        arguments = (queries, "step", tables, *cache, sinks, y)
        tile = made["attend_tile"]
        of_tile = TILE_ROWS // kernels.tile(constants)[0]
        self.stage("attention", "batch", few, [Launch(tile, (op.heads, ("tiles", 1, of_tile), 1), arguments)])
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
        self.elements("glu", glu_expression(op.activation), op.out, op.gate, op.up, **one_a_row)
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


def program(plan: Plan, limits: Limits, cache: CacheTypes, keep: Collection[Value] = (), compute: str = "") -> Program:
    """Stages, buffers and kernels of a plan on a device of this compute type."""
    return _Binder(plan, limits, cache, keep, compute).run()
