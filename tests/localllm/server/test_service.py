"""The server's start options are the defaults of request fields."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.server.app import make_app
from localllm.server.catalogue import only
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.service import Service, Usual
from localllm.server.settings import ServerSettings
from localllm.server.turn import Completion, Generation, Thinking, Turn
from localllm.template import given_template
from tests.localllm.server.whole import DEMO, opened

THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
)

SILENCE_IS_OFF = (
    "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{% if not enable_thinking %}</think>{% endif %}"
)


@pytest.mark.parametrize(
    ("think", "asked", "expected"),
    [
        (None, Thinking(), Thinking()),
        (True, Thinking(), Thinking(True)),
        (False, Thinking(), Thinking(False)),
        (False, Thinking(True), Thinking(True)),
        (64, Thinking(), Thinking(None, "", 64)),
        (64, Thinking(None, "high"), Thinking(None, "high")),
        ("low", Thinking(), Thinking(None, "low")),
        ("low", Thinking(budget=0), Thinking(None, "", 0)),
    ],
)
def test_a_request_that_speaks_of_thinking_is_heard(think: Any, asked: Thinking, expected: Thinking) -> None:
    assert Usual.of(think, False, {}).fill(Turn([], thinking=asked)).thinking == expected


@pytest.mark.parametrize(
    ("usual", "asked", "expected"), [(False, None, None), (True, None, True), (True, False, False), (False, True, True)]
)
def test_where_thoughts_go(usual: bool, asked: bool | None, expected: bool | None) -> None:
    assert Usual.of(None, usual, {}).fill(Turn([], thinking=Thinking(inline=asked))).thinking.inline is expected


def test_variables_of_requests_come_first() -> None:
    usual = Usual.of(None, False, {"enable_thinking": False, "date": "today", "name": "x"})
    assert usual.fill(Turn([], template_variables={"date": "now"})).template_variables == {
        "enable_thinking": False,
        "date": "now",
        "name": "x",
    }
    asked = usual.fill(Turn([], thinking=Thinking(True)))
    assert "enable_thinking" not in asked.template_variables
    assert asked.thinking.enabled


def answered(usual: Usual, template: str = THINKS, **body: Any) -> dict[str, Any]:
    """Return the answer message of a model whose template opens the reasoning section."""

    def load(path: Path) -> Served:
        served = opened(path)
        served.model.use_template(given_template(template))
        return served

    async def run() -> dict[str, Any]:
        registry = ModelRegistry(only("demo", DEMO), load)
        transport = httpx.ASGITransport(make_app(Service(registry, usual), ServerSettings()))
        body.setdefault("messages", [{"role": "user", "content": "Hello"}])
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as one:
                answer = await one.post("/v1/chat/completions", json={"max_tokens": 6, "temperature": 0, **body})
        finally:
            registry.end()
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]["message"]
        return found

    return asyncio.run(run())


def test_a_thought_is_a_field_of_its_own_or_left_in_the_content() -> None:
    apart, inline = answered(Usual()), answered(Usual(), reasoning_format="none")
    assert apart["reasoning_content"]
    assert not apart["content"]
    assert inline["content"] == f"<think>\n{apart['reasoning_content']}"  # with the opening marker, as in llama-server
    assert "reasoning_content" not in inline
    server = Usual.of(None, True, {})
    assert answered(server)["content"] == inline["content"]
    assert answered(server, reasoning_format="deepseek") == apart


def test_a_model_thinks_unless_told_otherwise_whatever_its_template_takes_silence_for() -> None:
    assert "reasoning_content" in answered(Usual(), SILENCE_IS_OFF)
    for usual, body in (
        (Usual(), {"chat_template_kwargs": {"enable_thinking": False}}),
        (Usual(), {"reasoning_effort": "none"}),
        (Usual.of(False, False, {}), {}),
        (Usual.of(None, False, {"enable_thinking": False}), {}),
    ):
        assert "reasoning_content" not in answered(usual, SILENCE_IS_OFF, **body)


def test_a_server_that_does_not_think() -> None:
    assert "reasoning_content" not in answered(Usual.of(False, False, {}))
    assert answered(Usual.of(False, False, {}), chat_template_kwargs={"enable_thinking": True})["reasoning_content"]


def test_biases_of_texts_are_of_their_tokens() -> None:
    served = opened(DEMO)
    try:
        generation = Generation(sampling={"logit_bias": {5: 1.0, -1: 1.0, 10**9: 1.0}}, biases={"story": -1.0})
        [request] = asyncio.run(served.of_completion(Completion("a", generation))).requests
        tokens = served.model.tokenize("story", False, False)
        assert request.sampling.logit_bias == {5: 1.0} | dict.fromkeys(tokens, -1.0)
    finally:
        served.close()
