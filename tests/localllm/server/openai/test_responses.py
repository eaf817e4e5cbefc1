"""/v1/responses: the whole object, and the event order of a stream as in OpenAI's reference."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.base.errors import LocalLLMError
from localllm.generation.request import Prefilled, Started
from tests.localllm.server.openai.support import ok, refusal, send, stream
from tests.localllm.server.scripted import (
    Content,
    ScriptedService,
    Step,
    called,
    done,
    likely,
    said,
    script,
    thought,
    wrote,
)

PATH = "/v1/responses"
ADD = {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
FILES = {
    "type": "namespace",
    "name": "files",
    "description": "d",
    "tools": [{"type": "function", "name": "read", "parameters": None}, {"type": "custom", "name": "write"}],
}


def everything() -> list[Step]:
    return [
        Started(20, 12),
        Prefilled(20),
        *thought("I ", "add"),
        *said("No", "w"),
        *called("add", '{"a":', "1}", id="c1"),
        *called("apply_patch", '{"inp', 'ut": "x\\n"}', index=1, id="c2"),
        done("tool_calls", 20, 12, answer_tokens=9),
    ]


def test_a_whole_response() -> None:
    body = ok(ScriptedService(everything()), PATH, input="Hi", tools=[ADD, PATCH], metadata={"a": "b"}, user="u")
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["model"], body["error"]) == ("response", "completed", "tiny", None)
    ids = [item.pop("id") for item in body["output"]]
    assert [id.partition("_")[0] for id in ids] == ["rs", "msg", "fc", "ctc"]
    assert body["output"] == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "encrypted_content": None,
            "content": [{"type": "reasoning_text", "text": "I add"}],
        },
        {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Now", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "status": "completed", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
        {"type": "custom_tool_call", "status": "completed", "call_id": "c2", "name": "apply_patch", "input": "x\n"},
    ]
    assert body["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 12, "cache_write_tokens": 8},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 29,
    }
    assert (body["tools"], body["metadata"], body["user"]) == ([ADD, PATCH], {"a": "b"}, "u")
    assert (body["tool_choice"], body["store"], body["previous_response_id"]) == ("auto", False, None)


def test_the_events_of_a_stream() -> None:
    events = stream(ScriptedService(everything()), PATH, input="Hi", tools=[ADD, PATCH])
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [name.removeprefix("response.") for name, _ in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    created, completed = events[0][1]["response"], events[-1][1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert created["id"] == completed["id"]
    assert completed["status"] == "completed"
    added = [data for name, data in events if name == "response.output_item.added"]
    ended = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [data["output_index"] for data in added] == [0, 1, 2, 3]
    assert [data["item"]["status"] for data in added] == ["in_progress"] * 4
    assert [data["item"]["id"] for data in added] == [item["id"] for item in ended]
    assert ended == completed["output"]
    within = [data for _, data in events if "item_id" in data]
    assert all(data["item_id"] == added[data["output_index"]]["item"]["id"] for data in within)
    assert events[10][1]["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert events[11][1]["delta"] + events[12][1]["delta"] == events[13][1]["text"] == "Now"


def test_a_tool_of_a_namespace_has_its_own_name() -> None:
    steps = [Started(5, 0), *called("files__read", "{}"), *called("files__write", "plain", index=1), done("tool_calls")]
    first, second = ok(ScriptedService(steps), PATH, input="Hi", tools=[FILES])["output"]
    assert (first["namespace"], first["name"], first["type"]) == ("files", "read", "function_call")
    assert (second["namespace"], second["name"], second["input"]) == ("files", "write", "plain")


@pytest.mark.parametrize("written", ["[1]", '{"input": 5}', '{"other": 1}', "{", ""])
def test_a_custom_tool_gets_what_the_model_wrote(written: str) -> None:
    steps = [Started(5, 0), *called("apply_patch", written), done("tool_calls")]
    (item,) = ok(ScriptedService(steps), PATH, input="Hi", tools=[PATCH])["output"]
    assert item["input"] == {'{"input": 5}': "5"}.get(written, written)


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    service = ScriptedService(script("a", reason="length"))
    body = ok(service, PATH, input="Hi", max_output_tokens=1)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    name, data = stream(service, PATH, input="Hi")[-1]
    assert name == "response.incomplete"
    assert data["response"]["usage"]["output_tokens"] == 1


def test_an_error_within_a_stream_fails_the_response() -> None:
    service = ScriptedService([Started(5, 0), *said("a"), LocalLLMError("the schema is wrong")])
    name, data = stream(service, PATH, input="Hi")[-1]
    assert name == "response.failed"
    assert data["response"]["status"] == "failed"
    assert data["response"]["error"] == {"code": "invalid_prompt", "message": "the schema is wrong"}
    assert service.closed == 1
    assert send(ScriptedService([LocalLLMError("no")]), PATH, {"input": "Hi", "stream": True}).status_code == 400


@pytest.mark.parametrize("body", [{"input": []}, {"input": ""}, {"input": [], "instructions": "Be short."}])
def test_empty_input_is_answered_without_the_model(body: dict[str, Any]) -> None:
    service = ScriptedService()
    found = ok(service, PATH, **body)
    assert (found["status"], found["output"], found["usage"]["total_tokens"]) == ("completed", [], 0)
    names = [name for name, _ in stream(service, PATH, **body)]
    assert names == ["response.created", "response.in_progress", "response.completed"]
    assert service.asked == []
    assert ok(service, PATH + "/input_tokens", **body)["input_tokens"] == 0


@pytest.mark.parametrize("path", [PATH + "/input_tokens", "/responses/input_tokens"])
def test_the_tokens_of_a_prompt(path: str) -> None:
    assert ok(ScriptedService(), path, input="Hi") == {"object": "response.input_tokens", "input_tokens": 24}


def test_logprobs_come_with_the_text() -> None:
    steps = [
        Started(5, 0),
        *thought("x"),
        wrote((), 65, likely(65, -1.0)),
        wrote((Content("AB"),), 66, likely(66, -2.0, ((66, -2.0),))),
        done(),
    ]
    events = stream(ScriptedService(steps), "/responses", input="Hi", include=["message.output_text.logprobs"])
    (delta,) = [data for name, data in events if name == "response.output_text.delta"]
    assert [(each["token"], each["logprob"]) for each in delta["logprobs"]] == [("A", -1.0), ("B", -2.0)]
    assert events[-1][1]["response"]["output"][1]["content"][0]["logprobs"] == delta["logprobs"]


def test_timings_and_progress_of_llamacpp() -> None:
    steps = [Started(100, 20), Prefilled(64), Prefilled(100), *said("a", "b"), done()]
    events = stream(ScriptedService(steps), PATH, input="Hi", timings_per_token=True, return_progress=True)
    progress = [data["prompt_progress"]["processed"] for _, data in events if "prompt_progress" in data]
    assert progress == [20, 64, 100]
    assert [data["timings"]["predicted_n"] for name, data in events if name.endswith("text.delta")] == [1, 2]
    assert "prompt_per_second" in events[-1][1]["timings"]


def test_refusals_name_the_field() -> None:
    status, error = refusal(ScriptedService(), PATH, input="Hi", previous_response_id="resp_1")
    assert (status, error["param"], error["type"]) == (400, "previous_response_id", "invalid_request_error")
