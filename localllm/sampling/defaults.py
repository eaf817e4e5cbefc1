"""Sampling defaults in a GGUF (`general.sampling.*`, as read by llama.cpp).

The GGUF's values override the program's defaults, and the user's options override both. A note reports each unusable
value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.options import OptionError, SamplingOptions, declared
from localllm.options.sampling import NAMES, read_samplers

PREFIX = "general.sampling."
_FIELDS = {each.option.key: each.name for each in declared(SamplingOptions) if each.option.key}
_SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class FileDefaults:
    """The GGUF's values for `SamplingOptions` by field name, and a note for each key that was skipped."""

    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def options(self, asked: Mapping[str, Any]) -> SamplingOptions:
        """Return the sampling options: the GGUF's defaults, overridden by `asked`."""
        return SamplingOptions.of({**self.values, **asked})


def file_defaults(metadata: Mapping[str, Any]) -> FileDefaults:
    """Return the GGUF's sampling defaults. Never fails: a value out of range is replaced by the program's default."""
    values: dict[str, Any] = {}
    notes: list[str] = []
    for key, name in _FIELDS.items():
        if (value := metadata.get(PREFIX + key)) is not None:
            _take(values, notes, key, name, value)
    sequence = metadata.get(PREFIX + _SEQUENCE)
    if sequence is not None:
        names = read_samplers(sequence) if isinstance(sequence, str) else ()
        known = tuple(name for name in names if name in NAMES)
        if known == names and names:
            values["samplers"] = names
        else:
            notes.append(_not_taken(_SEQUENCE, sequence, f"known are {', '.join(NAMES)}"))
    return FileDefaults(values, tuple(notes))


def _take(values: dict[str, Any], notes: list[str], key: str, name: str, value: Any) -> None:
    try:
        SamplingOptions.of({name: value})
    except OptionError as error:
        notes.append(_not_taken(key, value, str(error).rpartition(": ")[2]))
    else:
        values[name] = value


def _not_taken(key: str, value: Any, why: str) -> str:
    shown = repr(value) if isinstance(value, str | int | float) else type(value).__name__
    return f"the file's {PREFIX}{key} is {shown[:80]} and does not count: {why}"
