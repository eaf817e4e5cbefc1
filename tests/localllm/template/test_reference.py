"""The 70 reference templates render a conversation completely, with tools if supported, as plain Jinja does."""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localllm.gguf import open_gguf
from localllm.template import ChatTemplate, Rendered, TemplateError, choose_template, encode_chat
from localllm.template.origin import OWN
from localllm.tokenizer import Tokenizer
from tests.conftest import SHARED_DATA, reference
from tests.localllm.output.support import chat_template, properties, tool
from tests.localllm.template.conversations import UNDATED

NAMES = sorted(path.name for path in (SHARED_DATA / "templates").glob("*.jinja"))
TALK = [
    {"role": "system", "content": "You are a grumpy pirate."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "Arr, a pirate!"},
    {"role": "user", "content": "Where is the treasure?"},
]
CITY = properties("city", city={"type": "string", "description": "its name"})
TOOL = tool(CITY, "get_weather", "Tells the weather.")
NO_SYSTEM = {"google-gemma-2-2b-it.jinja"}
NO_TOOLS = {  # templates that do not support tools
    "HuggingFaceTB-SmolLM3-3B.jinja",  # reads xml_tools and python_tools instead
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
    "deepseek-ai-DeepSeek-V3.1.jinja",
    "google-gemma-2-2b-it.jinja",
    "llama-cpp-rwkv-world.jinja",
    "microsoft-Phi-3.5-mini-instruct.jinja",
}


@cache
def _template(name: str) -> ChatTemplate:
    return chat_template(reference("templates", name).read_text(encoding="utf-8"))


def _plain_jinja(source: str, messages: list[dict[str, Any]]) -> str | None:
    """Render as Hugging Face does, without localllm's limits. Return None if rendering fails."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def reject(message: str) -> None:
        raise JinjaError(message)

    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    environment.globals["raise_exception"] = reject
    environment.globals["strftime_now"] = datetime(2024, 2, 29).strftime
    try:
        return environment.from_string(source).render(
            messages=messages, tools=None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        )
    except (JinjaError, TypeError):
        return None


def test_all_seventy_are_here() -> None:
    reference("templates")
    assert len(NAMES) == 70


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_rendered_completely(name: str) -> None:
    rendered = _template(name).render(TALK)
    assert all(message["content"] in rendered.text for message in TALK)
    # one template puts the system message last
    places = [rendered.text.index(message["content"]) for message in TALK[1:]]
    assert places == sorted(places)
    assert bool(rendered.notes) == (name in NO_SYSTEM)


@pytest.mark.parametrize("name", NAMES)
def test_tools_are_rendered_where_the_template_knows_them(name: str) -> None:
    rendered = _template(name).render(TALK, tools=[TOOL])
    assert (TOOL["function"]["description"] in rendered.text) == (name not in NO_TOOLS)
    assert TALK[-1]["content"] in rendered.text


def test_guards_change_no_text() -> None:
    reference("templates")
    equal = 0
    for name in NAMES:
        template = _template(name)
        expected = _plain_jinja(template.source, TALK)
        if expected is not None:
            assert template.render(TALK, extra=UNDATED.get(name)).text == expected, name
            equal += 1
    assert equal >= 60


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_of_300_messages_is_within_the_budget(name: str) -> None:
    talk = [TALK[0], *(TALK[1 + i % 2] for i in range(299))]
    assert _template(name).render(talk).text.count(TALK[2]["content"]) == 149


@pytest.mark.parametrize("vocab", ["phi-3", "qwen2", "gemma-4", "llama-bpe"])
def test_bos_once_with_a_real_vocabulary_and_its_template(vocab: str) -> None:
    metadata = open_gguf(reference("vocab", f"ggml-vocab-{vocab}.gguf")).metadata
    tokenizer = Tokenizer.from_metadata(metadata)
    template, note = choose_template(metadata, tokenizer)
    assert (note is None) == ("tokenizer.chat_template" in metadata)
    ids = encode_chat(tokenizer, template.render(TALK).text, template.source)
    assert ids.count(tokenizer.bos if tokenizer.bos is not None else -1) == (vocab != "qwen2")
    assert "Where is the treasure?" in tokenizer.decode(ids)


SPECIAL = re.compile(r"<[|｜]?[^<>\s'\"{}%]{1,40}[|｜]?>|\[/?[A-Z_]{3,}\]|<｜[^｜]*｜>|[【】]")
FOLLOWS_CONTENT = {"HuggingFaceTB-SmolLM3-3B.jinja"}  # detects flags such as "/no_think" in the system message
NEEDS_OTHERS = {  # template: error for a conversation with tools
    "Kimi-K2-Instruct.jinja": "append",  # Jinja's sandbox forbids changes to a list
    "Kimi-K2-Thinking.jinja": "append",
    "google-gemma-2-2b-it.jinja": "System role not supported",
    "meetkai-functionary-medium-v3.2.jinja": "TypeError",  # requires arguments as a string
}


def _talk(more: str, tools: bool) -> list[dict[str, Any]]:
    """Return a conversation whose system, user and tool messages end with `more`."""
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    plain: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a pirate." + more},
        {"role": "user", "content": "Who are you?" + more},
        {"role": "assistant", "content": "<think>A pirate!</think>Arr."},
        {"role": "user", "content": "Where is the treasure?" + more},
    ]
    answer = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "sunny" + more}
    return [*plain, {"role": "assistant", "content": "", "tool_calls": [call]}, answer] if tools else plain


def _own(rendered: Rendered, specials: set[str]) -> list[str]:
    """Return the special tokens that come from the template itself, in order."""
    places = [(found.start(), text) for text in specials for found in re.finditer(re.escape(text), rendered.text)]
    return [text for place, text in sorted(places) if min(rendered.text.marks[place : place + len(text)]) == OWN]


@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
@pytest.mark.parametrize("name", NAMES)
def test_every_special_token_is_the_templates_own_and_none_the_users(name: str, tools: bool) -> None:
    template = _template(name)
    specials = {*SPECIAL.findall(template.source), "<s>", "</s>"} - {"<think>", "</think>"}
    more = " ".join(sorted(specials))
    told = json.loads(json.dumps(TOOL).replace("weather.", "weather." + more).replace("its name", "its name" + more))
    if tools and name in NEEDS_OTHERS:
        with pytest.raises(TemplateError, match=NEEDS_OTHERS[name]):
            template.render(_talk("", tools), tools=[TOOL])
        return
    harmless = template.render(_talk("", tools), tools=[TOOL] if tools else None)
    written = [text for text in specials for _ in re.finditer(re.escape(text), harmless.text)]
    assert sorted(_own(harmless, specials)) == sorted(written), "a token that the template writes does not count"
    hostile = template.render(_talk(more, tools), tools=[told] if tools else None)
    assert more in hostile.text or name in NO_SYSTEM, "the attack is not in the text"
    if name not in FOLLOWS_CONTENT:
        assert _own(hostile, specials) == _own(harmless, specials)
