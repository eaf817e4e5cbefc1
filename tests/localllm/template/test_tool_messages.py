"""Messages are adapted to templates without tools or calls. Calls rendered as text can be parsed again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.template.call_writer import written_call
from localllm.template.formats import ROWS, find_format
from localllm.template.tool_messages import CallForm, call_form, fitted
from tests.localllm.output.support import TOOLS, chat_template, named, read

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CALL = {"id": "call00001", "type": "function", "function": {"name": "search", "arguments": '{"query": "a"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Search."},
    {"role": "assistant", "content": "So.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "Found."},
]
MARKED = [row.name for row in ROWS if row.channels is None]
WORDS = st.text(st.sampled_from("ab é\"'\\<>{}\n1|/"), min_size=1, max_size=12).filter(
    lambda text: text.strip() == text and '<|"|>' not in text  # Gemma 4's string delimiter
)


def form(source: str) -> CallForm:
    return call_form(chat_template(source))


def test_how_a_template_takes_calls_is_found_by_rendering_one() -> None:
    start = "{% for m in messages %}{{ m.role ~ ':' ~ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
    end = "{% endfor %}{% endfor %}"
    assert form(CHATML) == "none"
    assert form(start + "{{ c.function.arguments | tojson }}" + end) == "object"
    assert form(start + "{% for k, v in c.function.arguments.items() %}{{ k ~ v }}{% endfor %}" + end) == "object"
    assert form(start + "{{ '' + c.function.arguments }}" + end) == "text"


def test_calls_that_a_template_leaves_out_are_written_into_the_text() -> None:
    made = fitted(TALK, [], find_format(CHATML), "none")
    assert made[1]["content"] == 'So.\n<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
    assert made[2] == {"role": "user", "content": "<tool_response>\nFound.\n</tool_response>"}
    assert "tool_calls" not in made[1]
    assert "tool_calls" in TALK[1]  # the caller's messages are unchanged


@pytest.mark.parametrize(
    ("how", "arguments", "given"),
    [
        ("object", '{"query": "a"}', {"query": "a"}),
        ("text", {"query": "a"}, '{"query": "a"}'),
        ("object", "", {}),
        ("object", "broken {", {"arguments": "broken {"}),
        ("object", "[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_arguments_have_the_form_that_a_template_takes(how: CallForm, arguments: Any, given: Any) -> None:
    call = {**CALL, "function": {"name": "search", "arguments": arguments}}
    [made] = fitted([{"role": "assistant", "content": None, "tool_calls": [call]}], [], find_format(""), how)
    assert made["tool_calls"][0]["function"]["arguments"] == given


def test_tools_are_described_where_the_template_does_not() -> None:
    alone = fitted([{"role": "user", "content": "Hi"}], TOOLS, find_format(CHATML), "none")
    system = fitted([{"role": "system", "content": "Be brief."}], TOOLS, find_format(CHATML), "none")
    for text in (alone[0]["content"], system[0]["content"]):
        assert json.dumps(TOOLS[1]["function"]) in text
        example = text[text.index("<tool_call>") : text.index("</tool_call>")]
        assert json.loads(example.removeprefix("<tool_call>")) == {"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}
    assert system[0]["content"].startswith("Be brief.\n\n")
    assert fitted(TALK[:1], TOOLS, named("hermes"), "object") == TALK[:1]  # this template renders the tools itself


WRITTEN = {
    "qwen3-coder": "<tool_call><function=t>\n<parameter=a>\nx\n</parameter>\n</function></tool_call>",
    "minicpm5": '<function name="t"><param name="a"><![CDATA[x]]></param></function>',
    "lfm2": '<|tool_call_start|>[t(a="x")]<|tool_call_end|>',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_written_as_the_model_writes_it(name: str) -> None:
    assert written_call(named(name).calls, "t", {"a": "x"}) == WRITTEN[name]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("name", MARKED)
def test_a_written_call_is_read_back(name: str, data: st.DataObject) -> None:
    arguments: dict[str, Any] = {"query": data.draw(WORDS)}
    if data.draw(st.booleans()):
        arguments["deep"] = data.draw(st.booleans())
    text = written_call(named(name).calls, "search", arguments)
    assert read(named(name), text).values == [("search", arguments)]
