"""The 70 real templates: all render a conversation completely, tools where they know them, the same as plain Jinja."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localllm.gguf import open_gguf
from localllm.template import ChatTemplate, choose_template, encode_chat
from localllm.tokenizer import Tokenizer
from tests.conftest import SHARED_DATA, reference

NAMES = sorted(path.name for path in (SHARED_DATA / "templates").glob("*.jinja"))
TALK = [
    {"role": "system", "content": "You are a grumpy pirate."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "Arr, a pirate!"},
    {"role": "user", "content": "Where is the treasure?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "its name"}},
            "required": ["city"],
        },
    },
}
TODAY = datetime(2024, 2, 29)
NO_SYSTEM = {"google-gemma-2-2b-it.jinja"}
NO_TOOLS = {  # by their text
    "HuggingFaceTB-SmolLM3-3B.jinja",  # takes xml_tools and python_tools instead
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
    "deepseek-ai-DeepSeek-V3.1.jinja",
    "google-gemma-2-2b-it.jinja",
    "llama-cpp-rwkv-world.jinja",
    "microsoft-Phi-3.5-mini-instruct.jinja",
}


@cache
def _template(name: str) -> ChatTemplate:
    return ChatTemplate(reference("templates", name).read_text(encoding="utf-8"), "<s>", "</s>", clock=lambda: TODAY)


def _plain_jinja(source: str, messages: list[dict[str, Any]]) -> str | None:
    """As Hugging Face renders chat templates, without our guards; None where that fails."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def reject(message: str) -> None:
        raise JinjaError(message)

    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    environment.globals["raise_exception"] = reject
    environment.globals["strftime_now"] = TODAY.strftime
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
    places = [rendered.text.index(message["content"]) for message in TALK[1:]]  # one puts the system message last
    assert places == sorted(places)
    assert bool(rendered.notes) == (name in NO_SYSTEM)


@pytest.mark.parametrize("name", NAMES)
def test_tools_are_rendered_where_the_template_knows_them(name: str) -> None:
    rendered = _template(name).render(TALK, tools=[TOOL])
    assert (TOOL["function"]["description"] in rendered.text) == (name not in NO_TOOLS)  # type: ignore[index]
    assert TALK[-1]["content"] in rendered.text


def test_guards_change_no_text() -> None:
    reference("templates")
    equal = 0
    for name in NAMES:
        template = _template(name)
        expected = _plain_jinja(template.source, TALK)
        if expected is not None:
            assert template.render(TALK).text == expected, name
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
    ids = encode_chat(tokenizer, template.render(TALK).text)
    assert ids.count(tokenizer.bos if tokenizer.bos is not None else -1) == (vocab != "qwen2")
    assert "Where is the treasure?" in tokenizer.decode(ids)
