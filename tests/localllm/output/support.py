"""Helpers for tests of answer parsing: tools, a reader of whole texts, and byte-level vocabularies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from itertools import count, pairwise
from typing import Any

from localllm.constrained.build import constrained
from localllm.constrained.constraint import GrammarVocabulary
from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.options.structure import ConstraintSpec
from localllm.output.reader import AnswerReader
from localllm.sampling.constraint import Constraint
from localllm.sandbox import Confined
from localllm.template import ChatTemplate, renderer
from localllm.template.format import AnswerFormat
from localllm.template.formats import ROWS, find_format
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.tokenizer import _BYTE_OF


@cache
def confined() -> Confined:
    """Return the process in which tests render templates."""
    return renderer()


def chat_template(source: str, now: datetime = datetime(2024, 2, 29)) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>", clock=lambda: now, confined=confined())


def properties(*required: str, **given: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties."""
    return {"type": "object", "properties": given, "required": list(required)}


def tool(parameters: Any, name: Any = "t", description: str = "-") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


UNITS = {
    "type": "object",
    "properties": {"t": {"type": "string"}},
    "additionalProperties": {},
    "description": "of what",
}
WEATHER = properties(
    "city",
    city={"type": "string", "description": "its name"},
    days={"type": "integer", "description": "how many"},
    units=UNITS,
)
SEARCH = properties(
    "query",
    query={"type": "string", "description": "what"},
    deep={"type": "boolean", "description": "how"},
)
TOOLS = [tool(WEATHER, "get_weather", "Tells the weather."), tool(SEARCH, "search", "Searches.")]


@dataclass
class Read:
    """The concatenated parts of a parsed answer. Tool calls are stored as (name, arguments as JSON)."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Read:
        read = cls()
        for part in parts:
            match part:
                case Reasoning():
                    read.reasoning += part.text
                case Content():
                    read.content += part.text
                case CallStart():
                    assert part.index == len(read.calls)
                    read.calls.append((part.name, ""))
                    read.ids.append(part.id)
                case CallArguments():
                    assert part.index == len(read.calls) - 1
                    name, arguments = read.calls[-1]
                    read.calls[-1] = (name, arguments + part.json)
        return read

    @property
    def values(self) -> list[tuple[str, Any]]:
        """Return the calls with parsed arguments."""
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(
    format_: AnswerFormat,
    text: str,
    tail: str = "",
    tools: Sequence[dict[str, Any]] = TOOLS,
    cuts: Sequence[int] = (),
    *,
    inline: bool = False,
    resumed: bool = False,
) -> Read:
    """Parse a text that arrives in pieces, split at the positions `cuts`."""
    numbers = count()
    reader = AnswerReader(format_, tools, tail, make_id=lambda: f"id{next(numbers)}", inline=inline, resumed=resumed)
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    parts = [part for piece in pieces for part in reader.push(piece)]
    return Read.of([*parts, *reader.finish()])


def named(name: str, thought: str = "<think>") -> AnswerFormat:
    """Return the answer format with this name, as detected from its markers and the reasoning marker."""
    row = next(row for row in ROWS if row.name == name)
    found = find_format(f"tools {' '.join(row.texts)} {thought}")
    assert found.name == name
    return found


def byte_tokenizer(*control: str, joined: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with a token per byte, the given control tokens, and <|end|> as EOS.

    The `joined` texts are tokens, too, but encoding never produces them.
    """
    letters = [letter for _, letter in sorted((byte, letter) for letter, byte in _BYTE_OF.items())]
    letters += ["".join(letters[byte] for byte in text.encode()) for text in joined if len(text) > 1]
    marks = ["<|end|>", *control]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*marks, *letters],
            "tokenizer.ggml.token_type": [3] * len(marks) + [1] * len(letters),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 0,
        }
    )


def tokens_of(format_: AnswerFormat, special: bool) -> Tokenizer:
    """Return a tokenizer that has the format's markers as control tokens, or has no tokens for the markers."""
    return byte_tokenizer(*(marker for marker in format_.markers if special and len(marker) > 2))


def asked(format_: AnswerFormat, tail: str = "", tokenizer: Tokenizer | None = None, **options: Any) -> Any:
    """Return what makes the constraint on an answer with these options of `ConstraintSpec`, or None."""
    tokenizer = tokenizer or byte_tokenizer()
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size)
    return constrained(vocabulary, format_, tail, ConstraintSpec(**options))


def follows(make: Callable[[], Constraint], tokenizer: Tokenizer, text: str) -> int | None:
    """Return the index of the first token of an ASCII text that a constraint rejects, or None.

    Each character is a token, and so is each control token.
    """
    constraint = make()
    for place, token in enumerate(tokenizer.encode(text, add_special=False, parse_special=True)):
        allowed = constraint.allowed()
        if allowed is not None and not allowed[token]:
            return place
        constraint.accept(token)
    return None


def may_end(make: Callable[[], Constraint], tokenizer: Tokenizer, text: str) -> bool:
    """Return whether the constraint allows EOS after the text."""
    constraint = make()
    for token in tokenizer.encode(text, add_special=False, parse_special=True):
        constraint.accept(token)
    allowed = constraint.allowed()
    return allowed is None or bool(allowed[0])
