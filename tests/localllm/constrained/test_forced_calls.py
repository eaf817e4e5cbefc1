"""Forced calls: any text that a format's grammar allows parses to calls that match the schemas."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from localllm.constrained.constraint import GrammarVocabulary
from localllm.constrained.forced_calls import forced_calls
from localllm.options.structure import Structure, StructureError
from localllm.template.call_writer import written_call
from localllm.template.format import AnswerFormat, filled
from localllm.template.formats import ROWS
from localllm.template.reasoning import reasoning_state
from localllm.tokenizer import Tokenizer
from tests.localllm.output.support import TOOLS, Read, asked, byte_tokenizer, follows, named, read, tokens_of, tool

NAMES = [row.name for row in ROWS]
THOUGHTS = {  # reasoning markers of formats that do not define one
    "command-r7b": "<|START_THINKING|>", "gemma-4": "<|channel>", "harmony": "<|channel|>", "mistral": "[THINK]",
    "minimax-m3": "<mm:think>", "muse": "<atem:", "seed": "<seed:think>",
}  # fmt: skip


def format_of(name: str) -> AnswerFormat:
    return named(name, THOUGHTS.get(name, "<think>"))


def forced(format_: AnswerFormat, tokenizer: Tokenizer, tools: Any = TOOLS, parallel: bool = True) -> Any:
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size)
    return vocabulary.begin(forced_calls(format_, tools, vocabulary, parallel))


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
    tail = {"arrows": ">>>", "harmony": "<|start|>assistant", "recipients": "<|start|>assistant"}
    start = tail[format_.channels.kind] if format_.channels is not None else ""
    for seed, parallel in enumerate((True, True, True, False)):
        make = forced(format_, tokenizer, parallel=parallel)
        text = written(make, tokenizer, seed, closers(format_))
        check(read(format_, text, start), single=not parallel)
    if format_.channels is None:
        text = written_call(format_.calls, "search", {"query": "a b", "deep": True})
        assert follows(make, tokenizer, text) is None, text


@pytest.mark.parametrize(("name", "count"), [("hermes", 2), ("llama-3", 1), ("gigachat-3.1", 1), ("harmony", 1)])
def test_several_calls_are_allowed_where_a_format_has_them(name: str, count: int) -> None:
    tokenizer, format_ = byte_tokenizer(), format_of(name)
    between = format_.channels.start if format_.channels is not None else ""
    calls = between.join([written_call(format_.calls, "search", {"query": "a"})] * 2)
    assert (follows(forced(format_, tokenizer), tokenizer, calls) is None) == (count == 2)


CALL, OVER = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>', "<think>\n\n</think>\n\n"


def hermes(text: str, tail: str, special: bool = True) -> int | None:
    """Return the index of the first token that a forced call of `search` rejects, or None."""
    tokenizer = byte_tokenizer(*(("<think>", "</think>") if special else ()))
    return follows(asked(named("hermes"), tail, tokenizer, tools=TOOLS[1:]), tokenizer, text)


def test_a_model_that_wants_to_say_something_else_cannot() -> None:
    assert hermes("Sure!", OVER) == 0
    assert hermes(CALL.replace("search", "get_weather"), OVER) == CALL.index("search")
    assert hermes(CALL.replace('"a"', "1"), OVER) == CALL.index('"a"')
    assert hermes(CALL.replace("query", "other"), OVER) == CALL.index("query")


@pytest.mark.parametrize("special", [True, False], ids=["control tokens", "spelled"])
def test_a_thought_comes_first(special: bool) -> None:
    assert hermes(f"Hm, <tool_call> or not?\n</think>\n\n{CALL}", "<think>\n", special) is None
    assert hermes(f"<think>Hm.</think>{CALL}", "assistant\n", special) is None
    assert hermes(CALL, "assistant\n", special) is None
    assert hermes(CALL, OVER, special) is None
    over = hermes(f"<think>Hm.</think>{CALL}", OVER, special)
    assert over == (0 if special else len("<t"))  # index of the first character that differs from <tool_call>
    assert hermes("<think>Hm.</think>No call.", "assistant\n", special) == (5 if special else 18)


def test_structures_come_in_the_markers_of_content() -> None:
    any_object = Structure(any_object=True)
    tokenizer, make = byte_tokenizer(), asked(format_of("harmony"), "<|start|>assistant", structure=any_object)
    final, thought = '<|channel|>final<|message|>{"a": 1}', "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert follows(make, tokenizer, final) is None
    assert follows(make, tokenizer, thought + final) is None
    assert follows(make, tokenizer, '{"a": 1}') == 0
    begun = asked(format_of("harmony"), "<|channel|>final<|message|>", structure=any_object)
    assert follows(begun, tokenizer, '{"a": 1}') is None


def test_nothing_is_constrained_where_nothing_is_asked() -> None:
    assert asked(named("hermes")) is None
    with pytest.raises(StructureError, match="request only one"):
        asked(named("hermes"), structure=Structure(any_object=True), tools=TOOLS)


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
    made = None
    with suppress(StructureError):
        made = forced(format_of(name), byte_tokenizer(), [tool(schema)])
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
    with pytest.raises(StructureError, match=told):
        forced(format_of("minimax-m3"), byte_tokenizer(), tools)


@pytest.mark.parametrize("name", NAMES)
def test_a_thought_before_a_call_of_every_format(name: str) -> None:
    format_ = format_of(name)
    if not format_.thinking.start:
        return
    tokenizer = byte_tokenizer()
    tail = "<|start|>assistant" if format_.channels is not None else ""
    assert reasoning_state(format_, tail) == "possible"
    assert reasoning_state(format_, format_.thinking.start) == "open"
    make = asked(format_, format_.thinking.start, tokenizer, tools=TOOLS[1:])
    text = f"I think.{format_.thinking.end}{format_.thinking.resume}"
    text += written(forced(format_, tokenizer, TOOLS[1:]), tokenizer, 1, closers(format_))
    assert make().validate(tokenizer.encode(text, add_special=False)) == len(text.encode())
    found = read(format_, text, tail + format_.thinking.start)
    assert (found.reasoning, [call for call, _ in found.calls][:1]) == ("I think.", ["search"])
