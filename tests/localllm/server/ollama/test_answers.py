"""/api/chat and /api/generate in Ollama's format (docs/api.md of Ollama)."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import Any

import pytest

from localllm.generation.parts import CallStart, Content
from localllm.generation.request import Started
from localllm.server.settings import ServerSettings
from localllm.server.turn import Completion, Structure, Thinking, Turn
from tests.localllm.server.calls import call, lines
from tests.localllm.server.scripted import Model, ScriptedService, called, done, likely, said, script, thought, wrote

USER = [{"role": "user", "content": "why"}]
TIMES = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


def chat(steps: Any = None, **body: Any) -> Any:
    service = ScriptedService(script("Hello", " world") if steps is None else steps)
    response = call(service, "/api/chat", {"model": "tiny", "messages": USER, "stream": False} | body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(steps: Any, path: str = "/api/chat", **body: Any) -> list[Any]:
    question = {"messages": USER} if path == "/api/chat" else {"prompt": "why"}
    return lines(call(ScriptedService(steps), path, {"model": "tiny"} | question | body))


def turn(**body: Any) -> Turn:
    """Return the Turn that the service receives for a chat request."""
    service = ScriptedService(script("a"))
    response = call(service, "/api/chat", {"model": "tiny", "messages": USER, "stream": False} | body)
    assert response.status_code == 200, response.text
    found = service.asked[-1]
    assert isinstance(found, Turn)
    return found


def refusal(path: str = "/api/chat", **body: Any) -> tuple[int, str]:
    response = call(ScriptedService(), path, {"model": "tiny", "messages": USER, "prompt": "x"} | body)
    assert response.json().keys() == {"error"}
    return response.status_code, response.json()["error"]


# -- answers ---------------------------------------------------------------------------------------------------------


def test_chat() -> None:
    body = chat()
    assert body.keys() == {"model", "created_at", "message", "done", "done_reason"} | TIMES
    assert body["message"] == {"role": "assistant", "content": "Hello world"}
    assert (body["model"], body["done"], body["done_reason"]) == ("tiny", True, "stop")
    assert (body["prompt_eval_count"], body["eval_count"]) == (5, 2)
    assert (body["prompt_eval_duration"], body["eval_duration"]) == (10_000_000, 20_000_000)
    assert all(type(body[name]) is int and body[name] >= 0 for name in TIMES)
    assert body["created_at"].endswith("Z")
    datetime.fromisoformat(body["created_at"])


def test_chat_streams_unless_told_otherwise() -> None:
    found = streamed(script("Hello", "", " world"))
    assert [each["message"] for each in found] == [
        {"role": "assistant", "content": "Hello"},
        {"role": "assistant", "content": " world"},
        {"role": "assistant", "content": ""},
    ]
    assert [each["done"] for each in found] == [False, False, True]
    assert found[0].keys() == {"model", "created_at", "message", "done"}
    assert found[-1].keys() == found[0].keys() | {"done_reason"} | TIMES


def test_generate() -> None:
    service = ScriptedService(script("Hello", " world"))
    body = call(service, "/api/generate", {"model": "tiny", "prompt": "why", "stream": False}).json()
    assert body.keys() == {"model", "created_at", "response", "done", "done_reason", "context"} | TIMES
    assert body["response"] == "Hello world"
    asked = service.asked[-1]
    assert isinstance(asked, Turn)
    assert asked.messages == [{"role": "user", "content": "why"}]
    assert body["context"] == [*b"<|user|>why <|assistant|>", 7, 8]
    found = streamed(script("a", "b"), "/api/generate")
    assert [each["response"] for each in found] == ["a", "b", ""]
    assert found[0].keys() == {"model", "created_at", "response", "done"}


@pytest.mark.parametrize(
    ("reason", "expected"), [("end", "stop"), ("stop", "stop"), ("length", "length"), ("tool_calls", "stop")]
)
def test_why_it_ended(reason: Any, expected: str) -> None:
    assert chat(script("a", reason=reason))["done_reason"] == expected


def test_thinking() -> None:
    steps = [Started(5, 0), *thought("so", "!"), *said("a"), done()]
    assert chat(steps)["message"] == {"role": "assistant", "content": "a", "thinking": "so!"}
    assert [each["message"] for each in streamed(steps)][:3] == [
        {"role": "assistant", "content": "", "thinking": "so"},
        {"role": "assistant", "content": "", "thinking": "!"},
        {"role": "assistant", "content": "a"},
    ]
    generated = streamed(steps, "/api/generate")
    assert [(each["response"], each.get("thinking")) for each in generated][:3] == [("", "so"), ("", "!"), ("a", None)]


def test_calls_of_tools_come_whole_with_an_object() -> None:
    steps = [
        Started(5, 0), *said("ok"), *called("f", '{"a": ', "[1, 2]}", id="x"), *called("g", index=1, id="y"),
        done("tool_calls"),
    ]  # fmt: skip
    calls = [
        {"id": "x", "function": {"index": 0, "name": "f", "arguments": {"a": [1, 2]}}},
        {"id": "y", "function": {"index": 1, "name": "g", "arguments": {}}},
    ]
    body = chat(steps)
    assert body["message"] == {"role": "assistant", "content": "ok", "tool_calls": calls}
    assert body["done_reason"] == "stop"
    found = [each["message"] for each in streamed(steps)]
    assert found == [
        {"role": "assistant", "content": "ok"},
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
        {"role": "assistant", "content": ""},
    ]


def test_a_broken_call_is_text_and_not_lost() -> None:
    steps = [Started(5, 0), *called("f", '{"a": '), done("length")]
    assert chat(steps)["message"] == {"role": "assistant", "content": 'f {"a": '}
    assert streamed(steps)[0]["message"]["content"] == 'f {"a": '


def test_a_call_between_texts_in_one_event() -> None:
    event = wrote((Content("a"), CallStart(0, "x", "f"), Content("b")), 7)
    message = chat([Started(5, 0), event, done()])["message"]
    assert message["content"] == "ab"
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["f"]


def test_errors_in_a_stream_are_lines() -> None:
    from localllm.server.errors import BadRequest

    found = streamed([Started(5, 0), *said("a"), BadRequest("no more")])
    assert found[0]["message"]["content"] == "a"
    assert found[1] == {"error": "no more"}
    early = call(ScriptedService([BadRequest("not at all")]), "/api/chat", {"messages": USER})
    assert (early.status_code, early.json()) == (400, {"error": "not at all"})


def test_logprobs() -> None:
    logprob = likely(97, -0.5, ((97, -0.5), (200, -math.inf)))
    steps = [Started(5, 0), *said("a", logprob=logprob), done()]
    shown = {
        "token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "\ufffd", "logprob": -3.4028234663852886e38, "bytes": [200]},
        ],
    }  # fmt: skip
    assert chat(steps, logprobs=True, top_logprobs=2)["logprobs"] == [shown]
    assert "logprobs" not in chat(steps)
    assert streamed(steps, logprobs=True, top_logprobs=2)[0]["logprobs"] == [shown]
    assert turn(logprobs=True, top_logprobs=2).generation.logprobs == 2
    assert turn(logprobs=True).generation.logprobs == 0
    assert turn(top_logprobs=2).generation.logprobs is None


# -- requests --------------------------------------------------------------------------------------------------------


def test_options() -> None:
    generation = turn(
        options={
            "num_predict": 9, "seed": 3, "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9,
            "repeat_last_n": -1, "repeat_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 2,
            "stop": ["a", "b"], "num_ctx": 9999, "num_gpu": 1, "numa": False, "mirostat": 2, "tfs_z": 1,
            "mirostat_tau": 4, "mirostat_eta": 0.2,
            "penalize_newline": True, "unknown": {},
        }
    ).generation  # fmt: skip
    assert generation.sampling == {
        "seed": 3, "temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9, "repeat_last_n": 4096,
        "repeat_penalty": 1.1, "presence_penalty": 1.0, "frequency_penalty": 2.0, "mirostat": 2, "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
    }  # fmt: skip
    assert generation.max_tokens == 9
    assert generation.stops == ("a", "b")
    assert turn().generation.sampling == {}
    assert turn(options={"num_predict": -1}).generation.max_tokens is None
    assert turn(options=None).generation.max_tokens is None


def test_format() -> None:
    assert turn(format="json").generation.structure == Structure(any_object=True)
    assert turn(format={"type": "object"}).generation.structure == Structure(schema={"type": "object"})
    assert turn(format="").generation.structure is None
    assert turn(format=None).generation.structure is None


def test_think() -> None:
    assert turn().thinking == Thinking()
    assert turn(think=False).thinking == Thinking(enabled=False)
    assert turn(think=True).thinking == Thinking(enabled=True)
    assert turn(think="low").thinking == Thinking(enabled=True, effort="low")
    assert turn(think="max").thinking == Thinking(enabled=True, effort="high")
    plain = ScriptedService(all_models=[Model(capabilities=("completion",))])
    response = call(plain, "/api/chat", {"messages": USER, "think": True})
    assert (response.status_code, response.json()["error"]) == (400, '"tiny" does not support thinking')


def test_messages_have_openais_form() -> None:
    messages = [
        {"role": "System", "content": "s"},
        {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [
            {"function": {"name": "f", "arguments": {"a": 1}}}, {"id": "z", "function": {"name": "g"}}]},
        {"role": "tool", "content": "2", "tool_name": "g"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "?", "tool_call_id": "q"},
        {"role": "user", "content": "u"},
    ]  # fmt: skip
    assert turn(messages=messages).messages == [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [
            {"id": "call_1_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "z", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
        {"role": "tool", "content": "2", "tool_call_id": "z", "name": "g"},
        {"role": "tool", "content": "1", "tool_call_id": "call_1_0", "name": "f"},
        {"role": "tool", "content": "?", "tool_call_id": "q"},
        {"role": "user", "content": "u"},
    ]  # fmt: skip


def test_two_calls_of_one_tool_are_answered_in_order() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    answers = [{"role": "tool", "content": text, "tool_name": "f"} for text in "ab"]
    found = turn(messages=[*USER, {"role": "assistant", "tool_calls": [call, call]}, *answers]).messages
    assert [message["tool_call_id"] for message in found[2:]] == ["call_1_0", "call_1_1"]


def test_the_last_message_of_an_assistant_is_continued() -> None:
    assert turn(messages=[*USER, {"role": "assistant", "content": "be"}]).continued
    assert not turn().continued


def test_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert list(turn(tools=[tool]).tools) == [tool]
    assert list(turn(tools=[{"function": {"name": "f"}}]).tools) == [{"type": "function", "function": {"name": "f"}}]
    plain = ScriptedService(all_models=[Model(capabilities=("completion",))])
    response = call(plain, "/api/chat", {"messages": USER, "tools": [tool]})
    assert (response.status_code, response.json()["error"]) == (400, '"tiny" does not support tools')


def test_generate_with_a_system_message_raw_and_suffix() -> None:
    def asked(**body: Any) -> Any:
        service = ScriptedService(script("a"))
        response = call(service, "/api/generate", {"prompt": "p", "stream": False} | body)
        assert response.status_code == 200, response.text
        assert ("context" in response.json()) == ("raw" not in body and "suffix" not in body)
        return service.asked[-1]

    assert asked(system="s").messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
    raw = asked(raw=True)
    assert isinstance(raw, Completion)
    assert (raw.prompt, raw.suffix) == ("p", None)
    infill = asked(suffix="q")
    assert isinstance(infill, Completion)
    assert (infill.prompt, infill.suffix) == ("p", "q")


def test_context_comes_before_the_prompt() -> None:
    service = ScriptedService(script("a"))
    body = call(service, "/api/generate", {"prompt": "p", "context": [5, 6], "stream": False}).json()
    asked = service.asked[-1]
    assert isinstance(asked, Completion)
    assert asked.prompt == [5, 6, *b"<|user|>p <|assistant|>"]
    assert body["context"] == [*asked.prompt, 7]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_without_a_question_loads_the_model(path: str) -> None:
    service = ScriptedService()
    body = call(service, path, {"model": "tiny"}).json()
    assert (body["done"], body["done_reason"]) == (True, "load")
    assert body["message"] == {"role": "assistant", "content": ""} if path == "/api/chat" else body["response"] == ""
    assert not service.asked
    for zero in (0, "0", "0s", 0.0):
        response = call(service, path, {"model": "tiny", "keep_alive": zero})
        assert (response.status_code, "one fixed model" in response.json()["error"]) == (501, True)
    for alive in (-1, "5m", "1h30m", "-1m", 300, None):
        assert call(service, path, {"model": "tiny", "keep_alive": alive}).status_code == 200


def test_names_with_the_tag_latest() -> None:
    service = ScriptedService(script("a"), all_models=[Model("tiny"), Model("other:7b")])
    for name in ("tiny", "tiny:latest", "other:7b"):
        assert call(service, "/api/chat", {"model": name, "messages": USER}).status_code == 200
        assert service.names[-1] == name.removesuffix(":latest")
    response = call(service, "/api/chat", {"model": "nobody", "messages": USER})
    assert (response.status_code, response.json()) == (404, {"error": "model 'nobody' not found"})


def test_the_servers_limit_holds_where_a_request_has_none() -> None:
    service = ScriptedService(script("a"))
    call(service, "/api/chat", {"messages": USER}, settings=ServerSettings(max_tokens=7))
    assert service.asked[-1].generation.max_tokens == 7


@pytest.mark.parametrize(
    "body",
    [
        {"model": 5}, {"messages": "x"}, {"messages": [5]}, {"messages": [{}]}, {"messages": [{"role": "robot"}]},
        {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, {"tools": "x"}, {"tools": [{"type": "x"}]},
        {"tools": [{"function": {}}]}, {"tools": [{"function": {"name": "f", "parameters": 5}}]}, {"options": []},
        {"options": {"temperature": "x"}}, {"options": {"top_k": 10**300}}, {"options": {"seed": -2}},
        {"options": {"top_p": 3}}, {"options": {"stop": 5}}, {"options": {"repeat_last_n": -2}},
        {"options": {"num_predict": 10**20}}, {"format": "yaml"}, {"format": 5}, {"think": "hard"}, {"think": 5},
        {"stream": "x"}, {"keep_alive": "soon"}, {"keep_alive": True}, {"keep_alive": []}, {"logprobs": 5},
        {"top_logprobs": 21},
    ],
)  # fmt: skip
def test_bad_chats_are_refused(body: dict[str, Any]) -> None:
    status, message = refusal(**body)
    assert status == 400
    assert "\n" not in message


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompt": 5}, 400, "prompt: expected a text"),
        ({"template": "{{ .Prompt }}"}, 501, "template is not supported"),
        ({"raw": True, "system": "s"}, 400, "raw mode does not support"),
        ({"raw": True, "context": [1]}, 400, "raw mode does not support"),
        ({"context": ["x"]}, 400, "context[0]: expected a whole number"),
        ({"images": ["aGk="]}, 400, "images: models here read text only"),
        ({"options": {"mirostat": 3}}, 400, "options.mirostat: is 3: it must be 0, 1 or 2"),
        ({"options": {"tfs_z": 0.5}}, 501, "options.tfs_z is not supported"),
    ],
)
def test_bad_generates_are_refused(body: dict[str, Any], status: int, says: str) -> None:
    found, message = refusal("/api/generate", **body)
    assert found == status
    assert says in message


def test_a_model_without_infill_tokens() -> None:
    plain = ScriptedService(all_models=[Model(capabilities=("completion",))])
    response = call(plain, "/api/generate", {"prompt": "a", "suffix": "b"})
    assert (response.status_code, response.json()["error"]) == (400, '"tiny" does not support insert')


def test_bodies_are_lines_of_json() -> None:
    response = call(ScriptedService(script("é\u2028\n")), "/api/chat", {"messages": USER})
    assert response.headers["content-type"] == "application/x-ndjson"
    first = json.loads(response.content.split(b"\n")[0])
    assert first["message"]["content"] == "é\u2028\n"
