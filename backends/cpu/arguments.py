"""Structs of int64 slots that Python fills and kernels read, such as a kernel's arguments or a step's inputs.

A class declares a struct by annotations in memory order. Each annotation names a `Field` or another struct. The class
provides:

- layout: `Rows.size` is the number of slots, `Rows.stride` is the index of one slot;
- packing: `Rows(address=place, stride=256)` checks names and kinds, and `pack` converts it to int64 numbers;
- access: in a kernel `rows = Rows.at(pointer)` is the struct, and `rows.stride` emits the load of a slot;
- barriers: `places` lists the memory that the kernel reads and writes.

mypy reports a wrong slot name or a value of the wrong kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self, dataclass_transform, overload

import numpy as np
from numpy.typing import NDArray

from localllm.backends.cpu.memory import LINE
from localllm.backends.cpu.simd import F32, Value

SLOT = 8  # bytes per slot


class Place:
    """An address that becomes known when memory is allocated. Subclasses describe the memory."""

    __slots__ = ()


class Field:
    """A slot of a struct: the values it accepts and how a kernel reads it.

    A struct is filled when it is constructed, so `__set__` raises. The annotation of `__set__` gives the type that the
    constructor takes.
    """

    accepts: ClassVar[tuple[type, ...]] = (int,)
    aligned: ClassVar[int] = 1  # alignment of the slot's index
    written: ClassVar[bool] = False  # whether the kernel writes the memory that the slot points to

    def __init__(self, slot: int) -> None:
        self.slot = slot

    @overload
    def __get__(self, struct: None, owner: type[Struct]) -> int: ...
    @overload
    def __get__(self, struct: Struct, owner: type[Struct]) -> Value: ...
    def __get__(self, struct: Struct | None, owner: type[Struct]) -> int | Value:
        return self.slot if struct is None else self.load(*struct.located(self.slot))

    def load(self, pointer: Value, slot: int) -> Value:
        return pointer.f.load_int(pointer, slot)

    def stored(self, given: Any) -> int | Place:
        """Return the number that the slot stores for a value."""
        found: int | Place = given
        return found


class Int64(Field):
    def __set__(self, struct: Struct, given: int) -> None:
        _refuse()


class Apart(Int64):
    """An int64 on its own cache line: one thread writes it while other threads read the neighbouring slots."""

    aligned = LINE // SLOT


class Float32(Field):
    """A float32 in the lower half of the slot."""

    accepts = (float, int)

    def __set__(self, struct: Struct, given: float) -> None:
        _refuse()

    def stored(self, given: float) -> int:
        return int(np.float32(given).view(np.int32))

    def load(self, pointer: Value, slot: int) -> Value:
        return pointer.f.load(pointer + SLOT * slot, F32, 4)


class AddressOrZero(Field):
    """An address, or 0 for an absent argument. Kernels read it as int64 and convert it to a pointer if it is not 0."""

    accepts = (int, Place)

    def __set__(self, struct: Struct, given: int | Place) -> None:
        _refuse()


class Address(AddressOrZero):
    """An address that kernels read as a pointer."""

    def load(self, pointer: Value, slot: int) -> Value:
        return pointer.f.pointer(super().load(pointer, slot))


class Target(Address):
    """The address of memory that a kernel writes."""

    written = True


class TargetOrZero(AddressOrZero):
    written = True


class _Nested:
    """A struct within a struct."""

    written = False

    def __init__(self, slot: int, kind: type[Struct]) -> None:
        self.slot, self.kind = slot, kind
        self.accepts = (kind,)

    def __get__(self, struct: Struct | None, owner: type[Struct]) -> Any:
        return self if struct is None else self.kind.at(*struct.located(self.slot))

    def __set__(self, struct: Struct, given: Struct) -> None:
        _refuse()

    def stored(self, given: Struct) -> Struct:
        return given


def _refuse() -> NoReturn:
    raise AttributeError("a struct is filled when it is made")


def _kinds(struct: type) -> dict[str, object]:
    """Return the class that each annotation names, base classes first.

    Only plain names are resolved: evaluating all annotations would add 8 ms to every start.
    """
    found: dict[str, object] = {}
    for owner in reversed(struct.__mro__):
        names = vars(sys.modules[owner.__module__])
        found |= {name: names.get(text) for name, text in vars(owner).get("__annotations__", {}).items()}
    return found


@dataclass_transform(kw_only_default=True)
class Struct:
    """Base class of structs: packs the fields in Python, and loads them in kernels."""

    __slots__ = ("_given", "_located")
    size: ClassVar[int] = 0  # number of slots
    _fields: ClassVar[dict[str, Field | _Nested]] = {}

    def __init_subclass__(cls) -> None:
        cls._fields, at = {}, 0
        for name, kind in _kinds(cls).items():
            if isinstance(kind, type) and issubclass(kind, Field):
                at = -(-at // kind.aligned) * kind.aligned
                cls._fields[name], at = kind(at), at + 1
            elif isinstance(kind, type) and issubclass(kind, Struct):
                cls._fields[name], at = _Nested(at, kind), at + kind.size
        for name, field in cls._fields.items():
            setattr(cls, name, field)
        cls.size = at

    def __init__(self, **given: Any) -> None:
        fields, what = self._fields, type(self).__name__
        if given.keys() != fields.keys():
            missing, unknown = sorted(fields.keys() - given.keys()), sorted(given.keys() - fields.keys())
            raise TypeError(f"{what}: missing {missing}, unknown {unknown}")
        for name, field in fields.items():
            if not isinstance(given[name], field.accepts):
                accepted = " or ".join(kind.__name__ for kind in field.accepts)
                raise TypeError(f"{what}.{name} is {given[name]!r}, not {accepted}")
        self._given = [field.stored(given[name]) for name, field in fields.items()]
        self._located: tuple[Value, int] | None = None  # in a kernel: pointer and first slot

    # -- in Python ---------------------------------------------------------------------------------------------------

    @property
    def places(self) -> list[tuple[Place, bool]]:
        """Return the addresses that are still unknown, each with whether the kernel writes to the memory."""
        found: list[tuple[Place, bool]] = []
        for field, given in zip(self._fields.values(), self._given, strict=True):
            if isinstance(given, Place):
                found.append((given, field.written))
            elif isinstance(given, Struct):
                found += given.places
        return found

    def pack(self, locate: Callable[[Place], int] | None = None) -> NDArray[np.int64]:
        """Return the slots as int64 (size,). `locate` resolves the addresses of places."""
        packed = [0] * self.size
        self._pack(packed, 0, locate)
        return np.array(packed, np.int64)

    def _pack(self, packed: list[int], first: int, locate: Callable[[Place], int] | None) -> None:
        for field, given in zip(self._fields.values(), self._given, strict=True):
            slot = first + field.slot
            if isinstance(given, Struct):
                given._pack(packed, slot, locate)
            elif isinstance(given, Place):
                assert locate is not None, f"{given} has no address yet"
                packed[slot] = locate(given)
            else:
                packed[slot] = given

    @classmethod
    def slot(cls, name: str) -> int:
        """Return the first slot of a field, which may be a struct."""
        return cls._fields[name].slot

    # -- in a kernel -------------------------------------------------------------------------------------------------

    @classmethod
    def at(cls, pointer: Value, first: int = 0) -> Self:
        """Return the struct that starts `first` slots after the pointer. For use in kernels."""
        struct = cls.__new__(cls)
        struct._located = (pointer, first)
        return struct

    @property
    def pointer(self) -> Value:
        pointer, first = self.located(0)
        return pointer + SLOT * first if first else pointer

    def where(self, slot: int) -> Value:
        """Return a pointer to a slot."""
        pointer, number = self.located(slot)
        return pointer + SLOT * number

    def located(self, slot: int) -> tuple[Value, int]:
        """Return a slot's location for kernel code: a pointer, and the slot's offset from it."""
        assert self._located is not None, "only kernels read a struct"
        pointer, first = self._located
        return pointer, first + slot


class Rows(Struct):
    """Rows `stride` bytes apart: the rows of a value, or one row per thread."""

    address: Address
    stride: Int64

    def row(self, number: Value) -> Value:
        return self.address + number * self.stride


class Output(Rows):
    """Rows that a kernel writes."""

    address: Target


class RowsOrNone(Struct):
    """`Rows` that may be absent."""

    address: AddressOrZero
    stride: Int64

    @property
    def given(self) -> Value:
        return self.address.differs(0)

    def row(self, number: Value) -> Value:
        address = self.address
        return address.f.pointer(address) + number * self.stride
