"""Emitters of matrix products: single, several in one launch, and two with their GLU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.backends.allocation import Buffer
from localllm.backends.gpu import formats
from localllm.backends.gpu.emit.rowwise import elements, glu_expression
from localllm.backends.gpu.kernels import products, rowwise
from localllm.backends.gpu.kernels.kernel import Dimension, Kernel, Launch, by_row
from localllm.backends.gpu.kernels.products import COLUMNS, SOME_ROWS, Product, Tile, block_words
from localllm.backends.gpu.lowering import BLOCKS, FLOATS, Delivery, Forms, Lowering
from localllm.backends.gpu.references import Choices, Fixed, Reference
from localllm.plan import Experts, HeadLinear, Linear, LinearAdd, LinearGlu, LinearGroup, Rows, Weight

MOST_TOGETHER = 3  # matrices per launch


@dataclass(frozen=True, slots=True)
class Input:
    buffer: Buffer
    stride: int  # words per row


@dataclass(frozen=True, slots=True)
class Multiplication:
    """A product of rows with a matrix, with the matrix of each pair's expert, or with one matrix per head.

    `inputs` are the rows for the mat-vec and for tiles. The pairs of a `mixture` are a row and one of its experts;
    `per_row` pairs read the same input row.
    """

    low: Lowering
    weight: Weight  # (N, K), (experts, N, K) or (heads, N, K)
    rows: Rows
    inputs: tuple[Input, Input]
    y: Buffer
    bias: Weight | None = None
    factor: float = 1.0
    residual: Reference = Fixed.NOTHING
    mixture: Experts | None = None
    per_row: int = 1
    scale: Weight | None = None  # a factor per expert

    def product(self, x: Input, alone: bool = True) -> Product:
        """Return the macros of the product. It is not `alone` if its kernel multiplies several matrices."""
        (*stack, n, k), pairs, heads = self.weight.shape, None, None
        if self.mixture:
            most = self.low.rows[self.rows] * self.mixture.used
            pairs = products.Pairs(EXPERTS=stack[0], PER_ROW=self.per_row, HAS_SCALES=bool(self.scale), PAIRS=most)
        elif stack:
            heads = products.Heads(HEADS=stack[0], X_HEAD=x.stride)
        times = heads.HEADS if heads else 1
        return Product(
            K=k, N=n, X_STRIDE=times * x.stride, Y_STRIDE=times * n if alone else None,
            RESIDUAL_STRIDE=0 if stack else n, FACTOR=float(self.factor), COUNT_AT=int(self.rows == "logits"),
            HAS_BIAS=self.bias is not None, HAS_RESIDUAL=self.residual != Fixed.NOTHING if alone else None,
            pairs=pairs, heads=heads,
        )  # fmt: skip

    def matvec(self, *columns: int) -> list[Launch]:
        """Return the launches for these numbers of rows per work-group."""
        x, format = self.inputs[0], self.weight.format
        product = self.product(x)
        kernels = [products.Matvec(format=format, COLUMNS=count, product=product) for count in columns]
        return self._launches(x, [(each, Tile(each.COLUMNS, 4)) for each in kernels], tiled=False)

    def tiles(self, *most: int) -> list[Launch]:
        """Return the launches for these maximum numbers of rows."""
        x, format, compute = self.inputs[1], self.weight.format, self.low.compute
        product = self.product(x)
        return self._launches(x, [products.tile_kernel(format, rows, product, compute) for rows in most], tiled=True)

    def _launches(self, x: Input, kernels: Sequence[tuple[Kernel, Tile]], tiled: bool) -> list[Launch]:
        low, (*stack, n, _), op, used, heads = self.low, self.weight.shape, self.mixture, 1, 1
        buffers: dict[str, Reference] = {
            "w": low.matrix(self.weight), "x": x.buffer, "y": self.y, "bias": low.vector(self.bias),
            "residual": self.residual,
        }  # fmt: skip
        if op:
            buffers["choices"] = Choices(op.out.index, "groups" if tiled else "experts")
            buffers["scales"], used = low.vector(self.scale), op.used
        elif stack:
            heads = stack.pop()
        launches = []
        for kernel, tile in kernels:
            of_rows: Dimension = self.rows, tile.x, used
            if op and tiled:
                of_rows = self.rows, tile.x, used, stack[0]  # a tile of each expert may be partly empty
            launches.append(kernel.launch((-(-n // tile.w), of_rows, heads), **buffers))
        return launches


def product_inputs(low: Lowering, forms: Forms, weight: Weight, rows: Rows, times: int = 1) -> tuple[Input, Input]:
    """Return the inputs of a product with `weight`, for the mat-vec and for tiles.

    There are `times` rows per batch row. Float rows are used directly. Activation blocks and split rows are computed
    once per value, and added to `forms`.
    """
    width = weight.shape[-1]
    if weight.format in formats.QUANTIZED:
        words = block_words(width)
        if BLOCKS not in forms:  # the kernel that computed the rows did not write blocks
            own, forms[BLOCKS] = forms[FLOATS], low.take(rows, words * times)
            to = Delivery(None, forms[BLOCKS], words)
            low.dispatch("quantize", rows, [elements(rows, "a", own, own, width, to, times)])
        return (Input(forms[BLOCKS], words),) * 2
    own = forms[FLOATS]
    terms = products.terms(weight.format, width, low.compute)
    if terms is None:
        return (Input(own, width),) * 2
    stride = terms * width // 2 + 4  # words per row; a multiple of 16 bytes
    if weight.format not in forms:
        forms[weight.format] = split = low.take(rows, stride * times)
        kernel = rowwise.SplitRows(format=weight.format, TERMS=terms, K=width, X_STRIDE=width, Y_STRIDE=stride)
        low.dispatch("split", rows, (), [kernel.launch(by_row(1, rows, times), x=own, y=split)])
    return Input(own, width), Input(forms[weight.format], stride)


def linear(low: Lowering, op: Linear, fused: LinearAdd | None = None) -> None:
    inputs = product_inputs(low, low.values.forms(op.x), op.weight, op.x.rows)
    residual = low.optional(fused.other if fused else None)
    own = _multiplication(low, op, inputs, low.make(fused.add.out if fused else op.out), residual)
    _dispatch(own.matvec(1, COLUMNS), [own])


def linear_add(low: Lowering, op: LinearAdd) -> None:
    linear(low, op.linear, op)


def _multiplication(
    low: Lowering, op: Linear, inputs: tuple[Input, Input], y: Buffer, residual: Reference = Fixed.NOTHING
) -> Multiplication:
    return Multiplication(low, op.weight, op.x.rows, inputs, y, op.bias, op.scale, residual)


def _dispatch(few: Sequence[Launch], tiled: Sequence[Multiplication], last: Sequence[Launch] = ()) -> None:
    """Emit the launches of products by number of activation rows.

    `few` are the launches for one row and for few rows, with 1 and COLUMNS rows per work-group. More rows run through
    one product after the other in tiles, and then through the launches `last`.
    """
    low, rows = tiled[0].low, tiled[0].rows
    most = low.rows[rows]
    some, many = zip(*(each.tiles(min(most, SOME_ROWS), most) for each in tiled), strict=True)
    low.dispatch(tiled[0].weight.name, rows, few[1:], [*many, *last], few[:1], [*some, *last])


def head_linear(low: Lowering, op: HeadLinear) -> None:
    """Emit per-head products. The kernels that prepare activations treat the slices of the heads as rows."""
    weight, rows = op.weight, op.x.rows
    forms = {FLOATS: low.floats(op.x)}
    inputs = product_inputs(low, forms, weight, rows, weight.shape[0])
    own = Multiplication(low, weight, rows, inputs, low.make(op.out))
    _dispatch(own.matvec(1, COLUMNS), [own])
    del forms[FLOATS]
    low.give(*forms.values())


# -- several products of the same rows in one launch, if there are few rows --------------------------------------------


def linear_group(low: Lowering, op: LinearGroup) -> None:
    first, *others = op.linears
    rows = first.x.rows
    inputs = product_inputs(low, low.values.forms(first.x), first.weight, rows)
    own = [_multiplication(low, each, inputs, low.make(each.out)) for each in op.linears]
    groups = sum(-(-each.out.width // 4) for each in op.linears)
    of_each: dict[str, list[Reference]] = {
        "w": [low.matrix(each.weight) for each in own], "y": [each.y for each in own],
        "bias": [low.vector(each.bias) for each in own],
    }  # fmt: skip
    buffers = {f"{name}{n}": [*of_each[name], Fixed.NOTHING][n] for name in of_each for n in range(MOST_TOGETHER)}

    kernels = [
        products.MatvecTogether(
            format=first.weight.format, COLUMNS=columns, product=own[0].product(inputs[0], alone=False),
            N1=others[0].out.width, FACTOR1=float(others[0].scale), N2=sum(o.out.width for o in others[1:]),
            FACTOR2=float(others[-1].scale),
        )
        for columns in (1, COLUMNS)
    ]  # fmt: skip
    few = [each.launch((groups, (rows, each.COLUMNS, 1), 1), x=inputs[0].buffer, **buffers) for each in kernels]
    _dispatch(few, own)


def linear_glu(low: Lowering, op: LinearGlu) -> None:
    gate, up = op.gate, op.up
    rows, weight, n = gate.x.rows, gate.weight, gate.weight.shape[0]
    inputs = product_inputs(low, low.values.forms(gate.x), weight, rows)
    to, expression = low.deliver(op.glu.out), glu_expression(op.glu)
    ys = low.take(rows, n), low.take(rows, n)  # inputs of the GLU after the prefill tiles
    both = [_multiplication(low, linear, inputs, y) for linear, y in zip((gate, up), ys, strict=True)]

    kernels = [
        products.Gated(
            format=weight.format, COLUMNS=columns, SIZE=products.gated_size(columns), OPERATION=expression,
            product=both[0].product(inputs[0], alone=False), FACTOR1=float(up.scale), delivered=to.delivered,
        )
        for columns in (1, COLUMNS)
    ]  # fmt: skip
    few = [
        each.launch(
            (-(-n // 32), (rows, each.COLUMNS, 1), 1), gate=low.matrix(weight), up=low.matrix(up.weight), y=to.y,
            x=inputs[0].buffer, blocks=to.y_blocks, gate_bias=low.vector(gate.bias), up_bias=low.vector(up.bias),
        )
        for each in kernels
    ]  # fmt: skip
    _dispatch(few, both, [elements(rows, expression, *ys, n, to)])
    low.give(*ys)
