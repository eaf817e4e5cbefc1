"""Parse arguments that are written one by one: in tags, or as keyword arguments. See the rules in `calls.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from localllm.output.incoming import Incoming, Markers, Show, Wait
from localllm.output.literal import escaped, literal
from localllm.output.values import STRING, Property, argument
from localllm.template.format import Calls, fields_in, filled, head, tail

_MOST_DEPTH = 50  # maximum nesting of tags


class ItemsReader:
    """Parses the arguments of one call, and shows them as JSON."""

    def __init__(self, text: Incoming, form: Calls, show: Show) -> None:
        assert form.items is not None
        self._text, self._form, self._items, self._show = text, form, form.items, show

    def read(self, schema: Property) -> Wait[bool]:
        """Read arguments and the end of their call. Return whether both are complete."""
        text, items, close = self._text, self._items, self._form.section[1]
        separator, begin = "{", head(items.key)
        while True:
            yield from text.spaces()
            ended = yield from text.accept(self._form.end[0])
            if not ended and begin and not (yield from text.accept(begin)):
                ended = not items.prefix and close != "" and (yield from text.peek(len(close))) == close
                if not ended:
                    return False
            if ended:
                self._show("{}" if separator == "{" else "}")
                return True
            fields = yield from self._key()
            if fields is None:
                return False
            key = fields["key"] if items.prefix else fields["key"].strip()
            if not (yield from self._value(fields, schema.below(key), f"{separator}{_quoted(key)}: ")):
                return False
            separator = ", "

    def _key(self) -> Wait[Mapping[str, str] | None]:
        """Read the fields of the text before a value. Return None if it is malformed."""
        text, end = self._text, tail(self._items.key)
        if head(self._items.key):
            return fields_in(self._items.key, (yield from text.up_to(end)))
        key = yield from text.name()
        yield from text.spaces()
        return {"key": key} if key and (yield from text.accept(end)) else None

    def _value(self, fields: Mapping[str, str], schema: Property, begin: str) -> Wait[bool]:
        """Read a value and the text after it. `begin` is the JSON before the value."""
        text, items = self._text, self._items
        if not items.close:
            self._show(begin)
            whole = yield from literal(text, self._show)
            yield from text.spaces()
            yield from text.accept(items.separator.strip())
            return whole
        if items.prefix:
            value = yield from self._tag(fields["key"], schema)
            self._show(begin + value if value else "")
            return bool(value)
        if items.value:
            yield from text.spaces()
            if not (yield from text.accept(items.value)):
                return False
        return (yield from self._tagged(_types(fields, schema), begin))

    def _tagged(self, types: frozenset[str] | None, begin: str) -> Wait[bool]:
        """Read a value and its closing tag. Strings are streamed; other values are output when complete.

        The call must continue after the closing tag. A closing tag before other text is part of the value.
        """
        text, items, parts, streamed = self._text, self._items, list[str](), types == STRING
        add = (lambda part: self._show(escaped(part))) if streamed else parts.append
        if items.lines:
            yield from text.accept("\n")
        self._show(begin + '"' if streamed else "")
        if items.cdata and (yield from text.accept("<![CDATA[")):
            if not (yield from text.until(Markers(("]]>",)), add)):
                return False
            yield from text.accept(items.close)
            types = types or STRING
        else:
            markers = Markers((items.close, "\n" + items.close) if items.lines else (items.close,))
            while marker := (yield from text.until(markers, add)):
                if (yield from text.follows(self._form.following)):
                    break
                add(marker)
            if not marker:
                return False
        self._show('"' if streamed else begin + argument("".join(parts), types))
        return True

    def _tag(self, key: str, schema: Property, depth: int = 0) -> Wait[str]:
        """Return the JSON of the text and the tags in a tag, and consume its end. Return "" if it is malformed."""
        text, items, parts = self._text, self._items, list[str]()
        if schema.types is not None and "string" in schema.types:  # text, even if it contains tags
            ended = yield from text.until(Markers(filled(items.close, {"key": key})), parts.append)
            return argument("".join(parts), schema.types) if ended else ""
        inside: list[tuple[str, str]] = []  # (key, JSON)
        tag = Markers((head(items.key),))
        while (yield from text.until(tag, parts.append)):
            name = yield from text.up_to(tail(items.key))
            if name == "/" + key:
                return _joined(inside, "".join(parts), schema)
            if not name or name.startswith("/") or depth == _MOST_DEPTH:
                return ""
            listed = name == "item" and schema.types is not None and "array" in schema.types
            below = schema.item() if listed else schema.below(name)
            value = yield from self._tag(name, below, depth + 1)
            if not value:
                return ""
            inside.append((name, value))
        return ""


def _quoted(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


def _types(fields: Mapping[str, str], schema: Property) -> frozenset[str] | None:
    """Return the types of an argument: from its tag, else from the schema."""
    if fields.get("string") == "true" or fields.get("type") == "string":
        return STRING
    return None if "string" in fields or "type" in fields else schema.types


def _joined(inside: list[tuple[str, str]], own: str, schema: Property) -> str:
    """Return the JSON of a tag: a list if the schema or the tags in it show one, an object, or text."""
    types = schema.types
    if inside and all(key == "item" for key, _ in inside) and (types is None or "array" in types):
        return f"[{', '.join(value for _, value in inside)}]"
    if inside:
        return "{" + ", ".join(f"{_quoted(key)}: {value}" for key, value in inside) + "}"
    if not own.strip() and types is not None and types & {"array", "object"}:
        return "[]" if "array" in types else "{}"
    return argument(own, types)
