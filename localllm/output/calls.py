"""Parse tool calls in the output, as their format describes them (`template/format.py`).

A parser runs after the marker that begins a call. If no call follows, it returns False and outputs nothing, and its
caller outputs the text unchanged. Once a call has been started, it stays a call. If it turns out to be malformed or
truncated, its arguments remain an incomplete JSON object, which no client can run by mistake.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from localllm.output.incoming import MOST_HEADER, MOST_NAME, Incoming, Wait
from localllm.output.items import ItemsReader
from localllm.output.literal import converted, literal, plain_string
from localllm.output.parts_writer import PartsWriter
from localllm.output.values import Schemas
from localllm.template.format import Calls, fields_in, head, tail

_NAMES, _ARGUMENTS, _IDS = {"name", "tool_name"}, {"arguments", "parameters", "args"}, {"id", "tool_call_id", "call_id"}
_CALLABLE = re.compile(rf"[^\s<>{{}}\[\]\"'`|]{{1,{MOST_NAME}}}")
_BEFORE_BRACE, _BEFORE_TAG = re.compile(r"[^{]*"), re.compile(r"[^<]*")


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


def read_calls(context: CallContext, form: Calls, marker: str) -> Wait[bool]:
    """Read the calls, or the call, after this marker."""
    if form.objects or form.listed:
        return (yield from call_list(context, form))
    if marker != head(form.begin):
        yield from context.text.spaces()
        if not (yield from context.text.accept(head(form.begin))):
            return False
    return (yield from _marked_call(context, form))


def _marked_call(context: CallContext, form: Calls) -> Wait[bool]:
    """Read a call: the rest of the text that begins it, with the name, and the arguments."""
    text, items, after = context.text, form.items, tail(form.begin)
    if after:
        header = yield from text.up_to(after)
    elif items is None:
        header = yield from text.run(_BEFORE_BRACE, MOST_HEADER)
    else:
        header = yield from text.run(_BEFORE_TAG, MOST_NAME)
    found = [fields_in(pattern, header) for pattern in (form.begin, *form.also)]
    fields = next(filter(None, found), None)
    if items is None and after:
        yield from text.spaces()
    if fields is None or (items is None and (yield from text.peek()) != "{"):
        return False
    name = fields["name"].strip().removeprefix(form.prefix)
    if not context.names(name):
        return False
    if items is not None and not (yield from text.follows(form.following)):
        return False
    context.start(name, header if form.whole_id else fields.get("id", ""))
    if items is not None:
        yield from ItemsReader(text, form, context.out.arguments).read(context.tools.of(name))
    elif (yield from literal(text, context.out.arguments, form.quote)):
        for marker in form.end:
            if (yield from text.follows((marker.strip(),))):
                yield from text.spaces()
                yield from text.accept(marker.strip())
    return True


# -- lists, and JSON objects -----------------------------------------------------------------------------------------


def call_list(context: CallContext, form: Calls) -> Wait[bool]:
    """Read a list of calls. JSON objects may also come alone, or without brackets around them."""
    text, count = context.text, 0
    yield from text.spaces()
    listed = yield from text.accept("[")
    if not listed and not form.objects:
        return False
    while True:
        yield from text.spaces()
        if count and (yield from text.peek()) in ({","} if listed else {",", ";"}):
            text.take(1)
            yield from text.spaces()
        if form.objects and (yield from text.peek()) != "{":
            break
        if count:
            text.record()
        call = _ObjectCall(context, form).read() if form.objects else _keyword_call(context, form)
        whole = yield from call
        if whole is None:
            return True
        if not whole:
            if count:
                context.out.text(text.back())
            break
        count += 1
    if count and listed:
        yield from text.accept("]")
    return count > 0


def _keyword_call(context: CallContext, form: Calls) -> Wait[bool | None]:
    """Read a call in Python syntax. Return None if its arguments are incomplete."""
    text = context.text
    name = yield from text.name()
    if not context.names(name) or not (yield from text.accept(tail(form.begin))):
        return False
    context.start(name)
    items = ItemsReader(text, form, context.out.arguments)
    return (yield from items.read(context.tools.of(name))) or None


class _ObjectCall:
    """A call as a JSON object with a name and arguments, in any order."""

    def __init__(self, context: CallContext, form: Calls) -> None:
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
        if not self._started and self._named():
            self._start()
            self._context.out.arguments(self._waiting or "{}")
        return self._started

    def _value(self, key: str) -> Wait[bool]:
        """Read a key's value."""
        if head(self._form.begin) == "{" and not self._name:  # {"NAME": {ARGUMENTS}}
            self._name, key = key, "arguments"
        if key in _NAMES or key == "function":
            self._name = (yield from self._string()) or ""
            return self._named()
        if key in _IDS and not self._started:
            value = yield from self._json()
            self._id = plain_string(value, MOST_NAME) or ""
            return bool(value)
        if key not in _ARGUMENTS or self._started or self._waiting:
            other = self._form.bare and not self._started and key != "type"  # shows that the object is content
            return not other and (yield from literal(self._text, lambda part: None))
        if (yield from self._text.peek()) == "{" and self._named():
            self._start()
            return (yield from literal(self._text, self._context.out.arguments))
        value = yield from self._json()  # arguments that precede the name, or are written as a string
        if value.startswith('"'):
            value = converted(json.loads(value)) or ""
        self._waiting = "{}" if value == "null" else value
        return self._waiting.startswith("{")

    def _named(self) -> bool:
        return self._context.names(self._name) and not (self._form.bare and self._name not in self._context.tools)

    def _json(self) -> Wait[str]:
        """Read a value. Return its JSON, or "" if it is incomplete."""
        parts: list[str] = []
        whole = yield from literal(self._text, parts.append)
        return "".join(parts) if whole else ""

    def _string(self) -> Wait[str | None]:
        if (yield from self._text.peek()) not in ('"', "'"):
            return None
        return plain_string((yield from self._json()), MOST_NAME)

    def _start(self) -> None:
        self._started = True
        self._context.start(self._name, self._id)
