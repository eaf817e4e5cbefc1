"""Assigns buffers to the values of a plan during lowering, and reuses them by lifetime.

`deaths` computes which operation is the last to read each value. An `Allocator` hands out buffers and takes them back
when their values die. It records only sizes: a backend allocates the memory of `Allocator.buffers` after all operations
are lowered.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from localllm.plan import Rows, Value


def deaths(reads: Sequence[Collection[Value]], keep: Collection[Value]) -> list[tuple[Value, ...]]:
    """Return, for each step in order, the values that no later step reads. Values in `keep` are never listed."""
    seen = {value.index for value in keep}
    found: list[tuple[Value, ...]] = []
    for step in reversed(reads):
        last = {value.index: value for value in step if value.index not in seen}
        seen |= last.keys()
        found.append(tuple(last.values()))
    return found[::-1]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of `times` rows per batch row (or per logit row). `stride` is the row size in the backend's unit."""

    number: int  # assigned in order of first use
    rows: Rows
    stride: int
    times: int = 1


Form = TypeVar("Form", bound=Hashable)  # how a backend holds a value: float32 rows, quantized rows, ...


class Allocator(Generic[Form]):
    """Allocates the buffers of a plan, and tracks which of them hold live values."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []  # all buffers; the index is `Buffer.number`
        self._free: dict[tuple[Rows, int, int], list[Buffer]] = {}
        self._held: dict[int, dict[Form, Buffer]] = {}  # buffers by value index and form
        self._dying: dict[int, Value] = {}

    def take(self, rows: Rows, stride: int, times: int = 1) -> Buffer:
        """Return a buffer for scratch data that belongs to no value; `give` frees it."""
        free = self._free.get((rows, stride, times))
        if free:
            return free.pop()
        self.buffers.append(Buffer(len(self.buffers), rows, stride, times))
        return self.buffers[-1]

    def give(self, buffer: Buffer) -> None:
        self._free.setdefault((buffer.rows, buffer.stride, buffer.times), []).append(buffer)

    def make(self, value: Value, form: Form, stride: int) -> Buffer:
        """Return a buffer for a further form of a value. The buffer lives as long as the value."""
        forms = self._held.setdefault(value.index, {})
        assert form not in forms, f"{value.name} is created twice"
        forms[form] = self.take(value.rows, stride)
        return forms[form]

    def find(self, value: Value, form: Form) -> Buffer | None:
        """Return the buffer that now holds the value in this form, or None."""
        return self._held.get(value.index, {}).get(form)

    def forms(self, value: Value) -> dict[Form, Buffer]:
        """Return the buffers that hold a computed value, by form. Buffers added here live as long as the value."""
        return self._held[value.index]

    @contextmanager
    def operation(self, dying: Collection[Value]) -> Iterator[None]:
        """Context manager around the lowering of one operation.

        `dying` lists the values that this operation is the last to read.
        """
        self._dying = {value.index: value for value in dying}
        yield
        self.release(*self._dying.values())

    def release(self, *values: Value) -> None:
        """Free the buffers of the values that die with this operation, so that its results may reuse the buffers."""
        for value in values:
            if self._dying.pop(value.index, None) is not None:
                for buffer in self._held.pop(value.index, {}).values():
                    self.give(buffer)
