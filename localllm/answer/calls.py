"""Calls of tools, read from the text of an answer: a parser for each kind in `grammars.py`.

A parser runs behind the marker that begins a call. It returns False, having shown nothing, if no call follows: its
caller shows the text as it is. Once a call has begun to be shown it stays one: if the rest of it is broken or missing,
its arguments remain an incomplete JSON object, which no client can run by mistake.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from localllm.answer.grammars import JsonCalls, NamedCalls, NestedCalls, Pattern, PythonCalls, TaggedCalls
from localllm.answer.incoming import Incoming, Markers, Show, Wait
from localllm.answer.literal import LOOSE, converted, escaped, literal, plain_string
from localllm.answer.output import Output
from localllm.answer.values import STRING, Property, Schemas, argument

MOST_NAME = 256  # characters
_MOST_HEADER = 1024
_MOST_DEPTH = 50
_NAMES, _ARGUMENTS, _IDS = {"name", "tool_name"}, {"arguments", "parameters", "args"}, {"id", "tool_call_id", "call_id"}
_NAME = re.compile(r"[\w.\-]*")
_CALLABLE = re.compile(rf"[^\s<>{{}}\[\]\"'`|]{{1,{MOST_NAME}}}")


@dataclass(frozen=True, slots=True)
class Context:
    """What parsers of calls share."""

    text: Incoming
    out: Output
    tools: Schemas
    strict: bool = False  # only calls of known tools count

    def names(self, name: str) -> bool:
        """Whether a call can have this name."""
        return (not self.strict or name in self.tools) and _CALLABLE.fullmatch(name) is not None

    def start(self, name: str, id_: str = "") -> None:
        """Show that a call begins: from here on it stays one."""
        self.text.forget()
        self.out.start(name, id_)


# -- JSON ------------------------------------------------------------------------------------------------------------


def json_calls(context: Context, form: JsonCalls) -> Wait[bool]:
    """Read an object, several, or a list of them."""
    text = context.text
    yield from text.spaces()
    listed = yield from text.accept("[")
    count = 0
    while True:
        yield from text.spaces()
        if count and (yield from text.peek()) in ({","} if listed else {",", ";"}):
            text.take(1)
            yield from text.spaces()
        if (yield from text.peek()) != "{":
            break
        if count:
            text.record()
        if not (yield from _ObjectCall(context, form).read()):
            if count:
                context.out.text(text.back())
            break
        count += 1
    if count and listed:
        yield from text.accept("]")
    return count > 0


class _ObjectCall:
    """One object with a name and arguments, in any order."""

    def __init__(self, context: Context, form: JsonCalls) -> None:
        self._context, self._text, self._form = context, context.text, form
        self._name = ""
        self._id = ""
        self._waiting = ""  # arguments that come before the name
        self._started = False

    def read(self) -> Wait[bool]:
        text = self._text
        text.take(1)
        depth = 1  # {"type": "function", "function": {"name": ...}} is read, too
        while depth:
            yield from text.spaces()
            if (yield from text.accept("}")):
                depth -= 1
            elif not (yield from text.accept(",")):
                key = yield from self._string()
                yield from text.spaces()
                if key is None or not (yield from text.accept(":")):
                    return self._started
                yield from text.spaces()
                if key == "function" and depth == 1 and (yield from text.accept("{")):
                    depth += 1
                elif not (yield from self._value(key)):
                    return self._started
        if not self._named():
            return False
        if not self._started:
            self._start()
            self._context.out.arguments(self._waiting or "{}")
        return True

    def _value(self, key: str) -> Wait[bool]:
        """Read the value of a key."""
        if self._form.keyed and not self._name:
            self._name, key = key, "arguments"
        if key in _NAMES or key == "function":
            self._name = (yield from self._string()) or ""
            return self._named()
        if key in _IDS and not self._started:
            parts: list[str] = []
            whole = yield from literal(self._text, LOOSE, parts.append)
            self._id = (plain_string(parts, MOST_NAME) or "") if whole else ""
            return whole
        if key not in _ARGUMENTS or self._started or self._waiting:
            return not self._bare_other(key) and (yield from literal(self._text, LOOSE, lambda part: None))
        if (yield from self._text.peek()) == "{" and self._named():
            self._start()
            return (yield from literal(self._text, LOOSE, self._context.out.arguments))
        return (yield from self._late_arguments())

    def _named(self) -> bool:
        return self._context.names(self._name) and not (self._form.bare and self._name not in self._context.tools)

    def _bare_other(self, key: str) -> bool:
        """Whether the key says that an answer in JSON is no call."""
        return self._form.bare and not self._started and key != "type"

    def _late_arguments(self) -> Wait[bool]:
        """Read arguments that cannot be shown yet, or are written as a string."""
        parts: list[str] = []
        if not (yield from literal(self._text, LOOSE, parts.append)):
            return False
        value = "".join(parts)
        if value.startswith('"'):
            value = converted(json.loads(value)) or ""
        self._waiting = "{}" if value == "null" else value
        return self._waiting.startswith("{")

    def _string(self) -> Wait[str | None]:
        parts: list[str] = []
        if (yield from self._text.peek()) not in ('"', "'"):
            return None
        if not (yield from literal(self._text, LOOSE, parts.append)):
            return None
        return plain_string(parts, MOST_NAME)

    def _start(self) -> None:
        self._started = True
        self._context.start(self._name, self._id)


# -- names between markers -------------------------------------------------------------------------------------------


def named_call(context: Context, form: NamedCalls) -> Wait[bool]:
    """Read a name, the marker after it, and an object."""
    text, end = context.text, form.begin[0].end
    if end:
        header = yield from _header(text, end)
        yield from text.spaces()
    else:
        header = yield from text.run(_BEFORE_BRACE, _MOST_HEADER)
    fields = next(filter(None, (pattern.read(header) for pattern in form.begin)), None) if header is not None else None
    if fields is None or (yield from text.peek()) != "{":
        return False
    name = fields["name"].strip().removeprefix(form.prefix)
    if not context.names(name):
        return False
    context.start(name, (header or "") if form.whole_id else fields.get("id", ""))
    if (yield from literal(text, form.style, context.out.arguments)):
        for marker in form.end:
            if (yield from text.follows((marker.strip(),))):
                yield from text.spaces()
                yield from text.accept(marker.strip())
    return True


_BEFORE_BRACE = re.compile(r"[^{]*")


def _header(text: Incoming, end: str) -> Wait[str | None]:
    """Take the text before `end`, and that; None if it does not come soon."""
    parts: list[str] = []
    found = yield from text.until(Markers((end,)), parts.append, _MOST_HEADER)
    return "".join(parts) if found else None


# -- tags ------------------------------------------------------------------------------------------------------------


def tagged_call(context: Context, form: TaggedCalls) -> Wait[bool]:
    """Read a name and tagged arguments."""
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
            header = yield from _header(text, form.key.end)
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
    """Take the rest of the tag that begins a call. Without an end of its own, the name ends where a tag begins."""
    header = (yield from _header(text, begin.end)) if begin.end else (yield from text.run(_UNTAGGED, MOST_NAME))
    fields = begin.read(header) if header is not None else None
    return fields["name"].strip() if fields is not None else ""


_UNTAGGED = re.compile(r"[^<]*")


def _types(fields: Any, schema: Property) -> frozenset[str] | None:
    """Return the types of an argument: as its tag says, else as the schema does."""
    if fields.get("string") == "true" or fields.get("type") == "string":
        return STRING
    if "string" in fields or "type" in fields:
        return None
    return schema.types


def _tag_value(text: Incoming, form: TaggedCalls, types: frozenset[str] | None, start: str, show: Show) -> Wait[bool]:
    """Read a value and its closing tag. Strings are shown as they come, other values when they are complete."""
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
    """Read up to the closing tag behind which the call goes on; one that prose follows belongs to the value."""
    markers = Markers((form.close, "\n" + form.close) if form.lines else (form.close,))
    following = (form.key.start, form.end, form.section[1] or form.end)
    while marker := (yield from text.until(markers, show)):
        if (yield from text.follows(following)):
            return True
        show(marker)
    return False


# -- elements, and Python --------------------------------------------------------------------------------------------


def nested_call(context: Context, form: NestedCalls) -> Wait[bool]:
    """Read a name, and an element for each argument."""
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
        key = yield from _header(text, ">")
        if not key:
            return True
        value = yield from _element(text, form.prefix, key, schema.below(key))
        if value is None:
            return True
        out.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
        separator = ", "


def _element(text: Incoming, prefix: str, key: str, schema: Property, depth: int = 0) -> Wait[str | None]:
    """Return the JSON of what stands in an element, and go past its end; None if it is broken."""
    parts: list[str] = []
    inside: list[tuple[str, str]] = []  # (key, JSON)
    tag = Markers((prefix + "<",))
    while (yield from text.until(tag, parts.append)):
        name = yield from _header(text, ">")
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
    """Return the JSON of an element: a list if the schema or its parts say so, an object, or its text."""
    types = schema.types
    if inside and all(key == "item" for key, _ in inside) and (types is None or "array" in types):
        return f"[{', '.join(value for _, value in inside)}]"
    if inside:
        return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in inside) + "}"
    if not own.strip() and types is not None and "string" not in types and types & {"array", "object"}:
        return "[]" if "array" in types else "{}"
    return argument(own, types)


def python_calls(context: Context, form: PythonCalls) -> Wait[bool]:
    """Read a list of calls in Python."""
    text, out = context.text, context.out
    count = 0
    yield from text.spaces()
    if not (yield from text.accept("[")):
        return False
    while True:
        yield from text.spaces()
        if count:
            text.record()
        name = yield from text.run(_NAME, MOST_NAME)
        if not context.names(name) or not (yield from text.accept("(")):
            if count:
                out.text(text.back())
                yield from text.accept("]")
            return count > 0
        context.start(name)
        count += 1
        if not (yield from _python_arguments(text, out.arguments)):
            return True
        yield from text.spaces()
        yield from text.accept(",")


def _python_arguments(text: Incoming, show: Show) -> Wait[bool]:
    """Read key=value, ... and the closing bracket."""
    separator = "{"
    while True:
        yield from text.spaces()
        if (yield from text.accept(")")):
            show("{}" if separator == "{" else "}")
            return True
        key = yield from text.run(_NAME, MOST_NAME)
        yield from text.spaces()
        if not key or not (yield from text.accept("=")):
            return False
        show(f'{separator}"{escaped(key)}": ')
        if not (yield from literal(text, LOOSE, show)):
            return False
        separator = ", "
        yield from text.spaces()
        yield from text.accept(",")
