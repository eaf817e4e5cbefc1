"""The signatures of the kernels, read from their sources (*.cl): the one place that declares buffers.

A signature may end with a macro whose name ends with _ARGUMENTS, which holds parameters. If `#if` or `#ifdef` selects
its definition, the kernel has these parameters only with the macro that is tested.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from keyword import iskeyword

_LINE = re.compile(
    r"^(?:#(if|ifdef|ifndef|elif|else|endif)\b[ \t]*(.*)|#define (\w+_ARGUMENTS)(.*)"
    r"|KERNEL\((\w+), (\w+)\)\(([^{]*)\) \{)$",
    re.MULTILINE,
)
_PARAMETER = re.compile(r"GLOBAL (const )?(\w+) \*(?:RESTRICT )?(\w+)|SHAPE_PARAMETER|LOCAL_ARGUMENT")


_LAST = "", "LOCAL_ARGUMENT"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A buffer that a kernel takes."""

    element: str  # the C type
    written: bool


Parameters = dict[str, Parameter]  # by name, in order; names that Python reserves end with _


@dataclass(frozen=True, slots=True)
class Signature:
    flag: str  # the macro that selects the kernel in its source file, or ""
    size: str  # work-items per group: a number, or the macro that holds it
    local: bool  # whether launches give the kernel local memory
    parameters: Parameters
    macro: str  # the macro with which the kernel takes more parameters, or ""
    more: Parameters


@cache
def source_text(name: str) -> str:
    """Return the text of a kernel source file."""
    return (files("localllm.backends.gpu") / "kernels" / f"{name}.cl").read_text(encoding="utf-8")


@cache
def signatures() -> dict[str, Signature]:
    """Return the signature of every kernel in the sources."""
    folder = files("localllm.backends.gpu") / "kernels"
    names = sorted(path.name.removesuffix(".cl") for path in folder.iterdir() if path.name.endswith(".cl"))
    return read(source_text(name) for name in names)


def read(sources: Iterable[str]) -> dict[str, Signature]:
    """Return the signatures in these source texts. Raises ValueError if one is not as described above."""
    groups: dict[str, tuple[str, str]] = {}  # condition and text, by name of the macro
    kernels: dict[str, tuple[str, str, str]] = {}  # flag, size and text
    for source in sources:
        conditions = [""]
        for directive, tested, group, text, size, name, parameters in _LINE.findall(source.replace("\\\n", " ")):
            if name in kernels or (group in groups and text.strip()):
                raise ValueError(f"{name or group} is declared twice")
            if directive.startswith("if"):
                conditions.append(tested.partition("//")[0].strip())
            elif directive == "endif":
                conditions.pop()
            elif directive:
                conditions[-1] = f"not {conditions[-1]}"
            elif name:
                kernels[name] = conditions[-1], size, parameters
            elif text.strip():
                groups[group] = conditions[-1], text
    return {name: _signature(*kernel, groups) for name, kernel in kernels.items()}


def _signature(flag: str, size: str, text: str, groups: dict[str, tuple[str, str]]) -> Signature:
    """Return a signature. Expand the macros for parameters; `more` comes from a macro with a condition."""
    macro, more, local = "", "", "LOCAL_ARGUMENT" in text
    while group := re.search(r"\b\w+_ARGUMENTS\b", text):
        condition, own = groups[group[0]]
        if condition and (macro or not condition.isidentifier() or text[group.end() :].strip() not in _LAST):
            raise ValueError(f"{group[0]} must be the only condition, and the last of the parameters: {condition}")
        text = text.replace(group[0], "" if condition else own)
        macro, more = (condition, own) if condition else (macro, more)
    return Signature(flag, size, local, _parameters(text), macro, _parameters(more))


def _parameters(text: str) -> Parameters:
    if _PARAMETER.sub("", text).strip(" ,\n"):
        raise ValueError(f"not the parameters of a kernel: {text}")
    found = [groups for groups in _PARAMETER.findall(text) if groups[2]]
    return {name + "_" * iskeyword(name): Parameter(element, not const) for const, element, name in found}
