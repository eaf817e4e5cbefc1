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
    JsonCalls,
    NamedCalls,
    NestedCalls,
    Pattern,
    PythonCalls,
    TaggedCalls,
)

Json = Mapping[str, Any]
MOST_TOOLS = 256
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
    functions = [_Function(tool) for tool in tools]
    if channels is not None:
        parallel = parallel and channels.kind == "arrows"
    if isinstance(form, JsonCalls):
        body = _json(rules, form, functions, parallel and not form.bare)
    elif isinstance(form, PythonCalls):
        body = _python(rules, form, functions, parallel)
    else:
        calls = [rules.add(_marked(rules, form, function)) for function in functions]
        headed = channels is not None and channels.kind == "recipients"
        if headed:
            calls = [
                rules.add(f"{rules.text(f' to={function.name}<|message|>')} {rules.text(form.section[0])} GAP {call}")
                for function, call in zip(functions, calls, strict=True)
            ]
        before, after = ("", form.section[1]) if headed else form.section
        if channels is not None and channels.kind == "arrows":
            return rules.grammar(_arrows(rules, channels.start, calls, parallel))
        body = rules.sequence(before, f"({' | '.join(calls)})", after, parallel)
    return rules.grammar(body)


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

    def types(self, key: str) -> frozenset[str] | None:
        return Property(self.part(key), self.schema).types


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

    def sequence(self, before: str, call: str, after: str, parallel: bool) -> str:
        """Return the expression for calls between the markers of a section. A marker that would end generation is
        omitted.
        """
        after = "" if self.ends_answer(after) else after
        more = f"(GAP {call})*" if parallel else ""
        parts = [*([f"{self.text(before)} GAP"] if before else []), call, more]
        return " ".join([*filter(None, parts), *([f"GAP {self.text(after)}"] if after else [])])

    def listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the expression for items (body, required) in order, with separators between the items that are
        present.
        """
        fixed = [body for body, required in items if required]
        free = [body for body, required in items if not required]
        tails = [self.add(f"{self.text(separator)} {body}") for body in free]
        if fixed:
            return f" {self.text(separator)} ".join(fixed) + "".join(f" {tail}?" for tail in tails)
        starts = [" ".join([body, *(f"{tail}?" for tail in tails[at + 1 :])]) for at, body in enumerate(free)]
        return f"({' | '.join(starts)})?" if starts else '""'


def _marked(rules: _Rules, form: Calls, function: _Function) -> str:
    """Return the expression for a call between its own markers, without the section's markers."""
    if isinstance(form, NamedCalls):
        return _named(rules, form, function)
    if isinstance(form, TaggedCalls):
        return _tagged(rules, form, function)
    assert isinstance(form, NestedCalls)
    return _nested(rules, form, function)


def _json(rules: _Rules, form: JsonCalls, functions: Sequence[_Function], parallel: bool) -> str:
    """Return the expression for calls that are JSON objects with a name and arguments."""
    objects = []
    for function in functions:
        arguments = rules.json(function.schema)
        name = json.dumps(function.name, ensure_ascii=False)
        if form.keyed:
            objects.append(rules.add(f"{rules.text('{' + name + ': ')} {arguments} {rules.text('}')}"))
            continue
        number = '""'
        if form.id_key:
            number = rules.text(f'"{form.id_key}": ') + r' /"[0-9]{1,3}", /'
        middle = rules.text(f'"{form.name}": {name}, "{form.arguments}": ')
        objects.append(rules.add(f"{rules.text('{')} {number} {middle} {arguments} {rules.text('}')}"))
    one = f"({' | '.join(objects)})"
    before, after = form.section
    if form.listed:
        more = f"(/,[ \\n]{{0,16}}/ {one})*" if parallel else ""
        body = f"/[ \\n]{{0,2}}\\[[ \\n]{{0,16}}/ {one} {more} /[ \\n]{{0,16}}\\]/"
        return " ".join([rules.text(before), body, *([f"GAP {rules.text(after)}"] if after else [])])
    if form.again:
        single = rules.add(rules.sequence(before, one, after, False))
        return f"{single} (GAP {single})*" if parallel else single
    return rules.sequence(before, one, after, parallel and bool(after))


def _named(rules: _Rules, form: NamedCalls, function: _Function) -> str:
    """Return the expression for a call: the name between markers, then a JSON object of arguments."""
    pattern = form.begin[0]
    begin = " ".join(_filled(rules, pattern, {"name": form.prefix + function.name}))
    gemma = bool(form.style.quote)
    arguments = _gemma_object(rules, form.style.quote, function) if gemma else rules.json(function.schema)
    ends = [rules.text(end) for end in form.end if not rules.ends_answer(end)]
    return " ".join([begin, arguments, *ends])


def _filled(rules: _Rules, pattern: Pattern, fields: Mapping[str, str]) -> list[str]:
    """Return the expressions for the parts of a pattern. The model chooses the fields missing from `fields`."""
    chosen = {"id": "/[a-zA-Z0-9]{9}/", "n": "/[0-9]{1,3}/"}
    parts: list[str] = []
    plain = ""
    for at, piece in enumerate(pattern.pieces):
        if at % 2 == 0:
            plain += piece
        elif piece in fields:
            plain += fields[piece]
        else:
            parts += [rules.text(plain), chosen[piece]]
            plain = ""
    return [*parts, *([rules.text(plain)] if plain else [])]


def _arrows(rules: _Rules, start: str, calls: Sequence[str], parallel: bool) -> str:
    """Return the expression for calls. The start marker of the first call is already in the prompt."""
    one = f"({' | '.join(calls)})"
    return f"{one} ({rules.text(start)} {one})*" if parallel else one


# -- tags ------------------------------------------------------------------------------------------------------------


def _tagged(rules: _Rules, form: TaggedCalls, function: _Function) -> str:
    """Return a tag with the name, then one tag per argument."""
    gap = "GAP" if form.gap else '""'
    parts = [*_filled(rules, form.begin, {"name": function.name, "n": "1"}), gap]
    for key in function.properties:
        one = rules.add(f"{_tagged_argument(rules, form, function, key)} {gap}")
        parts.append(one if key in function.required else f"{one}?")
    return " ".join([*parts, rules.text(form.end)])


def _tagged_argument(rules: _Rules, form: TaggedCalls, function: _Function, key: str) -> str:
    types = function.types(key)
    text = types is None or "string" in types
    kind = "string" if text else next(iter(sorted(types or ())), "object")
    fields = {"key": key, "string": str(text).lower(), "type": "number" if kind == "integer" else kind}
    begin = _filled(rules, form.key, fields)
    if form.value:
        begin += ["GAP", rules.text(form.value)]
    line = "\n" if form.lines else ""
    if line:
        begin.append(rules.text(line))
    choices = function.part(key).get("enum")
    close = line + form.close
    if text and types == STRING and isinstance(choices, list) and choices:
        value = f"({' | '.join(rules.text(str(choice)) for choice in choices)}) {rules.text(close)}"
    elif text:
        value = rules.until(close)
    else:
        value = f"{rules.json(function.part(key))} {rules.text(close)}"
    return " ".join([*begin, value])


def _nested(rules: _Rules, form: NestedCalls, function: _Function) -> str:
    """Return a tag with the name, then one element per argument."""
    parts = _filled(rules, form.begin, {"name": function.name})
    for key in function.properties:
        schema = Property(function.part(key), function.schema)
        one = _element(rules, form.prefix, key, schema, _MOST_DEPTH)
        parts.append(one if key in function.required else f"{one}?")
    return " ".join([*parts, rules.text(form.end)])


def _element(rules: _Rules, prefix: str, key: str, schema: Property, depth: int) -> str:
    """Add a rule for an element: with child elements if its schema describes them, otherwise with text."""
    begin, end = rules.text(f"{prefix}<{key}>"), f"{prefix}</{key}>"
    types = schema.types or STRING
    inside = schema.properties if "object" in types and depth else ()
    if inside:
        parts = [(_element(rules, prefix, name, schema.below(name), depth - 1), name) for name in inside]
        body = " ".join(part if name in schema.required else f"{part}?" for part, name in parts)
        return rules.add(f"{begin} {body} {rules.text(end)}")
    if "array" in types and "string" not in types and depth:
        item = _element(rules, prefix, "item", schema.item(), depth - 1)
        return rules.add(f"{begin} {item}* {rules.text(end)}")
    if types & {"string", "object", "array"}:
        return rules.add(f"{begin} {rules.until(end)}")
    return rules.add(f"{begin} {rules.json({'type': sorted(types)})} {rules.text(end)}")


# -- Python, and Gemma -----------------------------------------------------------------------------------------------


def _python(rules: _Rules, form: PythonCalls, functions: Sequence[_Function], parallel: bool) -> str:
    """Return the expression for a list of calls with keyword arguments."""
    calls = []
    for function in functions:
        items = [
            (rules.add(f"{rules.text(f'{key}=')} {rules.json(function.part(key))}"), key in function.required)
            for key in function.properties
        ]
        calls.append(rules.add(f"{rules.text(f'{function.name}(')} {rules.listed(items, ', ')} {rules.text(')')}"))
    one = f"({' | '.join(calls)})"
    more = f"({rules.text(', ')} {one})*" if parallel else ""
    return f"{rules.text(form.section[0] + '[')} {one} {more} {rules.text(']' + form.section[1])}"


def _gemma_object(rules: _Rules, quote: str, function: _Function) -> str:
    return _gemma(rules, quote, Property({**function.schema, "type": "object"}, function.schema), _MOST_DEPTH)


def _gemma(rules: _Rules, quote: str, schema: Property, depth: int) -> str:
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
