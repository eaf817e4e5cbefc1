"""/v1/chat/completions: the exact objects of a whole answer, and the order and format of a stream's chunks.

The formats follow OpenAI's reference (chat completion object, chunk object) and llama.cpp's server tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from localllm.generation.parts import Content
from localllm.generation.request import Prefilled, Started
from localllm.server.errors import BadRequest
from localllm.server.openai.chunks import ChatWriter
from localllm.server.openai.generation import GenerationBody
from localllm.server.openai.head import new_head
from localllm.server.turn import Turn
from tests.localllm.server.openai.support import USER, chunks, ok, send
from tests.localllm.server.scripted import ScriptedService, Step, called, done, likely, said, script, thought, wrote

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CHUNK = {"id", "object", "created", "model", "system_fingerprint", "choices"}


def deltas(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in found if chunk["choices"]]


def thinking_call() -> list[Step]:
    return [
        Started(20, 12),
        Prefilled(20),
        *thought("I ", "add"),
        *said("Now:"),
        *called("add", '{"a":', "1}", id="call_a"),
        *called("add", '{"a":2}', index=1, id="call_b"),
        done("tool_calls", 20, 12, answer_tokens=8),
    ]


# -- whole answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [PATH, "/chat/completions"])
def test_a_whole_answer(path: str) -> None:
    service = ScriptedService(script("Hel", "lo"))
    body = ok(service, path, messages=USER, model="gpt-4o")
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["created"] > 1_700_000_000
    assert body["model"] == "tiny"
    assert body["system_fingerprint"].startswith("b")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["timings"]["prompt_n"] + body["timings"]["cache_n"] == 5
    assert body["timings"]["prompt_ms"] == pytest.approx(10)
    assert body["timings"]["prompt_per_second"] == pytest.approx(300)
    assert body["timings"]["predicted_n"] == 2
    assert body["timings"]["predicted_per_second"] == pytest.approx(50)  # 20 ms between the two tokens
    assert service.closed == 1


def test_thoughts_and_calls() -> None:
    body = ok(ScriptedService(thinking_call()), PATH, messages=USER, tools=TOOLS)
    assert body["choices"][0] == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "Now:",
            "refusal": None,
            "reasoning_content": "I add",
            "tool_calls": [
                {"id": "call_a", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                {"id": "call_b", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}},
            ],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
    }
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_content_is_null_beside_calls_and_empty_arguments_are_an_object() -> None:
    service = ScriptedService([Started(5, 0), *called("add"), done("tool_calls")])
    message = ok(service, PATH, messages=USER, tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


def test_an_empty_answer_has_empty_content() -> None:
    message = ok(ScriptedService([Started(5, 0), done(answer_tokens=0)]), PATH, messages=USER)["choices"][0]["message"]
    assert message["content"] == ""


@pytest.mark.parametrize(
    ("reason", "expected"), [("end", "stop"), ("stop", "stop"), ("length", "length"), ("cancelled", "length")]
)
def test_finish_reasons(reason: Any, expected: str) -> None:
    assert (
        ok(ScriptedService(script("x", reason=reason)), PATH, messages=USER)["choices"][0]["finish_reason"] == expected
    )


def test_functions_are_answered_with_a_function_call() -> None:
    steps = [Started(5, 0), *called("add", "{}"), done("tool_calls")]
    body = ok(ScriptedService(steps), PATH, messages=USER, functions=[TOOLS[0]["function"]])
    choice = body["choices"][0]
    assert choice["message"]["function_call"] == {"name": "add", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    found = chunks(ScriptedService(steps), PATH, messages=USER, functions=[TOOLS[0]["function"]])
    assert deltas(found)[1:3] == [
        {"function_call": {"name": "add", "arguments": ""}},
        {"function_call": {"arguments": "{}"}},
    ]
    assert found[-1]["choices"][0]["finish_reason"] == "function_call"


def two_answers(turn: Any) -> list[Step]:
    assert isinstance(turn, Turn)
    assert turn.generation.n == 2
    return [
        Started(5, 2),
        Started(5, 5, choice=1),
        *said("b", choice=1),
        *said("a"),
        done(answer_tokens=1),
        done("length", reused=5, answer_tokens=1, choice=1),
    ]


def test_several_answers_count_their_prompt_once() -> None:
    body = ok(ScriptedService(two_answers), PATH, messages=USER, n=2)
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [(0, "a"), (1, "b")]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 2)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


# -- streams ---------------------------------------------------------------------------------------------------------


def test_the_chunks_of_a_stream() -> None:
    found = chunks(ScriptedService(thinking_call()), PATH, messages=USER, tools=TOOLS)
    for chunk in found:
        assert set(chunk) - {"timings"} == CHUNK
        assert chunk["object"] == "chat.completion.chunk"
        assert set(chunk["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in found}) == 1
    assert deltas(found) == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "I "},
        {"reasoning_content": "add"},
        {"content": "Now:"},
        {
            "tool_calls": [
                {"index": 0, "id": "call_a", "type": "function", "function": {"name": "add", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call_b", "type": "function", "function": {"name": "add", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": '{"a":2}'}}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None] * 9 + ["tool_calls"]
    assert "timings" in found[-1]
    assert not any("timings" in chunk or "usage" in chunk for chunk in found[:-1])


def test_usage_is_a_chunk_of_its_own_if_it_is_wanted() -> None:
    found = chunks(ScriptedService(script("a", "b")), PATH, messages=USER, stream_options={"include_usage": True})
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["total_tokens"] == 7
    assert found[-1]["timings"]["predicted_n"] == 2
    assert all(chunk["usage"] is None for chunk in found[:-1])
    assert found[-2]["choices"][0]["finish_reason"] == "stop"


def test_timings_of_each_token() -> None:
    found = chunks(ScriptedService(script("a", "b")), PATH, messages=USER, timings_per_token=True)
    assert "timings" not in found[0]
    assert [chunk["timings"]["predicted_n"] for chunk in found[1:]] == [1, 2, 2]
    assert found[1]["timings"]["cache_n"] == 2


@pytest.mark.parametrize(("progress", "expected"), [(False, [0, 0, 2, 1]), (True, [1, 1, 1, 1])])
def test_the_first_chunk_comes_with_the_first_token(progress: bool, expected: list[int]) -> None:
    stream = ChatWriter(new_head("x", "tiny"), 1, GenerationBody(return_progress=progress))
    made = [list(stream.events(event)) for event in (Started(5, 0), Prefilled(5), *said("a"), done())]
    assert [len(chunks) for chunks in made] == expected
    first = made[0 if progress else 2][0]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}


def test_a_prompt_that_fails_has_its_status() -> None:
    service = ScriptedService([Started(5, 0), Prefilled(3), BadRequest("no room")])
    response = send(service, PATH, {"messages": USER, "stream": True})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "no room")


def test_progress_with_the_prompt() -> None:
    steps = [Started(100, 20), Prefilled(64), Prefilled(100), *said("a"), done()]
    found = chunks(ScriptedService(steps), PATH, messages=USER, return_progress=True)
    progress = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
    assert [(each["total"], each["cache"], each["processed"]) for each in progress] == [
        (100, 20, 20),
        (100, 20, 64),
        (100, 20, 100),
    ]
    assert deltas(found)[:3] == [{"role": "assistant", "content": None}, {}, {}]


def test_several_answers_in_one_stream() -> None:
    found = chunks(ScriptedService(two_answers), PATH, messages=USER, n=2)
    assert [chunk["choices"][0]["index"] for chunk in found] == [1, 1, 0, 0, 0, 1]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found[-2:]] == ["stop", "length"]


# -- log-probabilities -----------------------------------------------------------------------------------------------


def with_logprobs() -> list[Step]:
    """Return an answer of three tokens with log-probabilities: two that form one character (bytes 0xC3 0xBC), and one
    whose text is held back as a possible stop string.
    """
    return [
        Started(5, 0),
        wrote((), 0xC3, likely(0xC3, -0.5, ((0xC3, -0.5), (65, -1.0)))),
        wrote((Content("ü"),), 0xBC, likely(0xBC, -0.25, ((0xBC, -0.25), (66, float("-inf"))))),
        wrote((), 67, likely(67, -2.0, ())),
        done(answer_tokens=3),
    ]


ENTRIES = [
    {
        "id": 0xC3,
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [
            {"id": 0xC3, "token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]},
            {"id": 65, "token": "A", "logprob": -1.0, "bytes": [65]},
        ],
    },
    {
        "id": 0xBC,
        "token": "\ufffd",
        "logprob": -0.25,
        "bytes": [0xBC],
        "top_logprobs": [
            {"id": 0xBC, "token": "\ufffd", "logprob": -0.25, "bytes": [0xBC]},
            {"id": 66, "token": "B", "logprob": -9999.0, "bytes": [66]},
        ],
    },
    {"id": 67, "token": "C", "logprob": -2.0, "bytes": [67], "top_logprobs": []},
]


def test_logprobs_of_a_whole_answer() -> None:
    body = ok(ScriptedService(with_logprobs()), PATH, messages=USER, logprobs=True, top_logprobs=2)
    assert body["choices"][0]["logprobs"] == {"content": ENTRIES, "refusal": None}


def test_logprobs_of_a_stream_come_with_the_text_that_their_tokens_complete() -> None:
    found = chunks(ScriptedService(with_logprobs()), PATH, messages=USER, logprobs=True, top_logprobs=2)
    shown = [(chunk["choices"][0]["delta"], chunk["choices"][0]["logprobs"]) for chunk in found]
    assert shown == [
        ({"role": "assistant", "content": None}, None),
        ({"content": "ü"}, {"content": ENTRIES[:2], "refusal": None}),
        ({"content": ""}, {"content": ENTRIES[2:], "refusal": None}),
        ({}, None),
    ]
