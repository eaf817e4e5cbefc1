"""A kernel as an immutable object that determines its source, its work-groups and its launches.

A declaration is a `Kernel` class. Its uppercase fields are macros of the source, in field order; a lowercase field that
holds `Macros` expands to their fields. `Shape`, `Factor` and `Flag` are macros that differ between models: a generic
kernel gets their values at run time. Buffers, work-items per group and the use of local memory are read from the source
(`signatures`). Equal kernels are compiled once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, NamedTuple, dataclass_transform, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from localllm.backends.gpu import formats
from localllm.backends.gpu.kernels.signatures import Parameters, Signature, signatures, source_text
from localllm.backends.gpu.references import Fixed, Reference
from localllm.plan import Rows

FEW_ROWS = 16  # row limit of kernels whose summation order does not depend on the batch
HEADER = 8  # ints that precede the per-row arrays in the step buffer

Count = str  # "batch", "logits", "tiles", "partitions", "keys 0" and so on
# (count, per group, times) or (..., more): ceil(count / per group) * times + more
Dimension = int | tuple[Count, int, int] | tuple[Count, int, int, int]
Grid = tuple[Dimension, Dimension, Dimension]  # work-groups


@dataclass(frozen=True, slots=True)
class Macro:
    """How a field becomes a macro. By default, its name and value are used directly."""

    name: str = ""  # macro name, if it differs from the field's name
    run_time: bool = False  # whether a generic kernel gets the value at run time
    text: str = "{}"  # format string for the value


Shape = Annotated[int, Macro(run_time=True)]  # a width, a stride, a count
Factor = Annotated[float, Macro(run_time=True)]
Flag = Annotated[bool, Macro(run_time=True)]
Expression = Annotated[str, Macro("OPERATION(a, b)", text="({})")]  # an expression of two values a and b

_REFERENCES = frozenset(get_args(Reference))


class Constant(NamedTuple):
    """A macro definition: name and value."""

    name: str
    value: Any
    run_time: bool = False  # whether a generic kernel gets the value at run time


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Macros:
    """A group of macros, in field order. Fields that are None are omitted.

    Every class below is a frozen dataclass with keyword arguments, whose annotations are checked at construction.
    """

    _fields: ClassVar[dict[str, tuple[tuple[type[Any], ...], Macro]]]  # the types of each field, and its `Macro`
    _groups: ClassVar[list[str]]  # the fields that hold `Macros`

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls._fields = _declared(cls)
        cls._groups = [name for name, (kinds, _) in cls._fields.items() if issubclass(kinds[0], Macros)]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kinds, _ = self._fields[name]
            if type(value) not in kinds:
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{type(self).__name__}.{name} must be {wanted}, found {value!r}")

    def value(self, macro: str) -> Any:
        """Return the value of a macro, or None if the kernel lacks it."""
        if macro in self._fields:
            return getattr(self, macro)
        for name in self._groups:
            group: Macros | None = getattr(self, name)
            if group is not None and (found := group.value(macro)) is not None:
                return found
        return None

    def macros(self) -> Iterator[Constant]:
        for name, value in vars(self).items():
            _, macro = self._fields[name]
            if isinstance(value, Macros):
                yield from value.macros()
            elif name.isupper() and value is not None:
                text = macro.text.format(value) if isinstance(value, str) else value
                yield Constant(macro.name or name, text, macro.run_time)


def _declared(kind: Any) -> dict[str, tuple[tuple[type[Any], ...], Macro]]:
    found, hints = {}, get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        options = (hint,) if hasattr(hint, "__metadata__") else get_args(hint) or (hint,)
        macros = [option.__metadata__[0] for option in options if hasattr(option, "__metadata__")]
        kinds = tuple([getattr(option, "__origin__", option) for option in options])
        found[field.name] = kinds, next(iter(macros), Macro())
    return found


class Kernel(Macros):
    """A kernel, with everything that its compilation depends on."""

    name: ClassVar[str]  # name of the kernel in its source
    parts: ClassVar[str]  # source files after the prelude

    @property
    def signature(self) -> Signature:
        return signatures()[self.name]

    @property
    def size(self) -> int:
        """Number of work-items per group."""
        own = self.signature.size
        return int(own) if own.isdigit() else int(getattr(self, own))

    @property
    def local_floats(self) -> int:
        """Local memory per work-group, in units of 4 bytes. By default, a kernel that takes any has one per item."""
        return self.size if self.signature.local else 0

    @property
    def local_bytes(self) -> int:
        return 4 * self.local_floats

    @property
    def weight_format(self) -> str:
        """The format of the matrix that the kernel reads, or "" if it reads none."""
        return getattr(self, "format", "")

    def parameters(self) -> Parameters:
        """Return the buffers that the kernel takes with its macros."""
        own = self.signature
        return own.parameters | own.more if own.macro and self.value(own.macro) else own.parameters

    def launch(self, grid: Grid, **buffers: Reference) -> Launch:
        """Return a launch of `grid` work-groups on the buffers of the signature; `step` is the batch's by default."""
        taken = self.parameters()
        given = {"step": Fixed.STEP, **buffers} if "step" in taken else buffers
        if wrong := given.keys() ^ taken.keys():
            raise TypeError(f"{self.name} takes {', '.join(taken)}; missing or additional: {', '.join(sorted(wrong))}")
        if {*map(type, given.values())} - _REFERENCES:
            raise TypeError(f"{self.name}: every buffer must be a reference to one, found {given}")
        return Launch(self, grid, tuple([given[name] for name in taken]))

    def constants(self) -> list[Constant]:
        """Return all macros, the weight format's first."""
        of_format = formats.defines(self.weight_format) if self.weight_format else {}
        flag = {self.signature.flag: 1} if self.signature.flag else {}
        return [*(Constant(name, value) for name, value in (of_format | flag).items()), *self.macros()]

    def numbers(self) -> NDArray[np.int32]:
        """Return the values that a generic kernel receives at run time, 4 bytes each."""
        values = [constant.value for constant in self.constants() if constant.run_time]
        bits = [int(np.float32(v).view(np.int32)) if isinstance(v, float) else int(v) for v in values]
        return np.array(bits or [0], np.int32)

    def source(self, generic: bool) -> str:
        """Return the complete source, with the macros first."""
        lines, place = ["#define GENERIC 1\n"] * generic, 0
        for name, value, run_time in self.constants():
            text = _literal(value)
            if generic and run_time:
                text = f"AS_FLOAT(shape[{place}])" if isinstance(value, float) else f"shape[{place}]"
                place += 1
            lines.append(f"#define {name} {text}\n")
        format = self.weight_format
        unpack = ["unpack" if format in formats.QUANTIZED else "plain"] if format else []
        texts = [
            source_text("prelude"),
            formats.tables(format),
            *(source_text(part) for part in [*unpack, *self.parts.split()]),
        ]
        return "".join([*lines, *texts])


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel together with the grid and the buffers of a launch, in the order of `Kernel.parameters`."""

    kernel: Kernel
    grid: Grid
    buffers: tuple[Reference, ...]


def by_value(width: int, rows: Rows, times: int = 1, size: int = 128) -> Grid:
    """Return the grid with a work-item for every value of `times` rows of `width` values per batch row."""
    return by_row(-(-width // size), rows, times)


def by_row(groups: int, rows: Rows, times: int = 1) -> Grid:
    """Return the grid with `groups` work-groups for each of `times` rows per batch row."""
    return groups, (rows, 1, times), 1


def _literal(value: object) -> str:
    if isinstance(value, float):
        return f"({value:.9e}f)"
    return str(int(value)) if isinstance(value, bool) else str(value)
