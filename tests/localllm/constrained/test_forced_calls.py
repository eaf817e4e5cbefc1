"""Forced calls: any text that a format's grammar allows parses to calls that match the schemas."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from localllm.constrained.build import constrained
from localllm.constrained.constraint import GrammarVocabulary
from localllm.constrained.forced_calls import forced_calls
from localllm.constrained.reasoning import after_reasoning
from localllm.options.structure import ConstraintSpec, Structure, StructureError
from localllm.sampling.constraint import Constraint
from localllm.template.call_writer import written_call
from localllm.template.format import AnswerFormat, filled
from localllm.template.formats import ROWS
from localllm.template.reasoning import reasoning_state
from localllm.tokenizer import Tokenizer
from tests.localllm.output.support import TOOLS, Read, byte_tokenizer, follows, named, read

NAMES = [row.name for row in ROWS]
THOUGHTS = {  # reasoning markers of formats that do not define one
    "command-r7b": "<|START_THINKING|>", "gemma-4": "<|channel>", "harmony": "<|channel|>", "mistral": "[THINK]",
    "minimax-m3": "<mm:think>", "muse": "<atem:", "seed": "<seed:think>",
}  # fmt: skip


def format_of(name: str) -> AnswerFormat:
    return named(name, THOUGHTS.get(name, "<think>"))


def tokens_of(format_: AnswerFormat, special: bool) -> Tokenizer:
    """Return a tokenizer that has the format's markers as control tokens, or has no tokens for the markers."""
    return byte_tokenizer(*(marker for marker in format_.markers if special and len(marker) > 2))


def closers(format_: AnswerFormat) -> list[str]:
    """Return texts that end an argument value, or a string within the value."""
    items = format_.calls.items
    closes = [] if items is None else ["".join(filled(items.close, {"key": key})) for key in ("city", "query", "t")]
    return [text for close in closes for text in (close, f"\n{close}") if close] + ['"', '<|"|>']


def written(make: Any, tokenizer: Tokenizer, seed: int, ends_of: list[str]) -> str:
    """Sample an answer at random from the allowed tokens. Closing texts are preferred, so that long strings end."""
    random_, constraint, tokens = random.Random(seed), make(), list[int]()
    ends = [found for text in ends_of if (found := tokenizer.encode(text, add_special=False, parse_special=True))]
    while not constraint.finished:
        allowed = np.flatnonzero(constraint.allowed()).tolist()
        if 0 in allowed and (len(allowed) == 1 or random_.random() < 0.5):
            break
        chosen = [random_.choice(allowed)]
        if chosen == [0]:
            continue
        if len(allowed) > 50 and random_.random() < 0.4:
            fitting = [end for end in ends if constraint.validate(end) == len(end)]
            chosen = random_.choice(fitting or [chosen])
        for token in chosen:
            constraint.accept(token)
            tokens.append(token)
        assert len(tokens) < 5000
    return tokenizer.decode(tokens, special=True)


def check(found: Read, single: bool = False) -> None:
    """Assert that the calls match the schemas of TOOLS."""
    assert found.calls
    assert len(found.calls) == 1 or not single
    for name, arguments in found.values:
        allowed = {"get_weather": {"city": str, "days": int, "units": dict}, "search": {"query": str, "deep": bool}}[
            name
        ]
        assert {"get_weather": "city", "search": "query"}[name] in arguments
        for key, value in arguments.items():
            assert type(value) is allowed[key], (key, value)
    assert found.content == ""


@pytest.mark.parametrize("special", [True, False], ids=["control tokens", "spelled"])
@pytest.mark.parametrize("name", NAMES)
def test_what_the_grammar_of_a_format_allows_is_read_as_calls(name: str, special: bool) -> None:
    format_ = format_of(name)
    if name == "minimax-m3" and not special:
        pytest.skip("its prefix is a control token, which a value cannot contain")
    tokenizer = tokens_of(format_, special)
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size)
    tail = {"arrows": ">>>", "harmony": "<|start|>assistant", "recipients": "<|start|>assistant"}
    start = tail[format_.channels.kind] if format_.channels is not None else ""
    for seed, parallel in enumerate((True, True, True, False)):
        make = vocabulary.begin(forced_calls(format_, TOOLS, vocabulary, parallel))
        text = written(make, tokenizer, seed, closers(format_))
        check(read(format_, text, start), single=not parallel)


@pytest.mark.parametrize("name", NAMES)
def test_what_templates_write_is_allowed(name: str) -> None:
    format_ = format_of(name)
    tokenizer = tokens_of(format_, special=True)
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size)
    make = vocabulary.begin(forced_calls(format_, TOOLS, vocabulary))
    if format_.channels is None:
        text = written_call(format_.calls, "search", {"query": "a b", "deep": True})
        assert follows(make, tokenizer, text) is None, text


def test_a_model_that_wants_to_say_something_else_cannot() -> None:
    tokenizer = byte_tokenizer("<think>", "</think>")
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size)
    make = vocabulary.begin(forced_calls(named("hermes"), TOOLS[1:], vocabulary))
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
    assert follows(make, tokenizer, call) is None
    assert follows(make, tokenizer, "Sure!") == 0
    assert follows(make, tokenizer, call.replace("search", "get_weather")) == call.index("search")
    assert follows(make, tokenizer, call.replace('"a"', "1")) == call.index('"a"')
    assert follows(make, tokenizer, call.replace("query", "other")) == call.index("query")


def hermes(text: str, tail: str, special: bool = True) -> int | None:
    """Return the index of the first token that a forced call of `search` rejects, or None."""
    tokenizer = byte_tokenizer(*(("<think>", "</think>") if special else ()))
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size)
    make = constrained(vocabulary, named("hermes"), tail, ConstraintSpec(tools=TOOLS[1:]))
    assert make is not None
    return follows(make, tokenizer, text)


CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'


@pytest.mark.parametrize("special", [True, False], ids=["control tokens", "spelled"])
def test_a_thought_comes_first(special: bool) -> None:
    assert hermes(f"Hm, <tool_call> or not?\n</think>\n\n{CALL}", "<think>\n", special) is None
    assert hermes(f"<think>Hm.</think>{CALL}", "assistant\n", special) is None
    assert hermes(CALL, "assistant\n", special) is None
    assert hermes(CALL, "<think>\n\n</think>\n\n", special) is None
    over = hermes(f"<think>Hm.</think>{CALL}", "<think>\n\n</think>\n\n", special)
    assert over == (0 if special else len("<t"))  # index of the first character that differs from <tool_call>
    assert hermes("<think>Hm.</think>No call.", "assistant\n", special) == (5 if special else 18)


def test_structures_come_in_the_markers_of_content() -> None:
    format_ = format_of("harmony")
    tokenizer = tokens_of(format_, special=False)
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size)
    make = constrained(vocabulary, format_, "<|start|>assistant", ConstraintSpec(Structure(any_object=True)))
    assert make is not None
    final, thought = '<|channel|>final<|message|>{"a": 1}', "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert follows(make, tokenizer, final) is None
    assert follows(make, tokenizer, thought + final) is None
    assert follows(make, tokenizer, '{"a": 1}') == 0
    begun = constrained(vocabulary, format_, "<|channel|>final<|message|>", ConstraintSpec(Structure(any_object=True)))
    assert begun is not None
    assert follows(begun, tokenizer, '{"a": 1}') is None


def test_nothing_is_constrained_where_nothing_is_asked() -> None:
    vocabulary = GrammarVocabulary(byte_tokenizer(), 257)
    assert constrained(vocabulary, named("hermes"), "", ConstraintSpec()) is None
    with pytest.raises(StructureError, match="ask for one"):
        constrained(vocabulary, named("hermes"), "", ConstraintSpec(Structure(any_object=True), TOOLS))


def tool(parameters: Any, name: Any = "t") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


NO_SCHEMA = {"properties": {"a": True, "b": 3, "c": {"type": "foo"}}}
SCHEMAS: list[Any] = [
    None,
    {},
    {"type": "object"},
    {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}, "required": ["a"]},
    NO_SCHEMA,
    {"properties": {"a": {"enum": ["x", "y"]}, "b": {"type": ["string", "null"]}, "c": {"not": {}}}},
    {"properties": {'k"<>|': {"type": "string"}}, "required": ['k"<>|']},
    {"properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "number"}}}}}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=[json.dumps(schema)[:40] for schema in SCHEMAS])
@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "gemma-4", "minimax-m3", "lfm2", "glm"])
def test_schemas_of_every_kind_give_a_grammar_or_a_line(name: str, schema: Any) -> None:
    tokenizer = byte_tokenizer()
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size)
    made = None
    with suppress(StructureError):
        made = vocabulary.begin(forced_calls(format_of(name), [tool(schema)], vocabulary))
    assert made is not None or schema == NO_SCHEMA
    assert made is None or made().allowed().any()


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ([], "1 to 256"),
        ([tool({})] * 257, "1 to 256"),
        ([tool({}, name="")], "no name"),
        ([tool({}, name="x" * 300)], "no name"),
        ([tool([1])], "not a JSON schema"),
        ([{"function": None}], "no name"),
        ([tool({"properties": {f"p{number}": {"$ref": "#"} for number in range(9)}})], "too large"),
    ],
)
def test_broken_tools_are_a_line(tools: Any, told: str) -> None:
    vocabulary = GrammarVocabulary(byte_tokenizer(), 257)
    with pytest.raises(StructureError, match=told):
        forced_calls(format_of("minimax-m3"), tools, vocabulary)


@pytest.mark.parametrize("name", NAMES)
def test_a_thought_before_a_call_of_every_format(name: str) -> None:
    format_ = format_of(name)
    if not format_.thinking.start:
        return
    tokenizer = tokens_of(format_, special=False)
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size)
    tail = "<|start|>assistant" if format_.channels is not None else ""
    assert reasoning_state(format_, tail) == "possible"
    assert reasoning_state(format_, format_.thinking.start) == "open"
    grammar = after_reasoning(forced_calls(format_, TOOLS[1:], vocabulary), format_, "open", vocabulary)
    make = vocabulary.begin(grammar)
    rest = f"I think.{format_.thinking.end}{format_.thinking.resume}"
    text = rest + written(
        vocabulary.begin(forced_calls(format_, TOOLS[1:], vocabulary)), tokenizer, 1, closers(format_)
    )
    if not format_.calls.objects:
        assert follows(make, tokenizer, rest) is None
    constraint: Constraint = make()
    assert constraint.validate(tokenizer.encode(text, add_special=False)) == len(text.encode())
    found = read(format_, text, tail + format_.thinking.start)
    assert (found.reasoning, [call for call, _ in found.calls][:1]) == ("I think.", ["search"])
