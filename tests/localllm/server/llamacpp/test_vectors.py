"""/embedding in llama.cpp's format."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.server.settings import ServerSettings
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import Model, ScriptedService


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_embedding(path: str) -> None:
    body = call(ScriptedService(), path, {"content": "ab"}).json()
    length = 1.25**0.5
    assert body == [{"index": 0, "embedding": [pytest.approx([1 / length, 0, 0.5 / length])]}]


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("string", 1),
        ("", 1),
        ([12, 34], 1),
        ([12, "string", 34], 1),
        (["a", "b"], 2),
        (["a", [12, 34], {"prompt_string": "x"}], 3),
        ({"content": [{"type": "text", "text": "x"}]}, 1),
    ],
)
def test_shapes_of_inputs(given: Any, count: int) -> None:
    body = call(ScriptedService(), "/embeddings", {"input": given}).json()
    assert [each["index"] for each in body] == list(range(count))


@pytest.mark.parametrize(
    ("norm", "expected"), [(0, [32760, 0, 16380]), (1, [2 / 3, 0, 1 / 3]), (3, [0.9614997135, 0, 0.4807498567])]
)
def test_norms(norm: int, expected: list[float]) -> None:
    body = call(ScriptedService(), "/embedding", {"content": "ab", "embd_normalize": norm}).json()
    assert body[0]["embedding"][0] == pytest.approx(expected)


@pytest.mark.parametrize(("norm", "normalized"), [(None, True), (2, True), (-1, False), (3, False)])
def test_only_the_usual_norm_is_the_services(norm: int | None, normalized: bool) -> None:
    service = ScriptedService()
    body = call(service, "/embedding", {"content": "ab", "embd_normalize": norm}).json()
    assert service.normalized == [normalized]
    assert (body[0]["embedding"][0] == [1.0, 0.0, 0.5]) is (norm == -1)


def test_pooling_none_gives_a_vector_for_each_token() -> None:
    settings = ServerSettings(pooling="none")
    body = call(ScriptedService(), "/embedding", {"content": ["abc", "d"]}, settings=settings).json()
    # one vector per token, including BOS
    assert [each["embedding"] for each in body] == [[[4.0, 2.0]] * 4, [[2.0, 2.0]] * 2]
    for path, name in (("/v1/embeddings", "input"), ("/api/embed", "input"), ("/api/embeddings", "prompt")):
        response = call(ScriptedService(), path, {"model": "tiny", name: "abc"}, settings=settings)
        assert response.status_code == 400, path
        assert "use /embeddings" in response.text


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": [[]]},
        {"input": {"content": "string"}},
        {"input": {"content": [{"type": "unknown"}]}},
        {"input": {"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}},
        {"input": {}},
        {"input": 5},
        {"input": "a", "embd_normalize": -2},
        {"input": "a", "encoding_format": "hex"},
    ],
)
def test_bad_embeddings_are_refused(body: Any) -> None:
    assert call(ScriptedService(), "/embedding", body).status_code in (400, 501)


def test_models_that_make_none() -> None:
    service = ScriptedService(all_models=[Model(capabilities=())])
    assert call(service, "/embedding", {"content": "x"}).status_code == 501
    assert call(service, "/rerank", {"query": "x", "documents": ["x"]}).status_code == 501
