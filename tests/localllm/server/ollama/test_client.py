"""The `ollama` package's client over HTTP, with a server on 127.0.0.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localllm.generation.request import Started
from localllm.server.errors import BadRequest
from localllm.server.turn import Completion, Turn
from tests.localllm.server.calls import served
from tests.localllm.server.scripted import ScriptedService, Step, called, done, said, script, thought

ollama = pytest.importorskip("ollama", reason="the package ollama is not installed")


def answer(asked: Turn | Completion) -> list[Step]:
    """Script the model's answers: call a tool, then report the tool's result. A request for an error raises
    an exception.
    """
    if isinstance(asked, Completion):
        return script("raw")
    last = asked.messages[-1]
    if last["content"] == "fail":
        return [Started(1, 0), *said("a"), BadRequest("it failed")]
    if asked.tools and last["role"] == "user":
        return [Started(5, 0), *thought("hm"), *called("add", '{"a": 2, ', '"b": 3}'), done("tool_calls")]
    return script("It is ", f"{last['content']}.")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served(ScriptedService(answer)) as port:
        yield ollama.Client(host=f"http://127.0.0.1:{port}", timeout=30)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def test_a_conversation_with_a_tool(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "2 + 3"}]
    first = client.chat("tiny", messages, tools=[add], think=True)
    assert first.message.thinking == "hm"
    call = first.message.tool_calls[0].function
    assert (call.name, call.arguments) == ("add", {"a": 2, "b": 3})
    messages += [first.message, {"role": "tool", "content": str(add(**call.arguments)), "tool_name": "add"}]
    second = client.chat("tiny", messages, tools=[add])
    assert second.message.content == "It is 5."
    assert second.done_reason == "stop"
    assert second.eval_count == 2


def test_streams(client: Any) -> None:
    chunks = list(client.chat("tiny", [{"role": "user", "content": "here"}], stream=True))
    assert "".join(chunk.message.content for chunk in chunks) == "It is here."
    assert chunks[-1].done
    parts = list(client.generate("tiny", "here", stream=True, options={"temperature": 0}, keep_alive="5m"))
    assert "".join(part.response for part in parts) == "It is here."
    assert parts[-1].context
    again = client.generate("tiny", "there", context=parts[-1].context)
    assert again.response == "raw"
    assert client.generate("tiny", "x", raw=True).response == "raw"


def test_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="it failed"):
        list(client.chat("tiny", [{"role": "user", "content": "fail"}], stream=True))
    with pytest.raises(ollama.ResponseError, match="it failed") as caught:
        client.chat("tiny", [{"role": "user", "content": "fail"}])
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="one fixed model"):
        client.delete("tiny")
    with pytest.raises(ollama.ResponseError, match="one fixed model"):
        client.pull("llama3")


def test_models(client: Any) -> None:
    assert client.list().models[0].model == "tiny:latest"
    assert client.ps().models[0].context_length == 4096
    shown = client.show("tiny")
    assert shown.modelinfo["llama.context_length"] == 8192
    assert "tools" in shown.capabilities
    assert client.pull("tiny").status == "success"


def test_embeddings(client: Any) -> None:
    assert len(client.embed("tiny", ["a", "b"], dimensions=2).embeddings) == 2
    assert len(client.embeddings("tiny", "a").embedding) == 3
