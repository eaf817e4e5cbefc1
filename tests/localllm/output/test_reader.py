"""The answer parser: results do not depend on how the text is split, and no text outside calls is lost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.output.reader import AnswerReader
from localllm.template.formats import ROWS, find_format
from tests.localllm.output.support import TOOLS, named, read

RENDERED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("rendered.json").read_text(encoding="utf-8"))
HERMES, CODER, HARMONY, LLAMA = named("hermes"), named("qwen3-coder"), named("harmony"), named("llama-3")
PLAIN = find_format("{{ messages }}")
WEATHER = ("get_weather", {"city": "Rome"})


def shown(row: dict[str, Any]) -> str:
    return str(row["template"])


@pytest.mark.parametrize("row", RENDERED, ids=shown)
def test_rendered_messages_are_read_back(row: dict[str, Any]) -> None:
    """Messages rendered by the reference templates (see test_templates) parse to the same reasoning, content
    and calls.
    """
    found = read(named(row["format"], row["thought"]), row["text"], row["tail"])
    assert found.values == [tuple(call) for call in row["calls"]]
    assert (found.reasoning, found.content) == (row["reasoning"], row["content"])
    cut = read(named(row["format"], row["thought"]), row["text"], row["tail"], cuts=range(1, len(row["text"])))
    assert cut == found


PIECES = (
    *(
        '{"name": "search", "arguments": {',
        '"query": "a"',
        "}",
        '{"query": "b"}',
        '"',
        "'",
        "[",
        "]",
        ",",
        ":",
        "\n",
        " ",
    ),
    *("search", "get_weather", "x", "1", "<", ">", "</", "é", "\\", "(query='q')", "city", "true", "\n\n", "{", "name"),
)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("name", sorted({row.name for row in ROWS}))
def test_scrambled_markers_are_read_the_same_way_however_they_are_cut(name: str, data: st.DataObject) -> None:
    format_ = named(name)
    words = st.sampled_from([*PIECES, *format_.markers, *format_.markers])
    text = "".join(data.draw(st.lists(words, max_size=24)))
    tail = data.draw(st.sampled_from(["", format_.thinking.start, "<|start|>assistant", ">>>"]))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    how = {"inline": data.draw(st.booleans()), "resumed": data.draw(st.booleans())}
    whole = read(format_, text, tail, **how)
    assert read(format_, text, tail, cuts=cuts, **how) == whole
    assert read(format_, text, tail, cuts=range(1, len(text)), **how) == whole
    for _, arguments in whole.calls:  # complete JSON, or a prefix of an object
        assert arguments == "" or arguments.startswith("{")


@given(text=st.text(alphabet=st.characters(exclude_characters="<>[]{}|:\n \t\r"), min_size=1))
@settings(max_examples=50, deadline=None)
@pytest.mark.parametrize("name", sorted({row.name for row in ROWS}))
def test_text_without_markers_is_content(name: str, text: str) -> None:
    assert read(named(name), text).content == text


def test_the_name_of_a_call_comes_before_its_arguments() -> None:
    reader = AnswerReader(HERMES, TOOLS, make_id=lambda: "id")
    told = [
        (piece, reader.push(piece)) for piece in ('<tool_call>{"name": "search"', ', "arguments": {"qu', 'ery": "a b')
    ]
    kinds = [[type(part).__name__ for part in parts] for _, parts in told]
    assert kinds == [[], ["CallStart", "CallArguments"], ["CallArguments"]]
    assert [getattr(part, "json", "") for part in told[2][1]] == ['ery": "a b']


def test_a_string_argument_in_tags_streams() -> None:
    reader = AnswerReader(CODER, TOOLS, make_id=lambda: "id")
    parts = reader.push("<tool_call>\n<function=search>\n<parameter=query>\nfirst\nsecond")
    assert "".join(getattr(part, "json", "") for part in parts) == '{"query": "first\\nsecond'


BROKEN = [
    (HERMES, "Use <tool_call> to call."),
    (HERMES, '<tool_call>{"nam": 1}</tool_call>'),
    (HERMES, '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}'),
    (HERMES, '<tool_call>{"name": "search", "arguments": [1]}</tool_call>'),
    (CODER, "The tag <function=NAME> begins a call."),
    (CODER, "<tool_call>\nno\n</tool_call>"),
    (named("mistral"), "[TOOL_CALLS]no call"),
    (named("lfm2"), "<|tool_call_start|>search(query='a')<|tool_call_end|>"),
    (named("gemma-4", "<|channel>"), "<|tool_call>call:search"),
    (named("glm"), "<tool_call> two words </tool_call>"),
    (LLAMA, '{"name": "unknown", "parameters": {}}'),
    (LLAMA, '{"answer": 42, "name": "search"}'),
    (LLAMA, '{"name": "search"'),
]


@pytest.mark.parametrize(("format_", "text"), BROKEN, ids=[text for _, text in BROKEN])
def test_what_is_no_call_is_content_as_it_was_written(format_: Any, text: str) -> None:
    found = read(format_, text)
    assert (found.content, found.calls, found.reasoning) == (text, [], "")


def test_a_call_after_something_that_only_began_like_one() -> None:
    found = read(
        HERMES, 'Say <tool_call>: <tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    )
    assert (found.content, found.values) == ("Say <tool_call>:", [WEATHER])


@pytest.mark.parametrize(
    ("format_", "text", "arguments"),
    [
        (HERMES, '<tool_call>{"name": "search", "arguments": {"query": "rm -rf /tmp/x', '{"query": "rm -rf /tmp/x'),
        (HERMES, '<tool_call>{"name": "search", "arguments": {"query": Rome}}</tool_call>', '{"query": '),
        (CODER, "<function=get_weather><parameter=days>1</parameter><parameter=city>Ro", '{"days": 1, "city": "Ro'),
    ],
)
def test_a_broken_call_has_incomplete_arguments(format_: Any, text: str, arguments: str) -> None:
    """An incomplete call gets incomplete JSON, so that a client cannot execute it."""
    found = read(format_, text)
    assert [call[1] for call in found.calls] == [arguments]
    with pytest.raises(ValueError):
        json.loads(found.calls[0][1])


LENIENT = [  # mistakes that models make, and variants of formats
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>'),
    (HERMES, "<tool_call>{'name': 'get_weather', 'arguments': {'city': 'Rome',}}</tool_call>"),
    (HERMES, '<tool_call>\n{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}'),
    (HERMES, '<tool_call>[{"name": "get_weather", "parameters": {"city": "Rome"}}]</tool_call>'),
    (CODER, "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"),
    (CODER, "<tool_call><function=get_weather><parameter=city>Rome</parameter></tool_call>"),
    (named("glm"), "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"),
    (named("kimi-k2"), '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Rome"}'),
    (LLAMA, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}'),
    (LLAMA, '{"type": "function", "name": "get_weather", "parameters": {"city": "Rome"}}'),
    (HARMONY, '<|channel|>analysis to=functions.get_weather<|message|>{"city": "Rome"}'),
    (HARMONY, ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Rome"}<|call|>'),
    (named("minimax-m1"), '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_calls>'),
    (named("command-r-plus"), 'Action:\n```json\n[{"tool_name": "get_weather", "parameters": {"city": "Rome"}}]```'),
]


@pytest.mark.parametrize(("format_", "text"), LENIENT, ids=[text for _, text in LENIENT])
def test_calls_are_read_in_the_ways_models_write_them(format_: Any, text: str) -> None:
    found = read(format_, text)
    assert (found.values, found.content, found.reasoning) == ([WEATHER], "", "")


def test_several_bare_calls() -> None:
    one, other = (json.dumps({"name": "search", "parameters": {"query": word}}) for word in "ab")
    assert read(LLAMA, f"{one}; {other}").values == [("search", {"query": "a"}), ("search", {"query": "b"})]


def test_a_call_without_arguments() -> None:
    texts = {"hermes": '<tool_call>{"name": "search"}', "qwen3-coder": "<function=search>\n</function>"}
    assert [read(named(name), text).calls for name, text in texts.items()] == [[("search", "{}")]] * 2


def test_a_value_may_contain_its_closing_tag() -> None:
    text = "<function=search>\n<parameter=query>\na</parameter> b\n</parameter>\n</function>"
    assert read(CODER, text).values == [("search", {"query": "a</parameter> b"})]


def test_line_breaks_of_a_value_are_kept() -> None:
    text = "<function=search>\n<parameter=query>\n\n  a\n\n</parameter>\n</function>"
    assert read(CODER, text).values == [("search", {"query": "\n  a\n"})]


def test_the_ids_of_a_model_are_kept() -> None:
    kimi = '<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "a"}<|tool_call_end|>'
    mistral = '[TOOL_CALLS]search[CALL_ID]abcdef123[ARGS]{"query": "a"}'
    assert read(named("kimi-k2"), kimi).ids == ["functions.search:0"]
    assert read(named("mistral-call-id"), mistral).ids == ["abcdef123"]
    short = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "search", "parameters": {}}]<|END_ACTION|>'
    # the model's id "0" is replaced, because the next answer would repeat it
    assert read(named("command-r7b"), short).ids == ["id0"]


THOUGHTS = [  # (text, end of the prompt, reasoning, content)
    ("<think>\nHm.\n</think>\n\nYes.", "assistant\n", "Hm.", "Yes."),
    ("Hm.\n</think>\n\nYes.", "assistant\n<think>\n", "Hm.", "Yes."),
    ("Yes.", "<think>\n\n</think>\n\n", "", "Yes."),
    ("</think>Yes.", "<think></think>", "", "Yes."),
    ("Hm", "<think>", "Hm", ""),
    ("Yes. <think> is a tag. </think>", "", "", "Yes. <think> is a tag. </think>"),
    ("A <think>", "What is <think>?\nassistant:", "", "A <think>"),
    ("\n<think>Hm.</think>Yes.\n", "", "Hm.", "Yes.\n"),
]


@pytest.mark.parametrize(("text", "tail", "reasoning", "content"), THOUGHTS)
def test_thoughts_and_content(text: str, tail: str, reasoning: str, content: str) -> None:
    found = read(HERMES, text, tail)
    assert (found.reasoning, found.content) == (reasoning, content)


def test_a_thought_that_is_said_to_have_begun() -> None:
    reader = AnswerReader(HERMES, prompt_tail="<think>\n")
    parts = (*reader.push(" unsure.</think>No."), *reader.finish())
    assert [(type(part).__name__, getattr(part, "text", "")) for part in parts] == [
        ("Reasoning", "unsure."),
        ("Content", "No."),
    ]


JSON_CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
TAG_CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("format_", "call"), [(HERMES, JSON_CALL), (CODER, TAG_CALL)], ids=["hermes", "coder"])
def test_a_call_that_a_thought_mentions_is_thought(format_: Any, call: str) -> None:
    thought = f"The format would be {call} but I must not."
    found = read(format_, f"{thought}\n</think>\nNo.", "<think>")
    assert (found.reasoning, found.calls, found.content) == (thought, [], "No.")
    found = read(format_, f"{thought}\n</think>\n{call}", "<think>")
    assert (found.reasoning, found.values, found.content) == (thought, [WEATHER], "")


@pytest.mark.parametrize("more", ["", "\n", f"\n{TAG_CALL}\n"])
def test_a_family_that_calls_without_ending_its_thought(more: str) -> None:
    found = read(CODER, f"I look.\n{TAG_CALL}{more}", "<think>")
    assert (found.reasoning, found.values, found.content) == ("I look.", [WEATHER] * (2 if "call" in more else 1), "")
    assert read(HERMES, f"I look.\n{JSON_CALL}{more}", "<think>").calls == []


def test_an_answer_that_is_cut_off_behind_a_call_in_a_thought() -> None:
    """A call inside unfinished reasoning stays reasoning if the answer was truncated, because the model may only
    mention it.
    """
    reader = AnswerReader(CODER, TOOLS, "<think>")
    parts = (*reader.push(f"E.g. {TAG_CALL}"), *reader.finish(cut=True))
    assert [type(part).__name__ for part in parts] == ["Reasoning"] * len(parts)


@pytest.mark.parametrize("size", [100, 10_000])
def test_a_long_call_in_an_unended_thought(size: int) -> None:
    """Calls inside unfinished reasoning are found even if they are longer than the text that the parser rescans."""
    call = TAG_CALL.replace("Rome", "R" * size)
    found = read(CODER, f"I look.\n{call}", "<think>")
    assert (found.reasoning, found.values) == ("I look.", [("get_weather", {"city": "R" * size})])
    found = read(CODER, f"E.g. {call} or so.\n</think>Hi.", "<think>", cuts=range(1, size, 7))
    assert (found.reasoning, found.calls, found.content) == (f"E.g. {call} or so.", [], "Hi.")


def test_a_call_of_an_unknown_tool_in_a_thought_is_thought() -> None:
    text = "E.g. <tool_call>\n<function=NAME>\n</function>\n</tool_call>"
    assert read(CODER, text, "<think>").reasoning == text


def test_a_cut_call_in_a_thought_is_thought() -> None:
    text = f"I look.\n{TAG_CALL}"[:-40]
    assert read(CODER, text, "<think>").reasoning == text


@pytest.mark.parametrize(
    ("before", "after", "content"),
    [
        ("Before\n", "\nafter", "Before\nafter"),
        ("Before\n\n", "after", "Before\n\nafter"),
        ("Before", "\nafter", "Before\nafter"),
        ("Before ", "\n", "Before"),
        ("", "\nafter", "after"),
    ],
)
def test_content_that_goes_on_after_a_call_keeps_the_white_space(before: str, after: str, content: str) -> None:
    assert read(HERMES, before + JSON_CALL + after).content == content
    assert read(HERMES, before + JSON_CALL + "\n" + JSON_CALL + after).content == content


@pytest.mark.parametrize("tail", ["<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n"])
def test_thoughts_that_stay_in_the_content(tail: str) -> None:
    """If reasoning stays in the content, the content includes the start marker even if the prompt contains it.

    Tool calls mentioned in the reasoning are not parsed as calls.
    """
    text = f"E.g. {JSON_CALL}, no.\n</think>\n\nHi.\n"
    begun = "<think>\n"
    found = read(HERMES, (text if tail.endswith(begun) else begun + text) + JSON_CALL, tail, inline=True)
    assert (found.reasoning, found.values, found.content) == ("", [WEATHER], begun + text.rstrip())


def test_harmony_thoughts_that_stay_in_the_content() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|>"
    found = read(HARMONY, f"{text}<|start|>assistant<|channel|>final<|message|>Hi.", "<|start|>assistant", inline=True)
    assert (found.reasoning, found.content) == ("", f"{text}Hi.")


@pytest.mark.parametrize(
    ("tail", "text", "expected"),
    [
        ("<think>\n", " sure.</think>\nYes.", (" sure.", "Yes.")),
        ("<|start|>assistant<|channel|>analysis<|message|>", " sure.", (" sure.", "")),
        ("<|start|>assistant<|channel|>final<|message|>", " sure.", ("", " sure.")),
    ],
)
def test_white_space_at_the_start_of_what_continues(tail: str, text: str, expected: tuple[str, str]) -> None:
    found = read(HERMES if tail.startswith("<think>") else HARMONY, text, tail, resumed=True)
    assert (found.reasoning, found.content) == expected


HARMONIES = [
    ("<|channel|>final<|message|>Hi.", "", "Hi."),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        "Hm.",
        "Hi.",
    ),
    ("<|channel|>commentary<|message|>Hi.", "", "Hi."),
    ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.", "Hm.", ""),
    ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    ("Hi.", "", "Hi."),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assist", "Hm.", ""),
    ("<|channel|>commentary to=python <|constrain|>code<|message|>print()", "", ""),  # no tool of this name was offered
    (
        " to=container.exec<|channel|>commentary<|message|>ls<|end|><|start|>assistant<|channel|>final<|message|>a",
        "",
        "a",
    ),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), HARMONIES)
def test_harmony(text: str, reasoning: str, content: str) -> None:
    found = read(HARMONY, text, "<|start|>assistant")
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, [])


def test_calls_that_stay_in_the_content() -> None:
    for format_, text in (
        (HERMES, JSON_CALL),
        (HARMONY, '<|channel|>commentary to=functions.search<|message|>{"query": "a"}'),
    ):
        reader = AnswerReader(format_, TOOLS, "<|start|>assistant", read_calls=False)
        parts = (*reader.push(text), *reader.finish())
        assert "".join(getattr(part, "text", "") for part in parts) == text.rpartition("<|message|>")[2]


def test_calls_in_a_message_to_the_user_are_text() -> None:
    call = '<atem:function_calls><atem:invoke name="search">\n</atem:invoke></atem:function_calls>'
    for begun, calls in ((" to=user<|message|>", 0), (" to=search<|message|>", 1)):
        found = read(named("muse", " to=self<|message|>"), begun + call, "<|start|>assistant")
        assert (len(found.calls), found.content) == (calls, "" if calls else call)


def test_without_tools_markers_of_calls_are_text() -> None:
    text = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    assert read(PLAIN, text, tools=[]).content == text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        '<tool_call>{"name":' * 20_000,
        '<tool_call>{"arguments": {"a": ' + "[" * 100_000,
        "x" + " " * 200_000 + "y",
        '<tool_call>{"name": "search", "arguments": {"query": "' + "\\" * 200_000,
        "<think>" + "</" * 100_000,
    ],
    ids=["markers", "names", "brackets", "spaces", "escapes", "ends"],
)
def test_hostile_texts_take_linear_time(text: str) -> None:
    """A quadratic parser would take minutes for these texts."""
    assert len(text) > 100_000

    def run(part: str) -> float:
        reader = AnswerReader(HERMES, TOOLS)
        began = time.process_time()
        for at in range(0, len(part), 7):
            reader.push(part[at : at + 7])
        reader.finish()
        return time.process_time() - began

    assert run(text) < 20
