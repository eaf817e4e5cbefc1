"""Emitter of a mixture of experts: three products of (row, selected expert) pairs, and the steps around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from localllm.backends.allocation import Buffer
from localllm.backends.gpu import formats
from localllm.backends.gpu.emit.products import Input, expert_inputs
from localllm.backends.gpu.emit.rowwise import elements, glu_expression
from localllm.backends.gpu.kernels import experts as kernels
from localllm.backends.gpu.kernels import products
from localllm.backends.gpu.kernels.kernel import FEW_ROWS
from localllm.backends.gpu.kernels.products import EXPERTS_TILE, SOME_ROWS, block_words
from localllm.backends.gpu.lowering import BLOCKS, FLOATS, Delivery, Lowering, TakenForms, ValueForms
from localllm.backends.gpu.program import KeptRouting
from localllm.backends.gpu.references import Choices, Fixed
from localllm.plan import Experts, Gating, Rows, Stack

GATINGS = get_args(Gating)  # kernels identify each gating by its index


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The parameters that the three products of a mixture share."""

    rows: Rows
    used: int
    choices: Choices
    groups: Choices


def experts(low: Lowering, op: Experts) -> None:
    rows, used, ffn = op.x.rows, op.used, op.gate.weight.shape[1]
    for stack in op.stacks:
        formats.check_format(stack.weight)
    own = _Mixture(rows, used, Choices(op.out.index, "experts"), Choices(op.out.index, "groups"))
    _route(low, op, own)
    up = low.take(rows, ffn * used)
    gate = low.take(rows, ffn * used) if op.gated else up
    for stack, y in ((op.gate, gate), (op.up, up)) if op.gated else ((op.up, up),):
        _multiply(low, stack, own, expert_inputs(low, ValueForms(low, op.x), stack.weight, rows), y, used)
    weights = Choices(op.out.index, "weights")
    assert op.gated or not op.weighted_input, "the one product would be weighted twice"
    for y in (gate, up) if op.weighted_input else ():
        weigh = elements(rows, "(a) * (b)", weights, y, ffn, Delivery(y), used, part=ffn)
        low.dispatch("weigh", rows, [weigh])
    low.values.release(op.x, op.router)
    words = block_words(ffn) if op.down.weight.format in formats.QUANTIZED else 0
    forms = TakenForms(low, rows, used, {})
    blocks = forms.make(BLOCKS, words) if words else None
    kept = op.out.index in low.kept
    hidden = forms.make(FLOATS, ffn) if kept or not words else None
    glu = elements(rows, glu_expression(op), gate, up, ffn, Delivery(hidden, blocks, words), used)
    low.dispatch("glu", rows, [glu])
    down = expert_inputs(low, forms, op.down.weight, rows, used)
    mixed = low.take(rows, op.out.width * used)
    _multiply(low, op.down, own, down, mixed, 1)
    y = low.make(op.out)
    combine = kernels.CombineExperts(WIDTH=op.out.width, STRIDE=op.out.width, USED=used, WEIGHTED=not op.weighted_input)
    buffers = kernels.CombineExpertsBuffers(x=mixed, weights=weights, y=y)
    low.dispatch("combine", rows, [combine.launch((-(-op.out.width // 128), (rows, 1, 1), 1), buffers)])
    if kept:
        low.program.routings[op.out.index] = KeptRouting(own.choices, forms.buffers.pop(FLOATS), used)
    low.give(*((gate,) if op.gated else ()), up, mixed, *forms.buffers.values())


def _route(low: Lowering, op: Experts, own: _Mixture) -> None:
    """Select experts, and group the pairs by expert for the tiles of prefill."""
    router, most, count = low.floats(op.router), low.rows[own.rows], op.router.width
    weights, pairs = Choices(op.out.index, "weights"), most * own.used
    tiles = -(-most // EXPERTS_TILE.x) * own.used + count
    low.program.scratch |= {own.choices: 4 * pairs, weights: 4 * pairs, own.groups: 4 * (1 + pairs + 3 * tiles)}
    route = kernels.Route(
        EXPERTS=count, USED=own.used, STRIDE=router.stride, GATING=GATINGS.index(op.gating), NORMALIZE=op.normalize,
        FACTOR=float(op.scale), HAS_BIAS=op.choice_bias is not None, EXPERT_GROUPS=op.groups,
        GROUPS_USED=op.groups_used, HAS_GIVEN=op.choices is not None,
        GIVEN_STRIDE=0 if op.choices is None else low.floats(op.choices).stride,
    )  # fmt: skip
    buffers = kernels.RouteBuffers(
        logits=router, bias=low.vector(op.choice_bias),
        given=Fixed.NOTHING if op.choices is None else low.floats(op.choices), choices=own.choices, weights=weights,
    )  # fmt: skip
    low.dispatch("route", own.rows, [route.launch(((own.rows, 1, 1), 1, 1), buffers)])
    group = kernels.GroupPairs(
        EXPERTS=count, USED=own.used, PAIRS=pairs, TILE=EXPERTS_TILE.x, COUNT_AT=int(own.rows == "logits")
    )
    launch = [group.launch((1, 1, 1), kernels.GroupBuffers(choices=own.choices, groups=own.groups))]
    some, many = (launch * products.grouped(least, own.used, count) for least in (FEW_ROWS + 1, SOME_ROWS + 1))
    low.dispatch("group", own.rows, (), many, some=some)


def _multiply(low: Lowering, stack: Stack, own: _Mixture, x: tuple[Input, Input], y: Buffer, per_row: int) -> None:
    """Emit the product of every pair with its expert's matrix. `per_row` pairs read the same input row."""
    weight, rows, used = stack.weight, own.rows, own.used
    count, n, k = weight.shape
    most, (narrow, wide) = low.rows[rows], x
    matrix, bias, scales = low.matrix(weight), low.vector(stack.bias), low.vector(stack.scale)

    def product(x: Input) -> products.ExpertProduct:
        return products.ExpertProduct(
            K=k, N=n, X_STRIDE=x.stride, Y_STRIDE=n, EXPERTS=count, PER_ROW=per_row,
            HAS_SCALES=stack.scale is not None, HAS_BIAS=stack.bias is not None, COUNT_AT=int(rows == "logits"),
            PAIRS=most * used,
        )  # fmt: skip

    def buffers(x: Input, choices: Choices) -> products.ProductBuffers:
        chosen = products.ExpertBuffers(choices=choices, scales=scales)
        return products.ProductBuffers(w=matrix, x=x.buffer, y=y, bias=bias, residual=Fixed.NOTHING, experts=chosen)

    matvec = products.Matvec(format=weight.format, COLUMNS=1, product=product(narrow))
    few = [matvec.launch((-(-n // 4), (rows, 1, used), 1), buffers(narrow, own.choices))]
    kernel, tile = products.tile_kernel(weight.format, most, product(wide), low.compute)
    tiles = [kernel.launch((-(-n // tile.w), (rows, tile.x, used, count), 1), buffers(wide, own.groups))]
    some, many = (tiles if products.grouped(least, used, count) else few for least in (FEW_ROWS + 1, SOME_ROWS + 1))
    low.dispatch(weight.name, rows, few, many, some=some)
