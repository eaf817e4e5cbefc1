"""Grammars of forced tool calls, in the call format of the model.

The name must be the name of a tool, and the arguments must match its schema. Schema keywords that llguidance does not
support are ignored, because a loosely constrained call is better than an unconstrained call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.constrained.constraint import GrammarVocabulary
from localllm.constrained.grammar import Grammar, check_schema, described
from localllm.constrained.reasoning import ended_text
from localllm.options.structure import StructureError
from localllm.output.values import STRING, Property
from localllm.template.format import (
    AnswerFormat,
    Calls,
    Items,
    filled,
)

Json = Mapping[str, Any]
MOST_TOOLS = 256
_CHOSEN = {"id": "/[a-zA-Z0-9]{9}/", "n": "/[0-9]{1,3}/"}  # fields of a pattern that the model chooses
_MOST_DEPTH = 8
_MOST_RULES = 10_000
_MOST_TEXT = 1 << 21  # maximum characters in all rules


def forced_calls(
    format_: AnswerFormat, tools: Sequence[Json], vocabulary: GrammarVocabulary, parallel: bool = True
) -> Grammar:
    """Return the grammar for one call of one of the `tools` (in OpenAI's format), or for several calls with `parallel`.

    Raises StructureError for an invalid or too large schema.
    """
    if not 0 < len(tools) <= MOST_TOOLS:
        raise StructureError(f"a call can be forced for 1 to {MOST_TOOLS} tools, got {len(tools)}")
    rules = _Rules(vocabulary)
    form, channels = format_.calls, format_.channels
    calls = []
    for function in map(_Function, tools):
        call = _call(rules, form, function)
        if channels is not None and not channels.heads_calls:
            call = f"{rules.text(f' to={function.name}<|message|>')} {rules.text(form.section[0])} GAP {call}"
        calls.append(rules.add(call))
    return rules.grammar(_answer(rules, format_, f"({' | '.join(calls)})", parallel))


class _Function:
    """The name of a tool and the schema of its arguments."""

    def __init__(self, tool: Json) -> None:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or len(name) > 256:
            raise StructureError("a tool has no name, or one of more than 256 characters")
        given = function.get("parameters")
        if given is not None and not isinstance(given, Mapping):
            raise StructureError(f"the parameters of the tool {name!r} are not a JSON schema")
        self.name = name
        self.schema: dict[str, Any] = {"type": "object", **(given or {})}
        check_schema(self.schema, f"the schema of the tool {name!r}")
        properties = self.schema.get("properties")
        self.properties: Json = properties if isinstance(properties, Mapping) else {}
        required = self.schema.get("required")
        self.required = set(map(str, required)) if isinstance(required, list) else set()
        if self.properties:
            self.schema.setdefault("additionalProperties", False)

    def part(self, key: str) -> dict[str, Any]:
        """Return the schema of one argument, with the definitions that it may reference."""
        own = self.properties[key]
        shared: dict[str, Any] = {name: self.schema[name] for name in ("$defs", "definitions") if name in self.schema}
        return shared | dict(own) if isinstance(own, Mapping) else {}


class _Rules:
    """The rules of a grammar under construction."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._rules: list[str] = []
        self._length = 0  # characters in all rules

    def grammar(self, body: str) -> Grammar:
        gap = r"GAP: /\n?/"
        return Grammar("\n".join([f"answer: {body}", *self._rules, gap]))

    def add(self, body: str) -> str:
        """Add a rule and return its name."""
        self._length += len(body)
        if len(self._rules) > _MOST_RULES or self._length > _MOST_TEXT:
            raise StructureError(
                "the tools' schemas are too large for a forced call; use fewer tools or shorter schemas"
            )
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def text(self, text: str) -> str:
        return self._vocabulary.spelled(text) if text else '""'

    def json(self, schema: Json) -> str:
        """Add a rule for a value that matches a schema."""
        return self.add(f"%json {json.dumps(described(schema, lenient=True))}")

    def until(self, end: str) -> str:
        """Add rules for any text up to and including `end`."""
        name = f"r{len(self._rules)}"
        self._rules += ended_text(name, end, self._vocabulary)
        return name

    def ends_answer(self, text: str) -> bool:
        """Return whether a marker is an end-of-generation token."""
        return self._vocabulary.tokenizer.id(text) in self._vocabulary.tokenizer.eog

    def filled(self, pattern: str, fields: Mapping[str, str]) -> str:
        """Return the expression for a pattern. The model chooses the fields missing from `fields`."""
        pieces = filled(pattern, fields)
        return " ".join(_CHOSEN[piece] if at % 2 else self.text(piece) for at, piece in enumerate(pieces) if piece)

    def listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the expression for items (body, required), with separators between the items that are present.

        They come in order, but with a separator the required ones come first.
        """
        if not separator:
            return " ".join(body if required else f"{body}?" for body, required in items)
        fixed = [body for body, required in items if required]
        free = [body for body, required in items if not required]
        tails = [self.add(f"{self.text(separator)} {body}") for body in free]
        if fixed:
            return f" {self.text(separator)} ".join(fixed) + "".join(f" {tail}?" for tail in tails)
        starts = [" ".join([body, *(f"{tail}?" for tail in tails[at + 1 :])]) for at, body in enumerate(free)]
        return f"({' | '.join(starts)})?" if starts else '""'


def _answer(rules: _Rules, format_: AnswerFormat, one: str, parallel: bool) -> str:
    """Return the expression for the calls of an answer, in their sections. `one` is the expression for a call.

    A marker that would end generation is omitted.
    """
    form, channels = format_.calls, format_.channels
    before, after = form.section if channels is None or channels.heads_calls else ("", form.section[1])
    opening, separator = f"{rules.text(before)} GAP" if before else "", "GAP"
    closing = f"GAP {rules.text(after)}" if after and (form.listed or not rules.ends_answer(after)) else ""
    if form.listed and form.objects:
        opening, separator = f"{rules.text(before)} /[ \\n]{{0,2}}\\[[ \\n]{{0,16}}/", r"/,[ \n]{0,16}/"
        closing = rf"/[ \n]{{0,16}}\]/ {closing}"
    elif form.listed:
        opening, separator, closing = rules.text(f"{before}["), rules.text(", "), rules.text(f"]{after}")
    elif channels is not None:
        separator, parallel = rules.text(channels.start), parallel and channels.kind == "arrows"
    elif form.again:
        one, opening, closing = rules.add(f"{opening} {one} {closing}"), "", ""
    elif form.objects:
        parallel = parallel and bool(after)
    return " ".join(filter(None, (opening, one, f"({separator} {one})*" if parallel else "", closing)))


def _call(rules: _Rules, form: Calls, function: _Function) -> str:
    """Return the expression for a call between its own markers, without the section's markers."""
    name = json.dumps(function.name, ensure_ascii=False) if form.objects else form.prefix + function.name
    begin = rules.filled(form.begin, {"name": name, "count": "1"})
    ends = [rules.text(end) for end in form.end if not rules.ends_answer(end)]
    return " ".join([begin, _arguments(rules, form, function), *ends])


def _arguments(rules: _Rules, form: Calls, function: _Function) -> str:
    items = form.items
    if items is None and form.quote:
        return _gemma(rules, form.quote, Property({**function.schema, "type": "object"}, function.schema))
    if items is None:
        return rules.json(function.schema)
    given = []
    for key in function.properties:
        part = function.part(key)
        item = _item(rules, items, key, Property(part, function.schema), None if items.prefix else part)
        given.append((rules.add(f"{item} GAP") if items.gap else item, key in function.required))
    return f"{'GAP' if items.gap else ''} {rules.listed(given, items.separator)}"


def _item(rules: _Rules, items: Items, key: str, schema: Property, part: Json | None, depth: int = _MOST_DEPTH) -> str:
    """Add a rule for an argument: the text with its key, the value, and the text after it.

    A value is JSON that matches the schema `part`, if it is not text and has no tags in it.
    """
    types = schema.types or (STRING if items.prefix else schema.types)
    text = types is None or "string" in types
    kind = "string" if text else next(iter(sorted(types or ())), "object")
    fields = {"key": key, "string": str(text).lower(), "type": "number" if kind == "integer" else kind}
    begin = rules.filled(items.key, fields)
    if items.value:
        begin += f" GAP {rules.text(items.value)}"
    line = "\n" if items.lines else ""
    if line:
        begin += f" {rules.text(line)}"
    close = "".join([line, *filled(items.close, fields)])
    end = rules.text(close)
    tree = types if items.prefix and types else frozenset()  # types of values that may be tags
    choices = part.get("enum") if part is not None and types == STRING else None
    if "object" in tree and depth and schema.properties:
        below = [(name, schema.below(name), name in schema.required) for name in schema.properties]
        inside = [(_item(rules, items, name, its, None, depth - 1), required) for name, its, required in below]
        return rules.add(f"{begin} {rules.listed(inside, '')} {end}")
    if "array" in tree and depth and not text:
        return rules.add(f"{begin} {_item(rules, items, 'item', schema.item(), None, depth - 1)}* {end}")
    if close and isinstance(choices, list) and choices:
        return rules.add(f"{begin} ({' | '.join(rules.text(str(choice)) for choice in choices)}) {end}")
    if close and (text or tree & {"object", "array"}):
        return rules.add(f"{begin} {rules.until(close)}")
    return rules.add(f"{begin} {rules.json({'type': sorted(types or ())} if part is None else part)} {end}")


# -- Gemma -----------------------------------------------------------------------------------------------------------


def _gemma(rules: _Rules, quote: str, schema: Property, depth: int = _MOST_DEPTH) -> str:
    """Add a rule for a value with Gemma's quotes and bare keys. A value without a type is a string."""
    types = schema.types or STRING
    choices = schema.choices
    if choices:
        return rules.add(" | ".join(rules.text(f"{quote}{choice}{quote}") for choice in choices))
    found: list[str] = []
    if "object" in types and depth:
        items = [
            (f"{rules.text(f'{key}:')} {_gemma(rules, quote, schema.below(key), depth - 1)}", key in schema.required)
            for key in schema.properties
        ]
        found.append(f"{rules.text('{')} {rules.listed(items, ',')} {rules.text('}')}")
    if "array" in types and depth:
        item = _gemma(rules, quote, schema.item(), depth - 1)
        found.append(f"{rules.text('[')} ({item} ({rules.text(',')} {item})*)? {rules.text(']')}")
    if "string" in types:
        found.append(f"{rules.text(quote)} {rules.until(quote)}")
    plain = sorted(types & {"integer", "number", "boolean", "null"})
    if plain:
        found.append(rules.json({"type": plain}))
    return rules.add(" | ".join(found or [f"{rules.text(quote)} {rules.until(quote)}"]))
