"""Buffers for the values of a plan while a backend lowers it: who needs one, for how long, and which are free.

`deaths` is a fold over what the operations read. An `Allocator` hands out buffers and takes them back when their values
die. Sizes come first: a backend makes memory of `Allocator.buffers` once all operations are lowered.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from localllm.plan import Rows, Value


def deaths(reads: Sequence[Collection[Value]], keep: Collection[Value]) -> list[tuple[Value, ...]]:
    """Return, for each step in order, the values that no later step reads; values in `keep` never die."""
    seen = {value.index for value in keep}
    found: list[tuple[Value, ...]] = []
    for step in reversed(reads):
        last = {value.index: value for value in step if value.index not in seen}
        seen |= last.keys()
        found.append(tuple(last.values()))
    return found[::-1]


@dataclass(frozen=True, slots=True)
class Buffer:
    """`times` rows per row of the batch (or per row of logits), `stride` apart in units of the backend."""

    number: int  # in order of the first use
    rows: Rows
    stride: int
    times: int = 1


Form = TypeVar("Form", bound=Hashable)  # how a backend may hold a value: as float32 rows, as quantized rows


class Allocator(Generic[Form]):
    """Allocates the buffers of a plan, and tracks which of them hold live values."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []  # all, by number
        self._free: dict[tuple[Rows, int, int], list[Buffer]] = {}
        self._held: dict[int, dict[Form, Buffer]] = {}  # by value
        self._dying: dict[int, Value] = {}

    def take(self, rows: Rows, stride: int, times: int = 1) -> Buffer:
        """Return a buffer for something that is not a value; `give` returns it."""
        free = self._free.get((rows, stride, times))
        if free:
            return free.pop()
        self.buffers.append(Buffer(len(self.buffers), rows, stride, times))
        return self.buffers[-1]

    def give(self, buffer: Buffer) -> None:
        self._free.setdefault((buffer.rows, buffer.stride, buffer.times), []).append(buffer)

    def make(self, value: Value, form: Form, stride: int) -> Buffer:
        """The buffer for a value in one more form, until the value dies."""
        forms = self._held.setdefault(value.index, {})
        assert form not in forms, f"{value.name} is made twice"
        forms[form] = self.take(value.rows, stride)
        return forms[form]

    def find(self, value: Value, form: Form) -> Buffer | None:
        """The buffer that holds the value in this form now, if any."""
        return self._held.get(value.index, {}).get(form)

    @contextmanager
    def operation(self, dying: Collection[Value]) -> Iterator[None]:
        """While an operation is lowered; `dying` are the values that die with it."""
        self._dying = {value.index: value for value in dying}
        yield
        self.release(*self._dying.values())

    def release(self, *values: Value) -> None:
        """Return the buffers of those values that die with this operation, so that its results may replace them."""
        for value in values:
            if self._dying.pop(value.index, None) is not None:
                for buffer in self._held.pop(value.index, {}).values():
                    self.give(buffer)
