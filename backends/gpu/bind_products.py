"""Products of matrices with rows of activations: linear operations, alone, side by side, and with the glu of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.backends.gpu import formats, kernels, products
from localllm.backends.gpu.binding import Binding, Delivery
from localllm.backends.gpu.kernels import COLUMNS, PLAIN_TILE, Kernel, Tile
from localllm.backends.gpu.products import EXPERTS_TILE, SOME_ROWS, block_words
from localllm.backends.gpu.program import NOTHING, Argument, Buffer, Dimension, Launch
from localllm.plan import Glu, Linear, LinearAdd, LinearGlu, LinearGroup, Rows, Value, Weight

MOST_TOGETHER = 3  # matrices of one launch


@dataclass(frozen=True, slots=True)
class Input:
    buffer: Buffer
    stride: int  # words of a row


class Products(Binding):
    """Binds what multiplies."""

    def rowwise(
        self, rows: Rows, operation: str, a: Buffer, b: Buffer, width: int, to: Delivery, times: int = 1,
        more: Mapping[str, float] | None = None,
    ) -> Launch:  # fmt: skip
        """OPERATION(a, b) number by number; `times` rows of `width` numbers a row of the batch."""
        kernel = kernels.elements(operation, {"WIDTH": width, "STRIDE": width, **to.constants, **(more or {})})
        return Launch(kernel, (-(-width // 128), (rows, 1, times), 1), (a, b, *to.arguments))

    def split(self, rows: Rows, x: Buffer, width: int, format: str, terms: int, times: int) -> Buffer:
        """What tensor cores read of `times` inputs of `width` numbers a row, where a matrix is of 16-bit numbers."""
        stride = terms * width // 2 + 4  # words; a multiple of 16 bytes
        y = self.take(rows, stride * times)
        kernel = kernels.split(format, terms, {"K": width, "X_STRIDE": width, "Y_STRIDE": stride})
        self.dispatch("split", rows, (), [Launch(kernel, (1, (rows, 1, times), 1), (x, y))])
        return y

    def inputs(self, value: Value, weight: Weight) -> tuple[Input, Input]:
        """What the mat-vec and the tiles of a product of a value with `weight` read."""
        made = self.prepared.setdefault(value.index, {})
        return self.prepare(self.where.get(value.index), made, weight, value.rows, 1)

    def prepare(
        self, own: Buffer | None, made: dict[str, Buffer], weight: Weight, rows: Rows, times: int
    ) -> tuple[Input, Input]:
        """Float rows as they are, `times` a row; activation blocks and split rows, which are added to `made` once."""
        width = weight.shape[-1]
        if weight.format in formats.QUANTIZED:
            words = block_words(width)
            if "int8" not in made:  # whoever made the value made no blocks
                assert own is not None
                made["int8"] = self.take(rows, words * times)
                to = Delivery(None, made["int8"], words)
                self.dispatch("quantize", rows, [self.rowwise(rows, "a", own, own, width, to, times)])
            return (Input(made["int8"], words),) * 2
        assert own is not None
        terms = products.terms(weight.format, width, self.compute)
        if terms is None:
            return (Input(own, width),) * 2
        if weight.format not in made:
            made[weight.format] = self.split(rows, own, width, weight.format, terms, times)
        return Input(own, width), Input(made[weight.format], terms * width // 2 + 4)

    def linear_add(self, op: LinearAdd) -> None:
        self.linear(op.linear, op)

    def linear(self, op: Linear, fused: LinearAdd | None = None) -> None:
        weight, rows = op.weight, op.x.rows
        narrow, wide = self.inputs(op.x, weight)
        residual: Argument = NOTHING
        out = op.out
        if fused is not None:
            residual = self.where[fused.other.index]
            out = fused.add.out
        y = self.value(out)
        constants = self.constants(op, narrow) | {"HAS_RESIDUAL": fused is not None}
        arguments = (self.matrix(weight), narrow.buffer, y, "step", self.vector(op.bias), residual)
        one, few = (
            Launch(kernels.matvec(weight.format, columns, constants), self.grid(rows, y.stride, 4, columns), arguments)
            for columns in (1, COLUMNS)
        )
        some, many = self.tiles(op, wide, y, residual)
        self.dispatch(weight.name, rows, [few], [many], [one], [some])
        self.used(*(op.inputs if fused is None else fused.inputs))

    def grid(self, rows: Rows, n: int, each: int, columns: int) -> tuple[Dimension, Dimension, Dimension]:
        """Of work-groups that have `each` of n rows of a matrix, and so many rows of activations."""
        return -(-n // each), (rows, columns, 1), 1

    def constants(self, op: Linear, x: Input) -> dict[str, Any]:
        """What kernels are told of a product."""
        n, k = op.weight.shape
        return {
            "K": k, "N": n, "X_STRIDE": x.stride, "Y_STRIDE": n, "RESIDUAL_STRIDE": n, "FACTOR": float(op.scale),
            "COUNT_AT": int(op.x.rows == "logits"), "HAS_BIAS": op.bias is not None,
        }  # fmt: skip

    def tiles(self, op: Linear, x: Input, y: Buffer, residual: Argument = NOTHING) -> tuple[Launch, Launch]:
        """The product with some rows and with many."""
        weight, most = op.weight, self.most[op.x.rows]
        constants = self.constants(op, x) | {"HAS_RESIDUAL": residual != NOTHING}
        arguments = (self.matrix(weight), x.buffer, y, "step", self.vector(op.bias), residual)
        some, many = (
            Launch(kernel, self.grid(op.x.rows, y.stride, tile.w, tile.x), arguments)
            for kernel, tile in (self.tile(weight, limit, constants) for limit in (min(most, SOME_ROWS), most))
        )
        return some, many

    # -- several products of the same rows in one launch, where rows are few -------------------------------------------

    def group_of_linears(self, op: LinearGroup) -> None:
        ops = op.linears
        x, format = ops[0].x, ops[0].weight.format
        narrow, wide = self.inputs(x, ops[0].weight)
        ys = [self.value(op.out) for op in ops]
        constants = {name: value for name, value in self.constants(ops[0], narrow).items() if "Y_" not in name}
        constants |= {"N1": ops[1].out.width, "FACTOR1": float(ops[1].scale)}
        constants |= {"N2": sum(op.out.width for op in ops[2:]), "FACTOR2": float(ops[-1].scale)}
        arguments = (
            *_three([self.matrix(op.weight) for op in ops]), narrow.buffer, *_three(ys), "step",
            *_three([self.vector(op.bias) for op in ops]),
        )  # fmt: skip
        groups = sum(-(-op.out.width // 4) for op in ops)
        one, few = (
            Launch(kernels.together(format, columns, constants), self.grid(x.rows, groups, 1, columns), arguments)
            for columns in (1, COLUMNS)
        )
        some, many = zip(*(self.tiles(op, wide, y) for op, y in zip(ops, ys, strict=True)), strict=True)
        self.dispatch(ops[0].weight.name, x.rows, [few], many, [one], some)
        self.used(x)

    def gated(self, op: LinearGlu) -> None:
        gate, up, glu = op.gate, op.up, op.glu
        x, n, format = gate.x, gate.out.width, gate.weight.format
        narrow, wide = self.inputs(x, gate.weight)
        to = self.deliver(glu.out)
        constants = {name: value for name, value in self.constants(gate, narrow).items() if "Y_" not in name}
        constants |= {"FACTOR1": float(up.scale), **to.constants}
        expression = glu_expression(glu.activation)
        arguments = (
            self.matrix(gate.weight), self.matrix(up.weight), narrow.buffer, *to.arguments, "step",
            self.vector(gate.bias), self.vector(up.bias),
        )  # fmt: skip
        one, few = (
            Launch(kernels.gated(format, columns, expression, constants), self.grid(x.rows, n, 32, columns), arguments)
            for columns in (1, COLUMNS)
        )
        ys = self.take(x.rows, n), self.take(x.rows, n)  # for the tiles of many rows
        both = [self.tiles(op, wide, y) for op, y in zip((gate, up), ys, strict=True)]
        last = self.rowwise(x.rows, expression, *ys, n, to)
        some, many = ([*launches, last] for launches in zip(*both, strict=True))
        self.dispatch(gate.weight.name, x.rows, [few], many, [one], some)
        for y in ys:
            self.give(y)
        self.used(x)

    def glu(self, op: Glu) -> None:
        one_a_row = {"GATE_STRIDE": 1} if op.gate.width == 1 and op.up.width > 1 else {}
        of = self.where[op.gate.index], self.where[op.up.index]
        launch = self.rowwise(
            op.out.rows, glu_expression(op.activation), *of, op.out.width, self.deliver(op.out), 1, one_a_row
        )
        self.dispatch("glu", op.out.rows, [launch])
        self.used(op.gate, op.up)

    def tile(self, weight: Weight, rows: int, constants: dict[str, Any]) -> tuple[Kernel, Tile]:
        """The kernel for a product with at most so many rows, and its tile."""
        terms = products.terms(weight.format, weight.shape[-1], self.compute)
        if terms is None:
            return kernels.matmul(weight.format, constants), PLAIN_TILE
        tile = EXPERTS_TILE if "EXPERTS" in constants else products.tile_of(weight.format, weight.shape[-2], rows)
        return kernels.tensor(weight.format, tile, terms, constants), tile


def _three(arguments: Sequence[Argument]) -> list[Argument]:
    return [*arguments, *[NOTHING] * (MOST_TOGETHER - len(arguments))]


def glu_expression(activation: str) -> str:
    return "swiglu_oai(a, b)" if activation == "swiglu_oai" else f"{activation}(a) * (b)"
