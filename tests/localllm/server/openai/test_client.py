"""The official `openai` client, connected to the application in process. The client's types accept responses,
whole and streamed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from localllm.generation.request import Prefilled, Started
from localllm.server.app import make_app
from localllm.server.settings import ServerSettings
from tests.localllm.server.openai.test_responses import ADD
from tests.localllm.server.scripted import ScriptedService, called, done, likely, said, script, thought
from tests.localllm.server.test_exchanges import SCRIPTS

openai = pytest.importorskip("openai", reason="the openai package is not installed")
pydantic = pytest.importorskip("pydantic", reason="the openai package is not installed")

T = TypeVar("T")
PATCH: Any = {"type": "custom", "name": "patch"}
USER: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def use(service: ScriptedService, work: Callable[[Any], Awaitable[T]]) -> T:
    """Run `work` with an `openai` client over the application."""
    transports = pytest.importorskip(_http())

    async def run() -> T:
        app: Any = make_app(service, ServerSettings())
        http = transports.AsyncClient(transport=transports.ASGITransport(app=app))
        async with openai.AsyncOpenAI(
            api_key="x", base_url="http://127.0.0.1/v1", http_client=http, max_retries=0
        ) as it:
            return await work(it)

    return asyncio.run(run())


def _http() -> str:
    """Return the HTTP package that this client version uses: httpx, or httpx2 from 3.0 on."""
    import openai._base_client as base

    return "httpx2" if hasattr(base, "httpx2") else "httpx"


def strict(value: Any) -> None:
    """Validate a response with pydantic again, because the client itself accepts anything."""
    type(value).model_validate(value.model_dump(by_alias=True, exclude_unset=True))


def test_a_chat() -> None:
    steps = [Started(5, 2), *thought("hm"), *said("Hel", "lo"), *called("add", '{"a":1}'), done("tool_calls")]
    body = use(ScriptedService(steps), lambda it: it.chat.completions.create(model="x", messages=USER, tools=[TOOL]))
    strict(body)
    assert body.choices[0].message.content == "Hello"
    assert body.choices[0].message.tool_calls[0].function.arguments == '{"a":1}'
    assert body.choices[0].message.reasoning_content == "hm"
    assert body.usage.prompt_tokens_details.cached_tokens == 2


def test_a_streamed_chat() -> None:
    steps = [Started(5, 2), *thought("hm"), *said("Hel", "lo"), *called("add", '{"a"', ":1}"), done("tool_calls")]

    async def work(it: Any) -> Any:
        asked = {"model": "x", "messages": USER, "tools": [TOOL], "stream_options": {"include_usage": True}}
        async with it.chat.completions.stream(**asked) as events:
            kinds = {event.type async for event in events}
        return kinds, await events.get_final_completion()

    kinds, body = use(ScriptedService(steps), work)
    assert {"content.delta", "tool_calls.function.arguments.done"} <= kinds
    assert body.choices[0].message.content == "Hello"
    assert body.choices[0].message.tool_calls[0].function.arguments == '{"a":1}'
    assert body.usage.total_tokens == 8


def test_chunks_are_what_the_types_say() -> None:
    steps = [Started(5, 2), *said("A", token=65, logprob=likely(65, -1.0, ((65, -1.0),))), done()]

    async def work(it: Any) -> list[Any]:
        asked = {"model": "x", "messages": USER, "logprobs": True, "top_logprobs": 1}
        return [chunk async for chunk in await it.chat.completions.create(**asked, stream=True)]

    found = use(ScriptedService(steps), work)
    for chunk in found:
        strict(chunk)
    assert found[1].choices[0].logprobs.content[0].top_logprobs[0].token == "A"


def test_completions() -> None:
    body = use(ScriptedService(script("a", "b")), lambda it: it.completions.create(model="x", prompt="Once", echo=True))
    strict(body)
    assert body.choices[0].text == "Onceab"

    async def work(it: Any) -> str:
        stream = await it.completions.create(model="x", prompt=["Once"], stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    assert use(ScriptedService(script("a", "b")), work) == "ab"


def test_a_response() -> None:
    asked: Any = {"model": "x", "input": "Hi", "tools": [ADD, PATCH], "instructions": "Be short."}
    body = use(ScriptedService(SCRIPTS["tools"]), lambda it: it.responses.create(**asked))
    strict(body)
    assert body.output_text == "Now"
    assert [item.type for item in body.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert body.usage.output_tokens_details.reasoning_tokens == 2
    again = [*USER, *[item.model_dump(exclude_none=True) for item in body.output]]
    again += [{"type": "function_call_output", "call_id": "c1", "output": "2"}]
    again += [{"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"}]
    service = ScriptedService()
    assert use(service, lambda it: it.responses.create(model="x", input=again)).output_text == "Hi"
    assert [message["role"] for message in service.asked[-1].messages] == ["user", "assistant", "tool", "tool"]


def test_a_streamed_response() -> None:
    events_of = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)

    async def work(it: Any) -> list[Any]:
        stream = await it.responses.create(model="x", input="Hi", tools=[ADD, PATCH], stream=True)
        return [event async for event in stream]

    found = use(ScriptedService(SCRIPTS["tools"]), work)
    for event in found:
        events_of.validate_python(event.model_dump(by_alias=True, exclude_unset=True))
    assert found[-1].type == "response.completed"
    assert found[-1].response.output_text == "Now"

    async def gathered(it: Any) -> Any:
        async with it.responses.stream(model="x", input="Hi", tools=[ADD]) as events:
            async for _ in events:
                pass
        return await events.get_final_response()

    steps = [Started(5, 0), Prefilled(5), *thought("hm"), *said("Hi"), *called("add", '{"a":1}'), done("tool_calls")]
    response = use(ScriptedService(steps), gathered)
    assert response.output_text == "Hi"
    assert json.loads(response.output[2].arguments) == {"a": 1}


def test_embeddings_come_as_base64_unless_told_otherwise() -> None:
    body = use(ScriptedService(), lambda it: it.embeddings.create(model="x", input=["a", "bc"]))
    assert body.data[0].embedding == [1.0, 0.0, 0.5]
    body = use(ScriptedService(), lambda it: it.embeddings.create(model="x", input="a", encoding_format="float"))
    assert body.data[0].embedding == [1.0, 0.0, 0.5]


def test_models() -> None:
    async def work(it: Any) -> Any:
        return [model async for model in it.models.list()], await it.models.retrieve("tiny")

    listed, one = use(ScriptedService(), work)
    assert [model.id for model in listed] == ["tiny"]
    strict(one)


def test_errors_are_the_clients_own() -> None:
    async def work(it: Any) -> None:
        await it.chat.completions.create(model="x", messages=[{"role": "user", "content": 5}])

    with pytest.raises(openai.BadRequestError) as caught:
        use(ScriptedService(), work)
    assert caught.value.param == "messages[0].content"

    async def late(it: Any) -> None:
        async for _ in await it.chat.completions.create(model="x", messages=USER, stream=True):
            pass

    with pytest.raises(openai.APIError, match="internal error"):
        use(ScriptedService([Started(5, 0), *said("a"), RuntimeError("x")]), late)
