"""Failing chat completions, and related features: model names, token counts, the rendered prompt."""

from __future__ import annotations

import pytest

from localllm.base.errors import LocalLLMError
from localllm.engine import ContextFull
from localllm.generation.request import Started
from localllm.server.errors import PromptTooLong
from tests.localllm.server.openai.support import USER, chunks, ok, refusal, send, stream
from tests.localllm.server.scripted import Model, ScriptedService, said

PATH = "/v1/chat/completions"


def test_a_prompt_that_is_too_long_says_so_before_a_stream_begins() -> None:
    error = PromptTooLong("the prompt has 900 tokens; the context has 512", 900, 512)
    for body in ({}, {"stream": True}):
        response = send(ScriptedService([error]), PATH, {"messages": USER, **body})
        assert response.status_code == 400
        found = response.json()["error"]
        assert (found["type"], found["code"]) == ("exceed_context_size_error", "context_length_exceeded")
        assert (found["n_prompt_tokens"], found["n_ctx"]) == (900, 512)


def test_an_error_within_a_stream_is_its_last_event() -> None:
    service = ScriptedService([Started(5, 0), *said("a"), LocalLLMError("the schema is wrong")])
    events = stream(service, PATH, messages=USER)
    assert events[-1][1]["error"]["message"] == "the schema is wrong"
    assert service.closed == 1


def test_an_answer_is_closed_when_it_fails_and_another_error_is_not_told() -> None:
    service = ScriptedService([Started(5, 0), ValueError("a secret")])
    response = send(service, PATH, {"messages": USER})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert service.closed == 1


def test_refusals_name_the_field() -> None:
    status, error = refusal(ScriptedService(), PATH, messages=[{"role": "user", "content": 5}])
    assert status == 400
    assert error == {
        "message": "messages[0].content: expected a text or a list, got a number",
        "type": "invalid_request_error",
        "param": "messages[0].content",
        "code": None,
    }


def test_one_model_has_every_name_and_several_have_theirs() -> None:
    assert ok(ScriptedService(), PATH, messages=USER, model="gpt-9")["model"] == "tiny"
    two = ScriptedService(all_models=[Model("a"), Model("b")])
    assert ok(two, PATH, messages=USER, model="b")["model"] == "b"
    status, error = refusal(ScriptedService(all_models=[Model("a"), Model("b")]), PATH, messages=USER, model="c")
    assert (status, error["type"]) == (404, "not_found_error")
    assert refusal(ScriptedService(), PATH, messages=USER, model=5)[1]["param"] == "model"


@pytest.mark.parametrize("path", [PATH + "/input_tokens", "/chat/completions/input_tokens"])
def test_the_tokens_of_a_prompt(path: str) -> None:
    assert ok(ScriptedService(), path, messages=USER) == {"object": "response.input_tokens", "input_tokens": 24}


def test_verbose_shows_the_prompt() -> None:
    assert ok(ScriptedService(), PATH, messages=USER, verbose=True)["__verbose"] == {
        "prompt": "<|user|>Hi <|assistant|>",
        "prompt_tokens": 24,
    }
    found = chunks(ScriptedService(), PATH, messages=USER, verbose=True)
    assert ["__verbose" in chunk for chunk in found] == [True, False, False]


def test_biases_of_texts_reach_the_service() -> None:
    service = ScriptedService()
    ok(service, PATH, messages=USER, logit_bias=[["a", False]])
    assert service.asked[-1].generation.biases == {"a": float("-inf")}


def test_a_full_context_is_a_length() -> None:
    response = send(ScriptedService([ContextFull("no room")]), PATH, {"messages": USER})
    assert response.status_code == 400
