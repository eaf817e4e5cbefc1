"""The mixture of experts around three products of pairs: a row and an expert of its choice are a pair."""

from __future__ import annotations

from typing import Any

from localllm.backends.gpu import formats, kernels, products
from localllm.backends.gpu.bind_products import Input, Products, glu_expression
from localllm.backends.gpu.binding import Delivery
from localllm.backends.gpu.kernels import FEW_ROWS
from localllm.backends.gpu.products import EXPERTS_TILE, SOME_ROWS, block_words
from localllm.backends.gpu.program import NOTHING, Argument, Buffer, Launch
from localllm.plan import Experts, Rows, Stack


class Mixtures(Products):
    """Binds mixtures."""

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
        self.dispatch("route", rows, [Launch(kernel, ((rows, 1, 1), 1, 1), arguments)])
        groups = self.group(rows, op.router.width, used, choices)
        gate, up = (self.take(rows, ffn * used) for _ in range(2))
        for stack, y in ((op.gate, gate), (op.up, up)):
            self.multiply(stack, rows, self.inputs(op.x, stack.weight), y, used, used, choices, groups)
        self.used(op.x, op.router)
        words = block_words(ffn) if op.down.weight.format in formats.QUANTIZED else 0
        made = {"int8": self.take(rows, words * used)} if words else {}
        kept = op.out in self.keep
        hidden = self.take(rows, ffn * used) if kept or not words else None
        to = Delivery(hidden, made.get("int8"), words)
        glu = self.rowwise(rows, glu_expression(op.activation), gate, up, ffn, to, used)
        self.dispatch("glu", rows, [glu])
        inputs = self.prepare(hidden, made, op.down.weight, rows, used)
        mixed = self.take(rows, op.out.width * used)
        self.multiply(op.down, rows, inputs, mixed, 1, used, choices, groups)
        y = self.value(op.out)
        kernel = kernels.combine({"WIDTH": op.out.width, "STRIDE": op.out.width, "USED": used})
        grid = (-(-op.out.width // 128), (rows, 1, 1), 1)
        self.dispatch("combine", rows, [Launch(kernel, grid, (mixed, weights, y))])
        if hidden is not None and kept:
            self.out.routings[op.out.index] = choices, hidden, used
        elif hidden is not None:
            self.give(hidden)
        for buffer in (gate, up, mixed, *made.values()):
            self.give(buffer)

    def group(self, rows: Rows, experts: int, used: int, choices: str) -> str:
        """The pairs by expert, for tiles; the name of where they stand."""
        most, name = self.most[rows], f"groups of {choices}"
        tiles = -(-most // EXPERTS_TILE.x) * used + experts
        self.out.lists[name] = 4 * (1 + most * used + 3 * tiles)
        constants = {"USED": used, "PAIRS": most * used, "TILE": EXPERTS_TILE.x, "COUNT_AT": int(rows == "logits")}
        launch = [Launch(kernels.group_pairs(experts, constants), (1, 1, 1), (choices, "step", name))]
        some, many = (launch * products.grouped(least, used, experts) for least in (FEW_ROWS + 1, SOME_ROWS + 1))
        self.dispatch("group", rows, (), many, some=some)
        return name

    def multiply(
        self, stack: Stack, rows: Rows, inputs: tuple[Input, Input], y: Buffer, per_row: int, used: int, choices: str,
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
        self.dispatch(weight.name, rows, few, many, some=some)
