"""Anthropic's /v1/messages: the exact object of a whole answer, and a stream's event order as in Anthropic's
reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from localllm.base.errors import LocalLLMError
from localllm.generation.request import Prefilled, Started
from localllm.server.anthropic.writer import SIGNATURE
from localllm.server.app import make_app
from localllm.server.settings import ServerSettings
from tests.localllm.server.openai.support import USER, ok, refusal, send, stream
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


def test_a_whole_message() -> None:
    service = ScriptedService(everything())
    body = ok(service, PATH, model="claude-x", max_tokens=9, messages=USER, tools=[TOOL])
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "I add", "signature": SIGNATURE},
            {"type": "text", "text": "Now"},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 8,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 12,
            "output_tokens": 9,
        },
    }
    assert service.closed == 1


def test_the_events_of_a_stream() -> None:
    events = stream(ScriptedService(everything()), PATH, max_tokens=9, messages=USER, tools=[TOOL])
    assert all(name == data["type"] for name, data in events)
    found = [data for _, data in events]
    message = found[0]["message"]
    assert found[0]["type"] == "message_start"
    assert (message["type"], message["role"], message["content"], message["stop_reason"]) == (
        "message",
        "assistant",
        [],
        None,
    )
    assert (message["usage"]["input_tokens"], message["usage"]["cache_read_input_tokens"]) == (8, 12)

    def delta(index: int, kind: str, **value: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **value}}

    def start(index: int, **block: Any) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def stop(index: int) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": index}

    assert found[1:] == [
        start(0, type="thinking", thinking="", signature=""),
        {"type": "ping"},
        delta(0, "thinking_delta", thinking="I "),
        delta(0, "thinking_delta", thinking="add"),
        delta(0, "signature_delta", signature=SIGNATURE),
        stop(0),
        start(1, type="text", text=""),
        delta(1, "text_delta", text="No"),
        delta(1, "text_delta", text="w"),
        stop(1),
        start(2, type="tool_use", id="t1", name="add", input={}),
        delta(2, "input_json_delta", partial_json='{"a":'),
        delta(2, "input_json_delta", partial_json="1}"),
        stop(2),
        start(3, type="tool_use", id="t2", name="add", input={}),
        stop(3),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {
                "input_tokens": 8,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 12,
                "output_tokens": 9,
            },
        },
        {"type": "message_stop"},
    ]


def test_pings_stand_for_progress_with_the_prompt() -> None:
    steps = [Started(100, 0), Prefilled(64), Prefilled(100), *said("a"), done()]
    names = [name for name, _ in stream(ScriptedService(steps), PATH, max_tokens=9, messages=USER)]
    assert names[:5] == ["message_start", "ping", "ping", "content_block_start", "ping"]


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (done("end"), "end_turn", None),
        (done("length"), "max_tokens", None),
        (done("stop", stop="END"), "stop_sequence", "END"),
        (done("stop", stop="<|template|>"), "end_turn", None),  # a stop string of the template, not of the request
        (done("cancelled"), "max_tokens", None),
    ],
)
def test_stop_reasons(end: Any, reason: str, sequence: str | None) -> None:
    service = ScriptedService([Started(5, 0), *said("a"), end])
    body = ok(service, PATH, max_tokens=9, messages=USER, stop_sequences=["END"])
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_arguments_that_are_cut_off_are_left_out() -> None:
    service = ScriptedService([Started(5, 0), *called("add", '{"a": [1, '), done("length")])
    body = ok(service, PATH, max_tokens=9, messages=USER, tools=[TOOL])
    assert body["content"][0]["input"] == {}
    assert body["stop_reason"] == "max_tokens"


def test_thoughts_are_omitted_if_asked() -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    steps = [Started(5, 0), *thought("secret"), *said("a"), done()]
    body = ok(ScriptedService(steps), PATH, max_tokens=9, messages=USER, thinking=thinking)
    assert body["content"][0] == {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    assert "secret" not in str(stream(ScriptedService(steps), PATH, max_tokens=9, messages=USER, thinking=thinking))


def test_the_tokens_of_a_prompt() -> None:
    service = ScriptedService()
    assert ok(service, PATH + "/count_tokens", messages=USER, system="Be short.") == {"input_tokens": 44}
    assert service.asked[-1].messages[0]["role"] == "system"


def test_errors_have_anthropics_shape() -> None:
    status, error = refusal(ScriptedService(), PATH, messages=[])
    assert (status, error["type"]) == (400, "invalid_request_error")
    response = send(ScriptedService(), PATH, {"max_tokens": 9})
    assert response.json()["type"] == "error"


def test_a_thread_is_refused_so_that_the_client_sends_the_whole_conversation() -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        service = ScriptedService()
        status, error = refusal(service, PATH, max_tokens=9, messages=USER, thread=thread)
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert not service.asked


def test_an_error_within_a_stream_is_an_event() -> None:
    service = ScriptedService([Started(5, 0), *said("a"), LocalLLMError("the schema is wrong")])
    name, data = stream(service, PATH, max_tokens=9, messages=USER)[-1]
    assert name == "error"
    assert data == {"type": "error", "error": {"type": "invalid_request_error", "message": "the schema is wrong"}}
    assert service.closed == 1


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
