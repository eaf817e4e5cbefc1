"""Anthropic's /v1/messages: the exact object of a whole answer, and a stream's event order as in Anthropic's
reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from localllm.generation.request import Started
from localllm.server.anthropic.writer import SIGNATURE
from localllm.server.app import make_app
from localllm.server.settings import ServerSettings
from tests.localllm.server.openai.support import USER, stream
from tests.localllm.server.scripted import ScriptedService, Step, called, done, said, script, thought

T = TypeVar("T")
PATH = "/v1/messages"
TOOL: Any = {"name": "add", "input_schema": {"type": "object", "properties": {}}}


def everything() -> list[Step]:
    return [
        Started(20, 12),
        *thought("I ", "add"),
        *said("No", "w"),
        *called("add", '{"a":', "1}", id="t1"),
        *called("add", index=1, id="t2"),
        done("tool_calls", 20, 12, answer_tokens=9),
    ]


# -- the official client ---------------------------------------------------------------------------------------------


def use(service: ScriptedService, work: Callable[[Any], Awaitable[T]]) -> T:
    """Run `work` with the `anthropic` client over the application, or skip the test if the package is missing."""
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    import anthropic._base_client as base

    transports = pytest.importorskip("httpx2" if hasattr(base, "httpx2") else "httpx")

    async def run() -> T:
        app: Any = make_app(service, ServerSettings())
        http = transports.AsyncClient(transport=transports.ASGITransport(app=app))
        client = anthropic.AsyncAnthropic(api_key="x", base_url="http://127.0.0.1", http_client=http, max_retries=0)
        async with client as it:
            return await work(it)

    return asyncio.run(run())


def test_a_message_of_the_client() -> None:
    asked: Any = {"model": "claude-x", "max_tokens": 9, "messages": USER, "tools": [TOOL]}
    body: Any = use(ScriptedService(everything()), lambda it: it.messages.create(**asked))
    type(body).model_validate(body.model_dump(exclude_unset=True))
    assert [block.type for block in body.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert body.content[2].input == {"a": 1}
    again: Any = [*USER, {"role": "assistant", "content": [block.model_dump() for block in body.content]}]
    results = [{"type": "tool_result", "tool_use_id": id, "content": "2"} for id in ("t1", "t2")]
    service = ScriptedService()
    use(service, lambda it: it.messages.create(**asked | {"messages": [*again, {"role": "user", "content": results}]}))
    assert [message["role"] for message in service.asked[-1].messages] == ["user", "assistant", "tool", "tool"]


def test_a_streamed_message_of_the_client() -> None:
    async def work(it: Any) -> Any:
        async with it.messages.stream(model="x", max_tokens=9, messages=USER, tools=[TOOL]) as events:
            text = "".join([piece async for piece in events.text_stream])
            return text, await events.get_final_message()

    text, body = use(ScriptedService(everything()), work)
    assert text == "Now"
    assert body.content[0].thinking == "I add"
    assert body.content[0].signature == SIGNATURE
    assert [block.input for block in body.content[2:]] == [{"a": 1}, {}]
    assert (body.stop_reason, body.usage.output_tokens, body.usage.cache_read_input_tokens) == ("tool_use", 9, 12)


def test_raw_events_are_what_the_clients_types_say() -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    adapter = pytest.importorskip("pydantic").TypeAdapter(anthropic.types.RawMessageStreamEvent)
    for name, data in stream(ScriptedService(everything()), PATH, max_tokens=9, messages=USER, tools=[TOOL]):
        if name != "ping":
            adapter.validate_python(data)


def test_counting_models_and_errors_of_the_client() -> None:
    async def work(it: Any) -> Any:
        counted = await it.messages.count_tokens(model="x", messages=USER)
        return counted.input_tokens, [model async for model in it.models.list()]

    tokens, models = use(ScriptedService(), work)
    assert tokens == 24
    assert [(model.id, model.type, model.display_name) for model in models] == [("tiny", "model", "tiny")]

    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    with pytest.raises(anthropic.BadRequestError, match="messages: expected at least one item"):
        use(ScriptedService(script("x")), lambda it: it.messages.create(model="x", max_tokens=1, messages=[]))
