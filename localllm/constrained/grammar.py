"""The required structure of the output and its grammar. `compile_structure` converts a schema, a grammar or a regular
expression.

Schemas and grammars are untrusted, so their size is limited, and errors are one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.options.structure import Structure, StructureError

MOST_SCHEMA = 1 << 18  # maximum characters; compiling takes at most one to two seconds within the limits
MOST_GRAMMAR = 1 << 16  # characters
MOST_DEPTH = 64
MOST_PARTS = 1000  # maximum properties of an object, or alternatives
_MOST_RULES = 2000
_WHITE_SPACE = r"[ \n\r\t]{1,64}"  # bounded, since small models would otherwise write white space endlessly
_RULE = re.compile(r"(?m)^\s*[\w.\-?!]+\s*(?:::=|:)")


@dataclass(frozen=True, slots=True)
class Grammar:
    """Rules in llguidance's Lark syntax, and the grammars they reference. The rule `answer` matches the whole text.

    A part (name, {"json_schema": ...} or {"lark_grammar": ...}) is referenced as `@name`.
    """

    rules: str
    parts: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    start: str = "answer"

    @property
    def source(self) -> str:
        """The grammar in llguidance's format."""
        parts = [{"name": name, **part} for name, part in self.parts]
        return json.dumps({"grammars": [{"lark_grammar": f"start: {self.start}\n{self.rules}"}, *parts]})


def compile_structure(structure: Structure) -> Grammar:
    """Return the grammar of a structure; raise StructureError if the structure is too large or malformed.

    Further errors appear when a vocabulary compiles the grammar (`GrammarVocabulary.begin`).
    """
    given = [structure.schema is not None, structure.any_object, *map(bool, (structure.gbnf, structure.lark))]
    if sum(given) + bool(structure.regex) != 1:
        raise StructureError("give exactly one of: a JSON schema, any JSON object, a grammar, a regular expression")
    if structure.any_object:
        return _part({"json_schema": described({"type": "object"})})
    if structure.schema is not None:
        check_schema(structure.schema, "the JSON schema")
        return _part({"json_schema": described(structure.schema)})
    if structure.regex:
        check_source(structure.regex, "the regular expression")
        return _part({"lark_grammar": f"start: /{_slashed(structure.regex)}/"})
    if structure.gbnf:
        check_source(structure.gbnf, "the grammar")
        return _part({"gbnf_grammar": structure.gbnf})  # converted when it is compiled
    check_source(structure.lark, "the grammar")
    return _part({"lark_grammar": structure.lark})


def described(schema: Mapping[str, Any], lenient: bool = False) -> dict[str, Any]:
    """Return a schema with localllm's options for llguidance. If `lenient`, unsupported keywords are ignored."""
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITE_SPACE, "lenient": lenient}}


def check_schema(schema: Mapping[str, Any], what: str) -> None:
    """Raise StructureError for a schema that is too large, too deep, or not JSON."""
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    count = 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > MOST_DEPTH:
            raise StructureError(f"{what} is nested deeper than {MOST_DEPTH} levels; flatten it with $defs")
        if count > MOST_SCHEMA:
            raise StructureError(f"{what} has more than {MOST_SCHEMA} values; shorten it")
        if isinstance(value, Mapping):
            for key in ("properties", "anyOf", "oneOf", "allOf"):
                if isinstance(parts := value.get(key), Mapping | list) and len(parts) > MOST_PARTS:
                    raise StructureError(f"{what} has {len(parts)} {key} in one place; supported: up to {MOST_PARTS}")
            waiting += [(below, depth + 1) for below in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(below, depth + 1) for below in value]
    try:
        length = len(json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise StructureError(f"{what} is not JSON: {error}") from None
    if length > MOST_SCHEMA:
        raise StructureError(f"{what} has {length} characters; supported: up to {MOST_SCHEMA}")


def check_source(source: str, what: str) -> None:
    """Raise StructureError for a grammar or regular expression that is too large or too deeply nested."""
    if len(source) > MOST_GRAMMAR:
        raise StructureError(f"{what} has {len(source)} characters; supported: up to {MOST_GRAMMAR}")
    if re.search("[\0\ud800-\udfff]", source):
        raise StructureError(f"{what} contains a NUL character or an unpaired surrogate")
    depth = deepest = 0
    for bracket in re.findall(r"[(\[{)\]}]", source):
        depth = depth + 1 if bracket in "([{" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    if deepest > MOST_DEPTH:
        raise StructureError(f"{what} has brackets nested deeper than {MOST_DEPTH} levels")
    rules = sum(1 for _ in _RULE.finditer(source))
    if rules > _MOST_RULES:
        raise StructureError(f"{what} has {rules} rules; supported: up to {_MOST_RULES}")


def _part(part: Mapping[str, Any]) -> Grammar:
    return Grammar("answer: @structure", (("structure", part),))


def _slashed(regex: str) -> str:
    """Return a regular expression escaped for use between slashes."""
    from llguidance import regex_to_lark

    return str(regex_to_lark(regex, ""))
