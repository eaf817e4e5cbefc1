"""Chat completions: model names, biases, failures, and the first chunk of a stream."""

from __future__ import annotations

import pytest

from localllm.engine import ContextFull
from localllm.generation.request import Prefilled, Started
from localllm.server.openai.chunks import ChatWriter
from localllm.server.openai.generation import GenerationBody
from localllm.server.openai.head import new_head
from tests.localllm.server.openai.support import USER, ok, refusal, send
from tests.localllm.server.scripted import Model, ScriptedService, done, said

PATH = "/v1/chat/completions"


def test_an_answer_is_closed_when_it_fails_and_another_error_is_not_told() -> None:
    service = ScriptedService([Started(5, 0), ValueError("a secret")])
    response = send(service, PATH, {"messages": USER})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert service.closed == 1


def test_one_model_has_every_name_and_several_have_theirs() -> None:
    assert ok(ScriptedService(), PATH, messages=USER, model="gpt-9")["model"] == "tiny"
    two = ScriptedService(all_models=[Model("a"), Model("b")])
    assert ok(two, PATH, messages=USER, model="b")["model"] == "b"
    status, error = refusal(ScriptedService(all_models=[Model("a"), Model("b")]), PATH, messages=USER, model="c")
    assert (status, error["type"]) == (404, "not_found_error")


def test_biases_of_texts_reach_the_service() -> None:
    service = ScriptedService()
    ok(service, PATH, messages=USER, logit_bias=[["a", False]])
    assert service.asked[-1].generation.biases == {"a": float("-inf")}


def test_a_full_context_is_a_length() -> None:
    response = send(ScriptedService([ContextFull("no room")]), PATH, {"messages": USER})
    assert response.status_code == 400


@pytest.mark.parametrize(("progress", "expected"), [(False, [0, 0, 2, 1]), (True, [1, 1, 1, 1])])
def test_the_first_chunk_comes_with_the_first_token(progress: bool, expected: list[int]) -> None:
    stream = ChatWriter(new_head("x", "tiny"), 1, GenerationBody(return_progress=progress))
    made = [list(stream.events(event)) for event in (Started(5, 0), Prefilled(5), *said("a"), done())]
    assert [len(chunks) for chunks in made] == expected
    first = made[0 if progress else 2][0]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
