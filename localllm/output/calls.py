"""Parse tool calls in the output. Each call format in `template/format.py` has a parser.

A parser runs after the marker that begins a call. If no call follows, it returns False and outputs nothing, and its
caller outputs the text unchanged. Once a call has been started, it stays a call. If it turns out to be malformed or
truncated, its arguments remain an incomplete JSON object, which no client can run by mistake.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from localllm.output.incoming import Incoming, Markers, Show, Wait
from localllm.output.literal import converted, escaped, literal, plain_string
from localllm.output.parts_writer import PartsWriter
from localllm.output.values import Schemas
from localllm.template.format import LOOSE, JsonCalls, NamedCalls, PythonCalls

MOST_NAME = 256  # characters
_MOST_HEADER = 1024
_MOST_DEPTH = 50
_NAMES, _ARGUMENTS, _IDS = {"name", "tool_name"}, {"arguments", "parameters", "args"}, {"id", "tool_call_id", "call_id"}
_NAME = re.compile(r"[\w.\-]*")
_CALLABLE = re.compile(rf"[^\s<>{{}}\[\]\"'`|]{{1,{MOST_NAME}}}")


@dataclass(frozen=True, slots=True)
class CallContext:
    """The state and options that all call parsers share."""

    text: Incoming
    out: PartsWriter
    tools: Schemas
    strict: bool = False  # whether only calls of known tools count

    def names(self, name: str) -> bool:
        """Return whether a call can have this name."""
        return (not self.strict or name in self.tools) and _CALLABLE.fullmatch(name) is not None

    def start(self, name: str, id_: str = "") -> None:
        """Output the start of a call. From here on it stays a call."""
        self.text.forget()
        self.out.start(name, id_)


# -- JSON ------------------------------------------------------------------------------------------------------------


def json_calls(context: CallContext, form: JsonCalls) -> Wait[bool]:
    """Read one object, several objects, or a list of objects."""
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
    """A call as a JSON object with a name and arguments, in any order."""

    def __init__(self, context: CallContext, form: JsonCalls) -> None:
        self._context, self._text, self._form = context, context.text, form
        self._name = ""
        self._id = ""
        self._waiting = ""  # arguments that precede the name
        self._started = False

    def read(self) -> Wait[bool]:
        text = self._text
        text.take(1)
        depth = 1  # also accepts {"type": "function", "function": {"name": ...}}
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
        """Read a key's value."""
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
        """Return whether this key shows that a JSON object is content and not a call."""
        return self._form.bare and not self._started and key != "type"

    def _late_arguments(self) -> Wait[bool]:
        """Read arguments that precede the name or are written as a string."""
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


def named_call(context: CallContext, form: NamedCalls) -> Wait[bool]:
    """Read a call: a name, the marker after the name, and a JSON object of arguments."""
    text, end = context.text, form.begin[0].end
    if end:
        header = yield from up_to(text, end)
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


def up_to(text: Incoming, end: str) -> Wait[str | None]:
    """Take the text up to and including `end`, and return the part before it, or None if `end` does not follow soon."""
    parts: list[str] = []
    found = yield from text.until(Markers((end,)), parts.append, _MOST_HEADER)
    return "".join(parts) if found else None


# -- Python ----------------------------------------------------------------------------------------------------------


def python_calls(context: CallContext, form: PythonCalls) -> Wait[bool]:
    """Read a list of calls in Python syntax."""
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
