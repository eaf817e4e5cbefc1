"""Read the required structure of the output from the fields of OpenAI (`response_format`), llama.cpp and vLLM."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta

from localllm.server.sampling import SamplingBody
from localllm.server.structs import Body, listed, wrong
from localllm.server.turn import Json, Structure

CHOICES = 1000
CHOICES_LENGTH = 1_000_000  # maximum characters of all choices together
_ESCAPED = str.maketrans({character: f"\\{character}" for character in r"\.+*?()|[]{}^$#&-~"})
_GBNF = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)
Choices = str | Annotated[list[str], Meta(max_length=CHOICES)]


class SchemaBody(Body):
    """A JSON schema. An empty schema allows any object, as in llama.cpp."""

    schema: Json | None = None


class ResponseFormat(SchemaBody, kw_only=True):
    """The format of the output. Its schema is in `json_schema` or, as in /v1/responses, in the object itself."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaBody | None = None

    @property
    def structure(self) -> Structure | None:
        """The required structure, or None for any text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return schema_structure(self.schema or {})
            case "json_schema":
                return schema_structure((self.json_schema or self).schema or {})


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`."""

    json: Json | None = None
    json_object: bool = False
    regex: str = ""
    choice: Choices | None = None
    grammar: str = ""
    structural_tag: Any = None


class StructureBody(SamplingBody):
    """The fields that require a structure; a request may have one of them."""

    response_format: ResponseFormat | None = None
    json_schema: Json | None = None
    grammar: str = ""
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | None = None
    guided_regex: str = ""
    guided_choice: Choices | None = None
    guided_grammar: str = ""


def read_structure(body: StructureBody) -> Structure | None:
    """Return the required structure of the output, or None if unconstrained. Raise BadRequest for contradicting
    fields."""
    given = {
        "response_format": body.response_format.structure if body.response_format else None,
        "json_schema": schema_structure(body.json_schema),
        "grammar": Structure(gbnf=body.grammar) if body.grammar else None,
        "structured_outputs": _structured(body.structured_outputs) if body.structured_outputs else None,
        "guided_json": schema_structure(body.guided_json),
        "guided_regex": Structure(regex=body.guided_regex) if body.guided_regex else None,
        "guided_choice": _choice_structure(body.guided_choice, "guided_choice"),
        "guided_grammar": _grammar_structure(body.guided_grammar),
    }
    found = {name: structure for name, structure in given.items() if structure is not None}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise wrong(f"the request has {first}, too; give one of them", second)
    return next(iter(found.values()), None)


def schema_structure(schema: Json | None) -> Structure | None:
    """Return the structure of a JSON schema."""
    if schema is None:
        return None
    return Structure(schema=schema) if schema else Structure(any_object=True)


def _grammar_structure(source: str) -> Structure | None:
    """Return the structure of a grammar in llama.cpp's format or, if it has no `name ::= ...`, in Lark's."""
    if not source:
        return None
    return Structure(gbnf=source) if _GBNF.search(source) else Structure(lark=source)


def _choice_structure(given: str | list[str] | None, *path: str) -> Structure | None:
    """Return the structure of a choice between texts."""
    if given is None:
        return None
    choices = listed(given)
    if not choices:
        raise wrong("expected at least one text", *path)
    if sum(map(len, choices)) > CHOICES_LENGTH:
        raise wrong(f"the texts have more than {CHOICES_LENGTH} characters together", *path)
    return Structure(regex="|".join(text.translate(_ESCAPED) for text in choices))


def _structured(body: StructuredOutputs) -> Structure | None:
    given = {
        "json": schema_structure(body.json),
        "json_object": Structure(any_object=True) if body.json_object else None,
        "regex": Structure(regex=body.regex) if body.regex else None,
        "choice": _choice_structure(body.choice, "structured_outputs", "choice"),
        "grammar": _grammar_structure(body.grammar),
    }
    found = {name: structure for name, structure in given.items() if structure is not None}
    if len(found) > 1:
        raise wrong(f"has {' and '.join(found)}; give one of them", "structured_outputs")
    if body.structural_tag is not None:
        raise wrong("not supported; give a schema or a grammar", "structured_outputs", "structural_tag")
    return next(iter(found.values()), None)
