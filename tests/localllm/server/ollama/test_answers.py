"""/api/chat and /api/generate in Ollama's format (docs/api.md of Ollama)."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.generation.parts import CallStart, Content
from localllm.generation.request import Started
from localllm.server.settings import ServerSettings
from localllm.server.turn import Completion, Structure, Thinking, Turn
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import Model, ScriptedService, done, script, wrote

USER = [{"role": "user", "content": "why"}]


def chat(steps: Any = None, **body: Any) -> Any:
    service = ScriptedService(script("Hello", " world") if steps is None else steps)
    response = call(service, "/api/chat", {"model": "tiny", "messages": USER, "stream": False} | body)
    assert response.status_code == 200, response.text
    return response.json()


def turn(**body: Any) -> Turn:
    """Return the Turn that the service receives for a chat request."""
    service = ScriptedService(script("a"))
    response = call(service, "/api/chat", {"model": "tiny", "messages": USER, "stream": False} | body)
    assert response.status_code == 200, response.text
    found = service.asked[-1]
    assert isinstance(found, Turn)
    return found


# -- answers ---------------------------------------------------------------------------------------------------------


def test_a_call_between_texts_in_one_event() -> None:
    event = wrote((Content("a"), CallStart(0, "x", "f"), Content("b")), 7)
    message = chat([Started(5, 0), event, done()])["message"]
    assert message["content"] == "ab"
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["f"]


def test_logprobs() -> None:
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


def test_a_model_without_infill_tokens() -> None:
    plain = ScriptedService(all_models=[Model(capabilities=("completion",))])
    response = call(plain, "/api/generate", {"prompt": "a", "suffix": "b"})
    assert (response.status_code, response.json()["error"]) == (400, '"tiny" does not support insert')
