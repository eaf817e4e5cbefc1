"""Writes tool calls in a format's markers: for templates that omit calls, and as examples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from localllm.template.format import Calls, JsonCalls, NamedCalls, NestedCalls, Pattern, PythonCalls, TaggedCalls


def written_call(form: Calls, name: str, arguments: Mapping[str, Any], number: int = 0) -> str:
    """Return call number `number` of an answer in the format `form`, in its own section."""
    before, after = form.section
    if isinstance(form, JsonCalls):
        return _json(form, name, arguments, number)
    if isinstance(form, PythonCalls):
        return f"{before}[{name}({', '.join(f'{key}={_json_of(value)}' for key, value in arguments.items())})]{after}"
    if isinstance(form, NamedCalls):
        begin = _filled(form.begin[0], {"name": form.prefix + name, "n": str(number), "id": f"call{number:05}"})
        value = _gemma(arguments, form.style.quote) if form.style.quote else _json_of(arguments)
        return before + begin + value + "".join(form.end) + after
    if isinstance(form, TaggedCalls):
        return before + _tagged(form, name, arguments, number) + after
    assert isinstance(form, NestedCalls)
    inside = "".join(_element(form.prefix, key, value) for key, value in arguments.items())
    return before + _filled(form.begin, {"name": name}) + inside + form.end + after


def _json_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _filled(pattern: Pattern, fields: Mapping[str, str]) -> str:
    return "".join(piece if at % 2 == 0 else fields[piece] for at, piece in enumerate(pattern.pieces))


def _json(form: JsonCalls, name: str, arguments: Mapping[str, Any], number: int) -> str:
    call: dict[str, Any] = {form.name: name, form.arguments: arguments}
    if form.id_key:
        call = {form.id_key: str(number), **call}
    if form.keyed:
        call = {name: arguments}
    text = _json_of([call] if form.listed else call)
    return "\n".join(filter(None, (form.section[0], text, form.section[1])))


def _tagged(form: TaggedCalls, name: str, arguments: Mapping[str, Any], number: int) -> str:
    line = "\n" if form.lines else ""
    parts = [_filled(form.begin, {"name": name, "n": str(number + 1)})]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else _json_of(value)
        if form.cdata and isinstance(value, str):
            text = f"<![CDATA[{value}]]>"
        fields = {"key": key, "type": _type(value), "string": str(isinstance(value, str)).lower()}
        parts.append(f"{_filled(form.key, fields)}{form.value}{line}{text}{line}{form.close}")
    return form.gap.join([*parts, form.end])


def _type(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _element(prefix: str, key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        text = "".join(_element(prefix, name, part) for name, part in value.items())
    elif isinstance(value, list):
        text = "".join(_element(prefix, "item", part) for part in value)
    else:
        text = value if isinstance(value, str) else _json_of(value)
    return f"{prefix}<{key}>{text}{prefix}</{key}>"


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(part, quote)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(part, quote) for part in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else _json_of(value)
