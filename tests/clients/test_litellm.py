"""The `litellm` package: the same tool calls through its providers for OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import Server
from tests.clients.plans import Call, calls, plan, says

litellm = pytest.importorskip("litellm", reason="the litellm package is not installed")
pytest.importorskip("mcp", reason="litellm's tools and responses need the mcp package")

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
LAST = (calls(Call("add", {"a": 5, "b": 50})), says("It is {result}, after {seen} messages."))
PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": "", "ollama_chat": ""}  # provider -> suffix of its URL


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools(server: Server, provider: str, stream: bool) -> None:
    # In a stream, litellm merges the calls of an Ollama answer, even with Ollama itself. So that case has one call.
    two = not (stream and provider == "ollama_chat")
    first = [Call("add", {"a": 2, "b": 3}), Call("add", {"a": 20, "b": 30})]
    steps = plan(calls(*first[: 1 + two], text="Let me see."), *LAST)
    messages: list[Any] = [{"role": "system", "content": "You add."}, {"role": "user", "content": steps}]
    reasons = []
    for _ in range(3):
        body = litellm.completion(
            model=f"{provider}/planned", api_base=server.url + PROVIDERS[provider], api_key="none",
            messages=messages, tools=[ADD], stream=stream, max_tokens=500, timeout=60, num_retries=0,
        )  # fmt: skip
        if stream:
            body = litellm.stream_chunk_builder(list(body), messages=messages)
        [choice] = body.choices
        reasons.append(choice.finish_reason)
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls or []:
            total = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "add", "content": str(total)})
    assert choice.message.content == f"It is 55, after {4 + two} messages."
    assert reasons == ["tool_calls", "tool_calls", "stop"]


def test_responses(server: Server) -> None:
    body = litellm.responses(
        model="openai/planned", api_base=f"{server.url}/v1", api_key="none", input=plan(says("Said.")), timeout=60
    )
    assert body.output[-1].content[0].text == "Said."


def test_text(server: Server) -> None:
    body = litellm.text_completion(
        model="text-completion-openai/planned", api_base=f"{server.url}/v1", api_key="none", prompt="Once", max_tokens=5
    )
    assert body.choices[0].text == "Fine."


def test_errors_have_their_classes(server: Server) -> None:
    place = {"api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}
    asked: dict[str, Any] = {"model": "openai/planned", **place}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked, messages=[{"role": "user", "content": "word " * 20_000}])
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, messages=[{"role": "user", "content": "Hi"}], temperature="hot")
