"""Writes tool calls in a format's markers: for templates that omit calls, and as examples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from localllm.template.format import Calls, Items, filled


def written_call(form: Calls, name: str, arguments: Mapping[str, Any], number: int = 0) -> str:
    """Return call number `number` of an answer in the format `form`, in its own section."""
    shown = _json(name) if form.objects else form.prefix + name
    fields = {"name": shown, "n": str(number), "count": str(number + 1), "id": f"call{number:05}"}
    value = _value(form.quote, arguments) if form.items is None else _arguments(form.items, arguments)
    call = "".join(filled(form.begin, fields)) + value + "".join(form.end)
    parts = form.section[0], f"[{call}]" if form.listed else call, form.section[1]
    return ("\n" if form.objects else "").join(filter(None, parts))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _arguments(items: Items, arguments: Mapping[str, Any]) -> str:
    written = [_item(items, key, value) + items.gap for key, value in arguments.items()]
    return items.gap + items.separator.join(written)


def _item(items: Items, key: str, value: Any) -> str:
    fields = {"key": key, "type": _type(value), "string": str(isinstance(value, str)).lower()}
    if items.prefix and isinstance(value, Mapping):
        text = _arguments(items, value)
    elif items.prefix and isinstance(value, list):
        text = "".join(_item(items, "item", part) for part in value)
    else:
        text = value if isinstance(value, str) and items.close else _json(value)
    if items.cdata and isinstance(value, str):
        text = f"<![CDATA[{text}]]>"
    line = "\n" if items.lines else ""
    return "".join([*filled(items.key, fields), items.value, line, text, line, *filled(items.close, fields)])


def _type(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _value(quote: str, value: Any) -> str:
    """Return a value as JSON, or with Gemma's quotes and bare keys."""
    if not quote:
        return _json(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value(quote, part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_value(quote, part) for part in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else _json(value)
