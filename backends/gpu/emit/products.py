"""Emitters of matrix products: single, several in one launch, and two with their GLU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.backends.allocation import Buffer
from localllm.backends.gpu import formats
from localllm.backends.gpu.emit.rowwise import elements, glu_expression
from localllm.backends.gpu.kernels import products, rowwise
from localllm.backends.gpu.kernels.kernel import Grid, Kernel, Launch
from localllm.backends.gpu.kernels.products import COLUMNS, SOME_ROWS, HeadProduct, Product, ProductBuffers, block_words
from localllm.backends.gpu.lowering import BLOCKS, FLOATS, Delivery, Forms, Lowering, TakenForms, ValueForms
from localllm.backends.gpu.references import Fixed, Reference
from localllm.plan import HeadLinear, Linear, LinearAdd, LinearGlu, LinearGroup, Rows, Weight

MOST_TOGETHER = 3  # matrices per launch


@dataclass(frozen=True, slots=True)
class Input:
    buffer: Buffer
    stride: int  # words per row


def expert_inputs(low: Lowering, forms: Forms, weight: Weight, rows: Rows, times: int = 1) -> tuple[Input, Input]:
    """Return the inputs of a product with `weight`, for the mat-vec and for tiles.

    There are `times` rows per batch row. Float rows are used directly. Activation blocks and split rows are computed
    once per value.
    """
    width, own = weight.shape[-1], forms.find(FLOATS)
    if weight.format in formats.QUANTIZED:
        words, blocks = block_words(width), forms.find(BLOCKS)
        if blocks is None:  # the kernel that computed the rows did not write blocks
            assert own is not None
            blocks = forms.make(BLOCKS, words)
            low.dispatch("quantize", rows, [elements(rows, "a", own, own, width, Delivery(None, blocks, words), times)])
        return (Input(blocks, words),) * 2
    assert own is not None
    terms = products.terms(weight.format, width, low.compute)
    if terms is None:
        return (Input(own, width),) * 2
    stride = terms * width // 2 + 4  # words per row; a multiple of 16 bytes
    split = forms.find(weight.format)
    if split is None:
        split = forms.make(weight.format, stride)
        kernel = rowwise.SplitRows(format=weight.format, TERMS=terms, K=width, X_STRIDE=width, Y_STRIDE=stride)
        launch = kernel.launch((1, (rows, 1, times), 1), rowwise.SplitRowsBuffers(x=own, y=split))
        low.dispatch("split", rows, (), [launch])
    return Input(own, width), Input(split, stride)


def linear(low: Lowering, op: Linear, fused: LinearAdd | None = None) -> None:
    weight, rows = op.weight, op.x.rows
    narrow, wide = expert_inputs(low, ValueForms(low, op.x), weight, rows)
    residual: Reference = Fixed.NOTHING if fused is None else low.floats(fused.other)
    y = low.make(op.out if fused is None else fused.add.out)
    one, few = (
        products.Matvec(format=weight.format, COLUMNS=columns, product=_product(op, narrow, fused is not None)).launch(
            _grid(rows, y.stride, 4, columns), _buffers(low, op, narrow, y, residual)
        )
        for columns in (1, COLUMNS)
    )
    some, many = _tiles(low, op, wide, y, residual)
    low.dispatch(weight.name, rows, [few], [many], [one], [some])


def linear_add(low: Lowering, op: LinearAdd) -> None:
    linear(low, op.linear, op)


def _product(op: Linear, x: Input, has_residual: bool) -> Product:
    n, k = op.weight.shape
    return Product(
        K=k, N=n, X_STRIDE=x.stride, Y_STRIDE=n, RESIDUAL_STRIDE=n, FACTOR=float(op.scale),
        COUNT_AT=int(op.x.rows == "logits"), HAS_BIAS=op.bias is not None, HAS_RESIDUAL=has_residual,
    )  # fmt: skip


def _buffers(low: Lowering, op: Linear, x: Input, y: Buffer, residual: Reference) -> ProductBuffers:
    return ProductBuffers(w=low.matrix(op.weight), x=x.buffer, y=y, bias=low.vector(op.bias), residual=residual)


def _grid(rows: Rows, n: int, each: int, columns: int) -> Grid:
    """Return the grid for `n` matrix rows, with `each` matrix rows and `columns` activation rows per work-group."""
    return -(-n // each), (rows, columns, 1), 1


def _tiles(
    low: Lowering, op: Linear, x: Input, y: Buffer, residual: Reference = Fixed.NOTHING
) -> tuple[Launch, Launch]:
    """Return the launches for a moderate and for a large number of activation rows."""
    most, product = low.rows[op.x.rows], _product(op, x, residual != Fixed.NOTHING)
    buffers = _buffers(low, op, x, y, residual)

    def tiles(rows: int) -> Launch:
        kernel, tile = products.tile_kernel(op.weight.format, rows, product, low.compute)
        return kernel.launch(_grid(op.x.rows, y.stride, tile.w, tile.x), buffers)

    return tiles(min(most, SOME_ROWS)), tiles(most)


def head_linear(low: Lowering, op: HeadLinear) -> None:
    """Emit per-head products. The kernels that prepare activations treat the slices of the heads as rows."""
    weight, rows, (heads, n, k) = op.weight, op.x.rows, op.weight.shape
    forms = TakenForms(low, rows, heads, {FLOATS: low.floats(op.x)})
    narrow, wide = expert_inputs(low, forms, weight, rows, heads)
    matrix, y = low.matrix(weight), low.make(op.out)

    def product(x: Input) -> HeadProduct:
        return HeadProduct(
            K=k, N=n, X_STRIDE=heads * x.stride, Y_STRIDE=heads * n, HEADS=heads, X_HEAD=x.stride,
            COUNT_AT=int(rows == "logits"),
        )  # fmt: skip

    def launch(kernel: Kernel[ProductBuffers], x: Input, each: int, columns: int) -> Launch:
        buffers = ProductBuffers(w=matrix, x=x.buffer, y=y, bias=Fixed.NOTHING, residual=Fixed.NOTHING)
        return kernel.launch((-(-n // each), (rows, columns, 1), heads), buffers)

    def tiles(most: int) -> Launch:
        kernel, tile = products.tile_kernel(weight.format, most, product(wide), low.compute)
        return launch(kernel, wide, tile.w, tile.x)

    one, few = (
        launch(products.Matvec(format=weight.format, COLUMNS=columns, product=product(narrow)), narrow, 4, columns)
        for columns in (1, COLUMNS)
    )
    most = low.rows[rows]
    low.dispatch(weight.name, rows, [few], [tiles(most)], [one], [tiles(min(most, SOME_ROWS))])
    del forms.buffers[FLOATS]
    low.give(*forms.buffers.values())


# -- several products of the same rows in one launch, if there are few rows --------------------------------------------


def linear_group(low: Lowering, op: LinearGroup) -> None:
    first, *others = op.linears
    x, format = first.x, first.weight.format
    narrow, wide = expert_inputs(low, ValueForms(low, x), first.weight, x.rows)
    ys = [low.make(linear.out) for linear in op.linears]
    w, y, bias = (
        _three(own)
        for own in ([low.matrix(o.weight) for o in op.linears], ys, [low.vector(o.bias) for o in op.linears])
    )
    n, k = first.weight.shape
    groups = sum(-(-linear.out.width // 4) for linear in op.linears)
    one, few = (
        products.MatvecTogether(
            format=format, COLUMNS=columns, K=k, N=n, X_STRIDE=narrow.stride, RESIDUAL_STRIDE=n,
            FACTOR=float(first.scale), COUNT_AT=int(x.rows == "logits"), HAS_BIAS=first.bias is not None,
            N1=others[0].out.width, FACTOR1=float(others[0].scale), N2=sum(o.out.width for o in others[1:]),
            FACTOR2=float(others[-1].scale),
        ).launch(
            _grid(x.rows, groups, 1, columns),
            products.MatvecTogetherBuffers(
                w0=w[0], w1=w[1], w2=w[2], x=narrow.buffer, y0=y[0], y1=y[1], y2=y[2], bias0=bias[0], bias1=bias[1],
                bias2=bias[2],
            ),
        )
        for columns in (1, COLUMNS)
    )  # fmt: skip
    some, many = zip(*(_tiles(low, o, wide, own) for o, own in zip(op.linears, ys, strict=True)), strict=True)
    low.dispatch(first.weight.name, x.rows, [few], many, [one], some)


def linear_glu(low: Lowering, op: LinearGlu) -> None:
    gate, up = op.gate, op.up
    x, (n, k) = gate.x, gate.weight.shape
    narrow, wide = expert_inputs(low, ValueForms(low, x), gate.weight, x.rows)
    to, expression = low.deliver(op.glu.out), glu_expression(op.glu)
    buffers = products.GatedBuffers(
        gate=low.matrix(gate.weight), up=low.matrix(up.weight), x=narrow.buffer, y=to.y, blocks=to.y_blocks,
        gate_bias=low.vector(gate.bias), up_bias=low.vector(up.bias),
    )  # fmt: skip
    one, few = (
        products.Gated(
            format=gate.weight.format, COLUMNS=columns, SIZE=products.gated_size(columns), OPERATION=expression,
            K=k, N=n, X_STRIDE=narrow.stride, RESIDUAL_STRIDE=n, FACTOR=float(gate.scale),
            COUNT_AT=int(x.rows == "logits"), HAS_BIAS=gate.bias is not None, FACTOR1=float(up.scale),
            delivered=to.delivered,
        ).launch(_grid(x.rows, n, 32, columns), buffers)
        for columns in (1, COLUMNS)
    )  # fmt: skip
    ys = low.take(x.rows, n), low.take(x.rows, n)  # inputs of the GLU after the prefill tiles
    both = [_tiles(low, linear, wide, y) for linear, y in zip((gate, up), ys, strict=True)]
    last = elements(x.rows, expression, *ys, n, to)
    some, many = ([*launches, last] for launches in zip(*both, strict=True))
    low.dispatch(gate.weight.name, x.rows, [few], many, [one], some)
    low.give(*ys)


def _three(references: Sequence[Reference]) -> list[Reference]:
    return [*references, *[Fixed.NOTHING] * (MOST_TOGETHER - len(references))]
