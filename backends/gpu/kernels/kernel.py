"""A kernel as an immutable object that determines its source, its work-groups and its launches.

A declaration is two dataclasses, a `Kernel` and its `Buffers`. Uppercase fields of the `Kernel` are macros of its
source, in field order; a lowercase field that holds `Macros` expands to their fields. `Shape`, `Factor` and `Flag` are
macros that differ between models: a generic kernel gets their values at run time. The fields of the `Buffers` are the
parameters of the kernel's signature, in field order. Equal kernels are compiled once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from localllm.backends.gpu import formats
from localllm.backends.gpu.references import Reference

FEW_ROWS = 16  # row limit of kernels whose summation order does not depend on the batch
HEADER = 8  # ints that precede the per-row arrays in the step buffer

Count = str  # "batch", "logits", "tiles", "partitions", "keys 0" and so on
# (count, per group, times) or (..., more): ceil(count / per group) * times + more
Dimension = int | tuple[Count, int, int] | tuple[Count, int, int, int]
Grid = tuple[Dimension, Dimension, Dimension]  # work-groups


@dataclass(frozen=True, slots=True)
class Access:
    """How a kernel accesses a buffer."""

    element: str  # the C type
    written: bool = False


FloatIn = Annotated[Reference, Access("float")]
IntIn = Annotated[Reference, Access("int")]
WordIn = Annotated[Reference, Access("uint")]
ByteIn = Annotated[Reference, Access("uchar")]
FloatOut = Annotated[Reference, Access("float", written=True)]
IntOut = Annotated[Reference, Access("int", written=True)]
WordOut = Annotated[Reference, Access("uint", written=True)]
ByteOut = Annotated[Reference, Access("uchar", written=True)]


@dataclass(frozen=True, slots=True)
class Macro:
    """How a field becomes a macro. By default, its name and value are used directly."""

    name: str = ""  # macro name, if it differs from the field's name
    run_time: bool = False  # whether a generic kernel gets the value at run time
    text: str = ""  # format string for the value


Shape = Annotated[int, Macro(run_time=True)]  # a width, a stride, a count
Factor = Annotated[float, Macro(run_time=True)]
Flag = Annotated[bool, Macro(run_time=True)]
Expression = Annotated[str, Macro("OPERATION(a, b)", text="({})")]  # an expression of two values a and b


class Declared:
    """A dataclass whose annotations are checked at construction."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, (kinds, _) in _hints(type(self)).items():
            value = getattr(self, name)
            if type(value) not in kinds:
                raise TypeError(f"{type(self).__name__}.{name} must be {_names(kinds)}, found {value!r}")


def _hints(declared: Any) -> dict[str, tuple[tuple[type[Any], ...], Any]]:
    """Return the types of each field, and the `Macro` or `Access` in its annotation, if any."""
    return _cached_hints(declared)


@cache
def _cached_hints(declared: type[Any]) -> dict[str, tuple[tuple[type[Any], ...], Any]]:
    found = {}
    hints = get_type_hints(declared, include_extras=True)
    for field in fields(declared):
        hint = hints[field.name]
        options = get_args(hint) if not hasattr(hint, "__metadata__") and get_args(hint) else (hint,)
        extra = next((option.__metadata__[0] for option in options if hasattr(option, "__metadata__")), None)
        plain = [option.__origin__ if hasattr(option, "__metadata__") else option for option in options]
        kinds = tuple([kind for option in plain for kind in (get_args(option) or (option,))])
        found[field.name] = kinds, extra
    return found


def _names(kinds: tuple[type, ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)


class Constant(NamedTuple):
    """A macro definition: name and value."""

    name: str
    value: Any
    run_time: bool = False  # whether a generic kernel gets the value at run time


class Macros(Declared):
    """A group of macros, in field order. Fields that are None are omitted."""

    __slots__ = ()

    def macros(self) -> Iterator[Constant]:
        for name, (_, extra) in _hints(type(self)).items():
            value, macro = getattr(self, name), extra if isinstance(extra, Macro) else Macro()
            if isinstance(value, Macros):
                yield from value.macros()
            elif name.isupper() and value is not None:
                text = macro.text.format(value) if macro.text else value
                yield Constant(macro.name or name, text, macro.run_time)


class Buffers(Declared):
    """The buffers of a launch, in the order of the kernel's parameters. Groups that are None are omitted."""

    __slots__ = ()

    @classmethod
    def parameters(cls, groups: bool = True) -> list[tuple[str, Access]]:
        """Return (name in the source, access) of every parameter, with or without optional groups.

        Names that Python reserves end with _ in the declaration.
        """
        found: list[tuple[str, Access]] = []
        for name, (kinds, access) in _hints(cls).items():
            if access is not None:
                found.append((name.rstrip("_"), access))
            elif groups:
                found += kinds[0].parameters()
        return found

    def references(self) -> tuple[Reference, ...]:
        found: list[Reference] = []
        for name in _hints(type(self)):
            value = getattr(self, name)
            found += value.references() if isinstance(value, Buffers) else [value] * (value is not None)
        return tuple(found)


B = TypeVar("B", bound=Buffers)


class Kernel(Macros, Generic[B]):
    """A kernel, with everything that its compilation depends on."""

    __slots__ = ()

    name: ClassVar[str]  # name of the kernel in its source
    parts: ClassVar[str]  # source files after the prelude
    flag: ClassVar[str] = ""  # the macro that selects the kernel in its source file

    @property
    def size(self) -> int:
        """Number of work-items per group."""
        return 128

    @property
    def local_floats(self) -> int:
        """Local memory per work-group, in units of 4 bytes."""
        return 0

    @property
    def local_bytes(self) -> int:
        return 4 * self.local_floats

    @property
    def weight_format(self) -> str:
        """The format of the matrix that the kernel reads, or "" if it reads none."""
        return getattr(self, "format", "")

    @classmethod
    def buffers(cls) -> type[Buffers]:
        """Return the class that declares the kernel's buffers."""
        bases = [base for kind in cls.__mro__ for base in kind.__dict__.get("__orig_bases__", ())]
        found: type[Buffers] = next(kind for base in bases for kind in get_args(base) if isinstance(kind, type))
        return found

    def launch(self, grid: Grid, buffers: B) -> Launch:
        """Return a launch of `grid` work-groups on the given buffers."""
        if type(buffers) is not self.buffers() or not self.takes(buffers):
            raise TypeError(f"{self.name}: the buffers do not match the kernel: {buffers}")
        return Launch(self, grid, buffers)

    def takes(self, buffers: B) -> bool:
        """Return whether the buffers include the groups that the macros require."""
        return True

    def constants(self) -> list[Constant]:
        """Return all macros, the weight format's first."""
        of_format = formats.defines(self.weight_format) if self.weight_format else {}
        flag = {self.flag: 1} if self.flag else {}
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
    """A kernel together with the buffers and the grid of a launch."""

    kernel: Kernel[Any]
    grid: Grid
    buffers: Buffers


@cache
def source_text(name: str) -> str:
    """Return the text of a kernel source file."""
    return (files("localllm.backends.gpu") / "kernels" / f"{name}.cl").read_text(encoding="utf-8")


def _literal(value: object) -> str:
    if isinstance(value, float):
        return f"({value:.9e}f)"
    return str(int(value)) if isinstance(value, bool) else str(value)
