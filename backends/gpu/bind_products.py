"""Products of matrices with rows of activations: linear operations, and the mixture of experts around three of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backends.gpu import formats, kernels, products
from backends.gpu.binding import Binding
from backends.gpu.kernels import COLUMNS, FEW_ROWS, PLAIN_TILE, Kernel, Tile
from backends.gpu.products import EXPERTS_TILE, SOME_ROWS
from backends.gpu.program import NOTHING, Argument, Buffer, Launch
from backends.plan import Add, Experts, Linear, Rows, Stack, Value, Weight


@dataclass(frozen=True, slots=True)
class _Input:
    buffer: Buffer
    stride: int  # words of a row


class Products(Binding):
    """Binds what multiplies."""

    def quantize(self, rows: Rows, x: Buffer, width: int, times: int = 1) -> Buffer:
        """Activation blocks of `times` inputs of `width` numbers a row."""
        stride = width * 11 // 32  # words: a byte a value, a scale a block, a sum a half
        y = self.take(rows, stride * times)
        kernel = kernels.quantize({"K": width, "X_STRIDE": width, "Y_STRIDE": stride})
        self.stage("quantize", rows, [Launch(kernel, (-(-width // 128), (rows, 1, times), 1), (x, y))])
        return y

    def split(self, rows: Rows, x: Buffer, width: int, format: str, terms: int, times: int = 1) -> Buffer:
        """What tensor cores read of `times` inputs of `width` numbers a row, where a matrix is of 16-bit numbers."""
        stride = terms * width // 2 + 4  # words; a multiple of 16 bytes
        y = self.take(rows, stride * times)
        kernel = kernels.split(format, terms, {"K": width, "X_STRIDE": width, "Y_STRIDE": stride})
        self.stage("split", rows, (), [Launch(kernel, (1, (rows, 1, times), 1), (x, y))])
        return y

    def inputs(self, value: Value | Buffer, rows: Rows, weight: Weight, times: int = 1) -> tuple[_Input, _Input]:
        """What the mat-vec and the tiles of a product with `weight` read: float rows, activation blocks, split rows.

        Of a value they are made once; of a buffer, of `times` rows each, they are given back by whoever asked."""
        width = weight.shape[-1]
        terms = products.terms(weight.format, width, self.compute)
        own = self.where[value.index] if isinstance(value, Value) else value
        made = self.prepared.setdefault(value.index, {}) if isinstance(value, Value) else {}
        if weight.format in formats.QUANTIZED:
            if "int8" not in made:
                made["int8"] = self.quantize(rows, own, width, times)
            return (_Input(made["int8"], width * 11 // 32),) * 2
        plain = _Input(own, width)
        if terms is None:
            return plain, plain
        if weight.format not in made:
            made[weight.format] = self.split(rows, own, width, weight.format, terms, times)
        return plain, _Input(made[weight.format], terms * width // 2 + 4)

    def linear(self, op: Linear, addition: Add | None) -> None:
        weight, rows = op.weight, op.x.rows
        matrix, n = self.matrix(weight), op.weight.shape[0]
        narrow, wide = self.inputs(op.x, rows, weight)
        residual: Argument = NOTHING
        out = op.out
        if addition is not None:
            residual = self.where[(addition.b if addition.a is op.out else addition.a).index]
            out = addition.out
        y, bias = self.value(out), self.vector(op.bias)
        constants = {
            "K": weight.shape[-1], "N": n, "X_STRIDE": narrow.stride, "Y_STRIDE": y.stride,
            "COUNT_AT": int(rows == "logits"), "FACTOR": float(op.scale), "HAS_BIAS": op.bias is not None,
            "HAS_RESIDUAL": addition is not None, "RESIDUAL_STRIDE": y.stride,
        }  # fmt: skip
        arguments = (matrix, narrow.buffer, y, "step", bias, residual)
        one, few = (
            Launch(kernels.matvec(weight.format, columns, constants), (-(-n // 4), (rows, columns, 1), 1), arguments)
            for columns in (1, COLUMNS)
        )
        constants["X_STRIDE"] = wide.stride
        arguments = (matrix, wide.buffer, y, "step", bias, residual)
        most = self.most[rows]
        some, many = (self.tile(weight, limit, constants) for limit in (min(most, SOME_ROWS), most))
        tiles = [[Launch(kernel, (-(-n // tile.w), (rows, tile.x, 1), 1), arguments)] for kernel, tile in (some, many)]
        self.stage(weight.name, rows, [few], tiles[1], [one], tiles[0])
        if addition is not None:
            self.used(addition.b if addition.a is op.out else addition.a)
        self.used(op.x)

    def tile(self, weight: Weight, rows: int, constants: dict[str, Any]) -> tuple[Kernel, Tile]:
        """The kernel for a product with at most so many rows, and its tile."""
        terms = products.terms(weight.format, weight.shape[-1], self.compute)
        if terms is None:
            return kernels.matmul(weight.format, constants), PLAIN_TILE
        tile = EXPERTS_TILE if "EXPERTS" in constants else products.tile_of(weight.format, weight.shape[-2], rows)
        return kernels.tensor(weight.format, tile, terms, constants), tile

    # -- mixture of experts: a row and an expert of its choice are a pair ---------------------------------------------

    def experts(self, op: Experts) -> None:
        rows, used, ffn = op.x.rows, op.used, op.gate.weight.shape[1]
        router = self.where[op.router.index]
        pairs = self.most[rows] * used
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
        groups = self.group(rows, op.router.width, used, choices)
        gate, up = (self.take(rows, ffn * used) for _ in range(2))
        for stack, y in ((op.gate, gate), (op.up, up)):
            self.multiply(stack, rows, self.inputs(op.x, rows, stack.weight), y, used, used, choices, groups)
        self.used(op.x, op.router)
        hidden = self.take(rows, ffn * used)
        kernel = kernels.elements(glu_expression(op.activation), {"WIDTH": ffn * used, "STRIDE": ffn * used})
        self.stage("glu", rows, [Launch(kernel, (-(-ffn * used // 128), (rows, 1, 1), 1), (gate, up, hidden))])
        inputs = self.inputs(hidden, rows, op.down.weight, used)
        mixed = self.take(rows, op.out.width * used)
        self.multiply(op.down, rows, inputs, mixed, 1, used, choices, groups)
        y = self.value(op.out)
        kernel = kernels.combine({"WIDTH": op.out.width, "STRIDE": op.out.width, "USED": used})
        grid = (-(-op.out.width // 128), (rows, 1, 1), 1)
        self.stage("combine", rows, [Launch(kernel, grid, (mixed, weights, y))])
        if op.out in self.keep:
            self.out.routings[op.out.index] = choices, hidden, used
        else:
            self.give(hidden)
        for buffer in {gate, up, mixed, *(given.buffer for given in inputs)} - {hidden}:
            self.give(buffer)

    def group(self, rows: Rows, experts: int, used: int, choices: str) -> str:
        """The pairs by expert, for tiles; the name of where they stand."""
        most, name = self.most[rows], f"groups of {choices}"
        tiles = -(-most // EXPERTS_TILE.x) * used + experts
        self.out.lists[name] = 4 * (1 + most * used + 3 * tiles)
        constants = {"USED": used, "PAIRS": most * used, "TILE": EXPERTS_TILE.x, "COUNT_AT": int(rows == "logits")}
        launch = [Launch(kernels.group_pairs(experts, constants), (1, 1, 1), (choices, "step", name))]
        some, many = (launch * products.grouped(least, used, experts) for least in (FEW_ROWS + 1, SOME_ROWS + 1))
        self.stage("group", rows, (), many, some=some)
        return name

    def multiply(
        self, stack: Stack, rows: Rows, inputs: tuple[_Input, _Input], y: Buffer, per_row: int, used: int, choices: str,
        groups: str,
    ) -> None:  # fmt: skip
        """Every pair's product with its expert's matrix; `per_row` pairs read the same input."""
        weight = stack.weight
        count, n, k = weight.shape
        most = self.most[rows]
        constants = {
            "K": k, "N": n, "X_STRIDE": inputs[0].stride, "Y_STRIDE": n, "EXPERTS": count, "PER_ROW": per_row,
            "HAS_SCALES": stack.scale is not None, "HAS_BIAS": stack.bias is not None, "HAS_RESIDUAL": False,
            "COUNT_AT": int(rows == "logits"), "FACTOR": 1.0, "RESIDUAL_STRIDE": 0, "PAIRS": most * used,
        }  # fmt: skip
        arguments = (
            self.matrix(weight), inputs[0].buffer, y, "step", self.vector(stack.bias), NOTHING, choices,
            self.vector(stack.scale),
        )  # fmt: skip
        few = [Launch(kernels.matvec(weight.format, 1, constants), (-(-n // 4), (rows, 1, used), 1), arguments)]
        kernel, tile = self.tile(weight, most, {**constants, "X_STRIDE": inputs[1].stride})
        grid = (-(-n // tile.w), (rows, tile.x, used, count), 1)
        tiles = [Launch(kernel, grid, (arguments[0], inputs[1].buffer, *arguments[2:6], groups, arguments[7]))]
        some, many = (tiles if products.grouped(least, used, count) else few for least in (FEW_ROWS + 1, SOME_ROWS + 1))
        self.stage(weight.name, rows, few, many, some=some)


def glu_expression(activation: str) -> str:
    return "swiglu_oai(a, b)" if activation == "swiglu_oai" else f"{activation}(a) * (b)"
