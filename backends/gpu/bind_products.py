"""Products of matrices with rows of activations: linear operations, and the mixture of experts around three of them."""

from __future__ import annotations

from typing import Any

from backends.gpu import formats, kernels
from backends.gpu.binding import Binding
from backends.gpu.kernels import COLUMNS
from backends.gpu.program import NOTHING, Argument, Buffer, Launch
from backends.plan import Add, Experts, Linear, Rows, Stack, Value, Weight


class Products(Binding):
    """Binds what multiplies."""

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
        kernel = kernels.elements(glu_expression(op.activation), {"WIDTH": ffn * used, "STRIDE": ffn * used})
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


def glu_expression(activation: str) -> str:
    return "swiglu_oai(a, b)" if activation == "swiglu_oai" else f"{activation}(a) * (b)"
