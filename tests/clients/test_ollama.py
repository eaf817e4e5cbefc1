"""The `ollama` package: chat with Python functions as tools, thinking and schemas, with and without streaming."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import Server
from tests.clients.plans import Call, calls, plan, says

ollama = pytest.importorskip("ollama", reason="the ollama package is not installed")

SUM = plan(
    calls(Call("add", {"a": 2, "b": 3}), Call("add", {"a": 20, "b": 30}), text="Let me see.", thought="Two sums."),
    calls(Call("add", {"a": 5, "b": 50})),
    says("It is {result}, after {seen} messages."),
)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return ollama.Client(host=server.url, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools(client: Any, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": SUM}]
    turns = 0
    while True:
        turns += 1
        asked: dict[str, Any] = {"model": "planned", "messages": messages, "tools": [add], "think": True}
        said, thought, made = "", "", list[Any]()
        for chunk in client.chat(**asked, stream=True) if stream else [client.chat(**asked)]:
            said += chunk.message.content or ""
            thought += chunk.message.thinking or ""
            made += chunk.message.tool_calls or []
        assert chunk.done
        assert chunk.eval_count > 0
        if turns == 1:
            assert (thought.strip(), said.strip()) == ("Two sums.", "Let me see.")
        messages.append({"role": "assistant", "content": said, "thinking": thought, "tool_calls": made})
        if not made:
            break
        for each in made:
            total = add(**each.function.arguments)
            messages.append({"role": "tool", "content": str(total), "tool_name": each.function.name})
    assert said == "It is 55, after 5 messages."
    assert turns == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema(client: Any, stream: bool) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    message = {"role": "user", "content": plan(says('{"city": "Oslo"}'))}
    chunks = client.chat("planned", [message], format=schema, stream=stream)
    said = "".join(chunk.message.content or "" for chunk in (chunks if stream else [chunks]))
    assert json.loads(said) == {"city": "Oslo"}


def test_generate(client: Any) -> None:
    whole = client.generate("planned", plan(says("Written."))).response
    parts = [part.response for part in client.generate("planned", plan(says("Written.")), stream=True)]
    assert whole == "".join(parts) == "Written."


def test_what_it_says_of_itself(client: Any) -> None:
    assert client.list().models[0].model == "planned:latest"
    assert {"tools", "thinking"} <= set(client.show("planned").capabilities)


def test_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("planned", [{"role": "user", "content": "word " * 20_000}])
    assert caught.value.status_code == 400
    assert "context" in caught.value.error
