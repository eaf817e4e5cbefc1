"""The state that emitters share: buffers of values, names of weights, and the program so far."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localllm.backends.allocation import Allocator, Buffer
from localllm.backends.base import CacheTypes, Limits
from localllm.backends.gpu import formats
from localllm.backends.gpu.kernels.kernel import Launch
from localllm.backends.gpu.kernels.products import block_words
from localllm.backends.gpu.kernels.rowwise import Delivered, delivered
from localllm.backends.gpu.program import Dispatch, Program
from localllm.backends.gpu.references import Fixed, MatrixOf, Reference, VectorOf
from localllm.backends.gpu.steps import step_words, wanted_limits
from localllm.plan import Plan, Rows, Value, Weight, flattened

FLOATS, BLOCKS = "floats", "blocks"  # forms of a value; for split rows, the form is a matrix format


@dataclass(frozen=True, slots=True)
class Delivery:
    """The buffers to which a kernel writes its rows: floats, activation blocks, or both."""

    floats: Buffer | None
    blocks: Buffer | None = None
    block_words: int = 0  # words per row

    @property
    def delivered(self) -> Delivered:
        return delivered(self.floats is not None, self.block_words)

    @property
    def y(self) -> Reference:
        return self.floats or Fixed.NOTHING

    @property
    def y_blocks(self) -> Reference:
        return self.blocks or Fixed.NOTHING


class Tables(NamedTuple):
    """The block tables of a layer, and offsets in the step buffer: of the rows' slots, and of the tables' stride."""

    reference: Fixed
    slots_at: int
    stride_at: int


Forms = dict[str, Buffer]  # rows of activations, in the forms that products read


class Lowering:
    """A plan being lowered to a program. `rows` holds the maximum numbers of batch rows and of logit rows."""

    def __init__(
        self, plan: Plan, limits: Limits, cache: CacheTypes, keep: Collection[Value], compute: str, local_memory: int
    ) -> None:
        self.limits, self.cache, self.compute, self.local_memory = limits, cache, compute, local_memory
        self.plan = plan
        self.rows: dict[Rows, int] = {"batch": limits.rows, "logits": limits.logit_rows}
        self.kept = {value.index for value in keep}
        self.program = Program()
        self.values: Allocator[str] = Allocator()
        self.received: list[tuple[Value, Buffer]] = []  # values that the current stage receives
        self.sent: list[tuple[Value, Buffer]] = []
        self.looked_up: list[tuple[Value, Buffer]] = []
        self._wants_blocks, self._wants_floats = read_as(plan, keep)

    # -- values ----------------------------------------------------------------------------------------------------

    def floats(self, value: Value) -> Buffer:
        """Return the float32 buffer of a value that has been computed."""
        found = self.values.find(value, FLOATS)
        assert found is not None, f"no operation wrote the floats of {value.name}"
        return found

    def optional(self, value: Value | None) -> Reference:
        """Return the float32 buffer of a value, or NOTHING for a kernel that does not read it."""
        return Fixed.NOTHING if value is None else self.floats(value)

    def make(self, value: Value) -> Buffer:
        """Allocate a float32 buffer for a value."""
        return self.values.make(value, FLOATS, value.width)

    def deliver(self, value: Value) -> Delivery:
        """Allocate the forms of a value that its readers need, for a kernel that can write both forms."""
        words, blocks = 0, None
        if value.index in self._wants_blocks:
            words = block_words(value.width)
            blocks = self.values.make(value, BLOCKS, words)
        return Delivery(self.make(value) if value.index in self._wants_floats else None, blocks, words)

    def take(self, rows: Rows, stride: int) -> Buffer:
        """Allocate a buffer of `stride` elements per row, for scratch data that belongs to no value."""
        return self.values.take(rows, stride)

    def give(self, *buffers: Buffer) -> None:
        for buffer in buffers:
            self.values.give(buffer)

    def step(self, rows: Rows) -> Fixed:
        """Return the step buffer of the batch, or of the rows whose logits are requested."""
        if rows == "logits":
            self.program.scratch[Fixed.WANTED] = 4 * step_words(wanted_limits(self.limits), self.plan)
        return Fixed.STEP if rows == "batch" else Fixed.WANTED

    def tables(self, layer: int) -> Tables:
        """Return the block tables of a cache layer."""
        own = self.limits.own_blocks(self.plan.layers[layer])
        return Tables(Fixed.WINDOW_TABLES, 6, 3) if own else Tables(Fixed.TABLES, 2, 2)

    # -- weights ---------------------------------------------------------------------------------------------------

    def matrix(self, weight: Weight) -> MatrixOf:
        formats.check_format(weight)
        self.program.matrices[weight.name] = weight
        return MatrixOf(weight.name)

    def vector(self, weight: Weight | None) -> Reference:
        if weight is None:
            return Fixed.NOTHING
        self.program.vectors[weight.name] = weight
        return VectorOf(weight.name)

    # -- launches --------------------------------------------------------------------------------------------------

    def dispatch(
        self, label: str, rows: Rows, few: Sequence[Launch], many: Sequence[Launch] = (), one: Sequence[Launch] = (),
        some: Sequence[Launch] | None = None,
    ) -> None:  # fmt: skip
        optional = None if some is None else tuple(some)
        self.program.dispatches.append(Dispatch(label, rows, tuple(few), tuple(many), tuple(one), optional))


def read_as(plan: Plan, keep: Collection[Value]) -> tuple[set[int], set[int]]:
    """Return the values that products read as activation blocks, and the values that are read as floats."""
    floats = {plan.logits.index, *(value.index for value in keep)}
    blocks: set[int] = set()
    for op in flattened(plan.operations):
        for x, weight in op.products:
            (blocks if weight.format in formats.QUANTIZED else floats).add(x.index)
        multiplied = {x.index for x, _ in op.products}
        floats |= {value.index for value in op.inputs if value.index not in multiplied}
    return blocks, floats
