"""Parse tool calls in XML-like tags, by the rules described in `calls.py`."""

from __future__ import annotations

import json
import re
from typing import Any

from localllm.output.calls import MOST_NAME, CallContext, up_to
from localllm.output.incoming import Incoming, Markers, Show, Wait
from localllm.output.literal import escaped
from localllm.output.values import STRING, Property, argument
from localllm.template.format import NestedCalls, Pattern, TaggedCalls

_MOST_DEPTH = 50  # maximum nesting of elements


def tagged_call(context: CallContext, form: TaggedCalls) -> Wait[bool]:
    """Read a call: a name and tagged arguments."""
    text, out = context.text, context.out
    name = yield from _tag_name(text, form.begin)
    following = (form.key.start, form.end, form.section[1] or form.end)
    if not context.names(name) or not (yield from text.follows(following)):
        return False
    context.start(name)
    schema = context.tools.of(name)
    separator = "{"
    while True:
        yield from text.spaces()
        if (yield from text.accept(form.key.start)):
            header = yield from up_to(text, form.key.end)
            fields = form.key.read(header) if header is not None else None
            if fields is None:
                return True
            if form.value:
                yield from text.spaces()
                if not (yield from text.accept(form.value)):
                    return True
            types = _types(fields, schema.below(fields["key"].strip()))
            start = f"{separator}{json.dumps(fields['key'].strip(), ensure_ascii=False)}: "
            if not (yield from _tag_value(text, form, types, start, out.arguments)):
                return True
            separator = ", "
        elif (yield from text.accept(form.end)) or (yield from _next_is(text, form.section[1])):
            out.arguments("{}" if separator == "{" else "}")
            return True
        else:
            return True


def _next_is(text: Incoming, marker: str) -> Wait[bool]:
    return bool(marker) and (yield from text.peek(len(marker))) == marker


def _tag_name(text: Incoming, begin: Pattern) -> Wait[str]:
    """Take the remainder of the start tag of a call. If the tag has no end marker in this format, the name ends at the
    next tag."""
    header = (yield from up_to(text, begin.end)) if begin.end else (yield from text.run(_UNTAGGED, MOST_NAME))
    fields = begin.read(header) if header is not None else None
    return fields["name"].strip() if fields is not None else ""


_UNTAGGED = re.compile(r"[^<]*")


def _types(fields: Any, schema: Property) -> frozenset[str] | None:
    """Return the types of an argument: from its tag, else from the schema."""
    if fields.get("string") == "true" or fields.get("type") == "string":
        return STRING
    if "string" in fields or "type" in fields:
        return None
    return schema.types


def _tag_value(text: Incoming, form: TaggedCalls, types: frozenset[str] | None, start: str, show: Show) -> Wait[bool]:
    """Read a value and its closing tag. Strings are streamed; other values are output when complete."""
    parts: list[str] = []
    streamed = types == STRING
    add = (lambda part: show(escaped(part))) if streamed else parts.append
    if form.lines:
        yield from text.accept("\n")
    show(start + '"' if streamed else "")
    if form.cdata and (yield from text.accept("<![CDATA[")):
        if not (yield from text.until(Markers(("]]>",)), add)):
            return False
        yield from text.accept(form.close)
        types = types or STRING
    elif not (yield from _tag_text(text, form, add)):
        return False
    show('"' if streamed else start + argument("".join(parts), types))
    return True


def _tag_text(text: Incoming, form: TaggedCalls, show: Show) -> Wait[bool]:
    """Read up to the closing tag after which the call continues. A closing tag before other text is part of the
    value."""
    markers = Markers((form.close, "\n" + form.close) if form.lines else (form.close,))
    following = (form.key.start, form.end, form.section[1] or form.end)
    while marker := (yield from text.until(markers, show)):
        if (yield from text.follows(following)):
            return True
        show(marker)
    return False


# -- elements ---------------------------------------------------------------------------------------------------------


def nested_call(context: CallContext, form: NestedCalls) -> Wait[bool]:
    """Read a call: a name and one element per argument."""
    text, out = context.text, context.out
    name = yield from _tag_name(text, form.begin)
    if not context.names(name) or not (yield from text.follows((form.prefix,))):
        return False
    context.start(name)
    schema = context.tools.of(name)
    separator = "{"
    while True:
        yield from text.spaces()
        if (yield from text.accept(form.end)):
            out.arguments("{}" if separator == "{" else "}")
            return True
        if not (yield from text.accept(form.prefix + "<")):
            return True
        key = yield from up_to(text, ">")
        if not key:
            return True
        value = yield from _element(text, form.prefix, key, schema.below(key))
        if value is None:
            return True
        out.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
        separator = ", "


def _element(text: Incoming, prefix: str, key: str, schema: Property, depth: int = 0) -> Wait[str | None]:
    """Return the JSON of an element's content, and consume its closing tag. Return None if the element is malformed."""
    parts: list[str] = []
    if schema.types is not None and "string" in schema.types:  # text, even if it contains tags
        ended = yield from text.until(Markers((f"{prefix}</{key}>",)), parts.append)
        return argument("".join(parts), schema.types) if ended else None
    inside: list[tuple[str, str]] = []  # (key, JSON)
    tag = Markers((prefix + "<",))
    while (yield from text.until(tag, parts.append)):
        name = yield from up_to(text, ">")
        if name == "/" + key:
            return _joined(inside, "".join(parts), schema)
        if not name or name.startswith("/") or depth == _MOST_DEPTH:
            return None
        types = schema.types
        listed = types is not None and "array" in types and name == "item"
        below = schema.item() if listed else schema.below(name)
        value = yield from _element(text, prefix, name, below, depth + 1)
        if value is None:
            return None
        inside.append((name, value))
    return None


def _joined(inside: list[tuple[str, str]], own: str, schema: Property) -> str:
    """Return the JSON of an element: a list if the schema or the child elements show one, an object, or text."""
    types = schema.types
    if inside and all(key == "item" for key, _ in inside) and (types is None or "array" in types):
        return f"[{', '.join(value for _, value in inside)}]"
    if inside:
        return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in inside) + "}"
    if not own.strip() and types is not None and types & {"array", "object"}:
        return "[]" if "array" in types else "{}"
    return argument(own, types)
