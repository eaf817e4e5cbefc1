"""Read the required structure of the output from the fields of OpenAI (`response_format`), llama.cpp and vLLM."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from localllm.server.errors import BadRequest
from localllm.server.fields import Fields
from localllm.server.turn import Structure

CHOICES = 1000
CHOICES_LENGTH = 1_000_000  # maximum characters of all choices together
_ESCAPED = str.maketrans({character: f"\\{character}" for character in r"\.+*?()|[]{}^$#&-~"})
_GBNF = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)
FORMATS = ("text", "json_object", "json_schema")


def read_structure(fields: Fields) -> Structure | None:
    """Return the required structure of the output, or None if unconstrained. Raise BadRequest for contradicting
    fields."""
    found = {name: structure for name, read in READERS.items() if (structure := read(fields, name)) is not None}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise fields.wrong(second, f"the request has {first}, too; give one of them")
    return next(iter(found.values()), None)


def schema_structure(schema: Any, wrong: Callable[[str], BadRequest]) -> Structure:
    """Return the structure of a JSON schema. An empty schema allows any object, as in llama.cpp."""
    if not isinstance(schema, dict):
        raise wrong("expected a JSON schema, which is an object")
    return Structure(schema=schema) if schema else Structure(any_object=True)


def grammar_structure(source: str) -> Structure:
    """Return the structure of a grammar in llama.cpp's format or, if it has no `name ::= ...`, in Lark's."""
    return Structure(gbnf=source) if _GBNF.search(source) else Structure(lark=source)


def choice_structure(choices: tuple[str, ...], wrong: Callable[[str], BadRequest]) -> Structure:
    """Return the structure of a choice between texts."""
    if not choices:
        raise wrong("expected at least one text")
    if sum(map(len, choices)) > CHOICES_LENGTH:
        raise wrong(f"the texts have more than {CHOICES_LENGTH} characters together")
    return Structure(regex="|".join(text.translate(_ESCAPED) for text in choices))


def format_structure(inner: Fields, schema_holder: Fields) -> Structure | None:
    """Return the structure of a `response_format`, whose schema is in `schema_holder`."""
    kind = inner.choice("type", FORMATS)
    if kind == "text":
        return None
    if kind == "json_object" and not inner.has("schema"):
        return Structure(any_object=True)
    holder = schema_holder if kind == "json_schema" else inner
    return schema_structure(holder.data.get("schema", {}), lambda message: holder.wrong("schema", message))


def _response_format(fields: Fields, name: str) -> Structure | None:
    if not fields.has(name):
        return None
    inner = fields.inner(name)
    return format_structure(inner, inner.inner("json_schema") if inner.has("json_schema") else inner)


def _schema(fields: Fields, name: str) -> Structure | None:
    if not fields.has(name):
        return None
    return schema_structure(fields.data[name], lambda message: fields.wrong(name, message))


def _gbnf(fields: Fields, name: str) -> Structure | None:
    source = fields.text(name, "")
    return Structure(gbnf=source) if source else None


def _grammar(fields: Fields, name: str) -> Structure | None:
    source = fields.text(name, "")
    return grammar_structure(source) if source else None


def _regex(fields: Fields, name: str) -> Structure | None:
    source = fields.text(name, "")
    return Structure(regex=source) if source else None


def _choice(fields: Fields, name: str) -> Structure | None:
    if not fields.has(name):
        return None
    return choice_structure(fields.texts(name, CHOICES), lambda message: fields.wrong(name, message))


def _any_object(fields: Fields, name: str) -> Structure | None:
    return Structure(any_object=True) if fields.flag(name, False) else None


def _structured(fields: Fields, name: str) -> Structure | None:
    inner = fields.inner(name)
    found = {key: made for key, read in STRUCTURED.items() if (made := read(inner, key)) is not None}
    if len(found) > 1:
        raise fields.wrong(name, f"has {' and '.join(found)}; give one of them")
    if inner.has("structural_tag"):
        raise inner.wrong("structural_tag", "not supported; give a schema or a grammar")
    return next(iter(found.values()), None)


Reader = Callable[[Fields, str], Structure | None]
STRUCTURED: dict[str, Reader] = {
    "json": _schema,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
READERS: dict[str, Reader] = {
    "response_format": _response_format,
    "json_schema": _schema,
    "grammar": _gbnf,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}
