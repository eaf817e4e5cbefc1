"""Emitter of a mixture of experts: three products of (row, selected expert) pairs, and the steps around them."""

from __future__ import annotations

from typing import get_args

from localllm.backends.allocation import Buffer
from localllm.backends.gpu import formats
from localllm.backends.gpu.emit.products import Input, Multiplication, product_inputs
from localllm.backends.gpu.emit.rowwise import elements, glu_expression
from localllm.backends.gpu.kernels import experts as kernels
from localllm.backends.gpu.kernels import products
from localllm.backends.gpu.kernels.kernel import FEW_ROWS, Launch, by_value
from localllm.backends.gpu.kernels.products import EXPERTS_TILE, SOME_ROWS, block_words
from localllm.backends.gpu.lowering import BLOCKS, FLOATS, Delivery, Forms, Lowering
from localllm.backends.gpu.program import KeptRouting
from localllm.backends.gpu.references import Choices
from localllm.plan import Experts, Gating, Stack

GATINGS = get_args(Gating)  # kernels identify each gating by its index


def experts(low: Lowering, op: Experts) -> None:
    rows, used, ffn = op.x.rows, op.used, op.gate.weight.shape[1]
    for stack in op.stacks:
        formats.check_format(stack.weight)
    _route(low, op)
    up = low.take(rows, ffn * used)
    gate = low.take(rows, ffn * used) if op.gated else up
    for stack, y in ((op.gate, gate), (op.up, up)) if op.gated else ((op.up, up),):
        _multiply(low, op, stack, product_inputs(low, low.values.forms(op.x), stack.weight, rows), y, used)
    weights = Choices(op.out.index, "weights")
    assert op.gated or not op.weighted_input, "a single product would be weighted twice"
    for y in (gate, up) if op.weighted_input else ():
        weigh = elements(rows, "(a) * (b)", weights, y, ffn, Delivery(y), used, part=ffn)
        low.dispatch("weigh", rows, [weigh])
    low.values.release(op.x, op.router)
    words = block_words(ffn) if op.down.weight.format in formats.QUANTIZED else 0
    forms: Forms = {BLOCKS: low.take(rows, words * used)} if words else {}
    kept = op.out.index in low.kept
    if kept or not words:
        forms[FLOATS] = low.take(rows, ffn * used)
    to = Delivery(forms.get(FLOATS), forms.get(BLOCKS), words)
    glu = elements(rows, glu_expression(op), gate, up, ffn, to, used)
    low.dispatch("glu", rows, [glu])
    down = product_inputs(low, forms, op.down.weight, rows, used)
    width, mixed = op.out.width, low.take(rows, op.out.width * used)
    _multiply(low, op, op.down, down, mixed, 1)
    combine = kernels.CombineExperts(WIDTH=width, STRIDE=width, USED=used, WEIGHTED=not op.weighted_input)
    launch = combine.launch(by_value(width, rows), x=mixed, weights=weights, y=low.make(op.out))
    low.dispatch("combine", rows, [launch])
    if kept:
        chosen = Choices(op.out.index, "experts")
        low.program.routings[op.out.index] = KeptRouting(chosen, forms.pop(FLOATS), used)
    low.give(*((gate,) if op.gated else ()), up, mixed, *forms.values())


def _route(low: Lowering, op: Experts) -> None:
    """Select experts, and group the pairs by expert for the tiles of prefill."""
    router, rows, used, count = low.floats(op.router), op.x.rows, op.used, op.router.width
    choices, groups = Choices(op.out.index, "experts"), Choices(op.out.index, "groups")
    weights = Choices(op.out.index, "weights")
    most, pairs = low.rows[rows], low.rows[rows] * used
    tiles = -(-most // EXPERTS_TILE.x) * used + count
    low.program.scratch |= {choices: 4 * pairs, weights: 4 * pairs, groups: 4 * (1 + pairs + 3 * tiles)}
    route = kernels.Route(
        EXPERTS=count, USED=used, STRIDE=router.stride, GATING=GATINGS.index(op.gating), NORMALIZE=op.normalize,
        FACTOR=float(op.scale), HAS_BIAS=op.choice_bias is not None, EXPERT_GROUPS=op.groups,
        GROUPS_USED=op.groups_used, HAS_GIVEN=op.choices is not None,
        GIVEN_STRIDE=0 if op.choices is None else low.floats(op.choices).stride,
    )  # fmt: skip
    launch = route.launch(
        ((rows, 1, 1), 1, 1), logits=router, bias=low.vector(op.choice_bias), given=low.optional(op.choices),
        choices=choices, weights=weights,
    )  # fmt: skip
    low.dispatch("route", rows, [launch])
    count_at = int(rows == "logits")
    group = kernels.GroupPairs(EXPERTS=count, USED=used, PAIRS=pairs, TILE=EXPERTS_TILE.x, COUNT_AT=count_at)
    _by_size(low, "group", op, [], [group.launch((1, 1, 1), choices=choices, groups=groups)])


def _multiply(low: Lowering, op: Experts, stack: Stack, inputs: tuple[Input, Input], y: Buffer, per_row: int) -> None:
    """Emit the product of every pair with its expert's matrix. `per_row` pairs read the same input row."""
    own = Multiplication(
        low, stack.weight, op.x.rows, inputs, y, stack.bias, mixture=op, per_row=per_row, scale=stack.scale
    )
    _by_size(low, stack.weight.name, op, own.matvec(1), own.tiles(low.rows[op.x.rows]))


def _by_size(low: Lowering, label: str, op: Experts, few: list[Launch], tiles: list[Launch]) -> None:
    """Emit launches by number of rows. Pairs are grouped into tiles from one row per expert on average."""
    least = FEW_ROWS + 1, SOME_ROWS + 1
    some, many = (tiles if products.grouped(count, op.used, op.router.width) else few for count in least)
    low.dispatch(label, op.x.rows, few, many, some=some)
