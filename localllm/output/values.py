"""Convert an argument that a model wrote as text to JSON, according to the schema of the tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.output.literal import converted

_MOST_REFERENCES = 8
_MOST_CHOICES = 256
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_STARTS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
STRING = frozenset({"string"})


class Schemas(dict[str, Mapping[str, Any]]):
    """The schemas of tools by name, from OpenAI's format, {"type": "function", "function": {...}}."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
                schema = function.get("parameters")
                self[name] = schema if isinstance(schema, Mapping) else {}

    def of(self, tool: str) -> Property:
        """Return the schema of a tool's arguments."""
        schema = self.get(tool, {})
        return Property(schema, schema)


class Property:
    """A part of a tool's schema."""

    def __init__(self, schema: Any, root: Mapping[str, Any]) -> None:
        self._root = root
        self._schema = self._resolved(schema)
        self.types = self._found()  # the allowed JSON types, or None if all types are allowed

    @property
    def properties(self) -> tuple[str, ...]:
        """The keys of an object in the schema."""
        properties = self._schema.get("properties")
        return tuple(map(str, properties)) if isinstance(properties, Mapping) else ()

    @property
    def required(self) -> frozenset[str]:
        required = self._schema.get("required")
        return frozenset(map(str, required)) if isinstance(required, list) else frozenset()

    @property
    def choices(self) -> tuple[str, ...]:
        """The strings of an enum. The result is empty if other values are possible."""
        values = self._schema.get("enum")
        texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
        return tuple(values) if texts and isinstance(values, list) else ()

    def below(self, key: str) -> Property:
        """Return the schema of a key's value."""
        properties = self._schema.get("properties")
        return Property(properties.get(key) if isinstance(properties, Mapping) else None, self._root)

    def item(self) -> Property:
        return Property(self._schema.get("items"), self._root)

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(_MOST_REFERENCES):
            if not isinstance(schema, Mapping):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#"):
                return schema
            schema = self._root
            for step in reference.split("/")[1:]:
                schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
        return {}

    def _found(self) -> frozenset[str] | None:
        waiting: list[Any] = [self._schema]
        found: set[str] = set()
        for _ in range(_MOST_CHOICES):
            if not waiting:
                return frozenset(found)
            schema = self._resolved(waiting.pop())
            choices = schema.get("anyOf", schema.get("oneOf"))
            named = schema.get("type")
            values = schema.get("enum", [schema["const"]] if "const" in schema else None)
            if schema.get("nullable") is True:
                found.add("null")
            if isinstance(named, str):
                found.add(named)
            elif isinstance(named, list) and named:
                found.update(name for name in named if isinstance(name, str))
            elif isinstance(choices, list) and choices:
                waiting += choices
            elif isinstance(values, list) and values:
                found.update(_TYPES.get(type(value), "null") for value in values)
            else:
                return None
        return None


def argument(text: str, types: frozenset[str] | None) -> str:
    """Return the JSON of an argument written as `text`: a value of an allowed type if possible, else a string."""
    if types != STRING:
        value = converted(text)
        if value is not None and (types is None or _type(value) in _widened(types)):
            return value
    return json.dumps(text, ensure_ascii=False)


def _type(value: str) -> str:
    found = _STARTS.get(value[0])
    return found or ("number" if any(letter in value for letter in ".eE") else "integer")


def _widened(types: frozenset[str]) -> frozenset[str]:
    numbers = {"integer", "number"}  # 3.0 can be a valid integer
    return types | numbers if types & numbers else types
