"""OpenAI's /v1/models and /v1/embeddings, and reranking."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest

from localllm.options import ServeOptions
from localllm.server.settings import ServerSettings
from tests.localllm.server.calls import call
from tests.localllm.server.openai.support import ok, refusal, send
from tests.localllm.server.scripted import Model, ScriptedService

TWO = [Model("a/b"), Model("c", state="unloaded", parameters=8_030_261_312)]


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_models_are_listed_as_openai_llamacpp_and_anthropic_do(path: str) -> None:
    body = send(ScriptedService(all_models=TWO), path, method="GET").json()
    assert body["object"] == "list"
    assert [(each["id"], each["object"], each["created"]) for each in body["data"]] == [
        ("a/b", "model", 1_700_000_000),
        ("c", "model", 1_700_000_000),
    ]
    assert [each["status"]["value"] for each in body["data"]] == ["loaded", "unloaded"]
    assert body["data"][1]["meta"]["n_params"] == 8_030_261_312
    assert body["data"][0]["meta"]["n_ctx"] == 4096
    assert body["data"][0]["created_at"] == "2023-11-14T22:13:20Z"
    assert (body["first_id"], body["last_id"], body["has_more"]) == ("a/b", "c", False)
    assert [each["model"] for each in body["models"]] == ["a/b", "c"]
    assert body["models"][1]["details"]["parameter_size"] == "8.0B"
    assert body["models"][0]["details"]["quantization_level"] == "Q4_K_M"


def test_names_and_tags_that_the_server_was_started_with() -> None:
    settings = ServerSettings.of(ServeOptions(alias="a/b, other", tags="small,code,small"))
    service = ScriptedService(all_models=[Model("a/b", tokenizer="gpt2")])
    [one] = call(service, "/v1/models", settings=settings).json()["data"]
    assert (one["aliases"], one["tags"], one["meta"]["vocab_type"]) == (["a/b", "other"], ["small", "code"], 2)
    assert call(service, "/v1/models/a/b", settings=settings).json() == one
    assert call(service, "/v1/models/other", settings=settings).json() == one
    assert ServerSettings.of(ServeOptions(alias="a", models="folder")).aliases == ()
    [plain] = send(service, "/v1/models", method="GET").json()["data"]
    assert (plain["aliases"], plain["tags"]) == ([], [])


def test_no_models() -> None:
    body = send(ScriptedService(all_models=[]), "/v1/models", method="GET").json()
    assert (body["data"], body["models"], body["first_id"]) == ([], [], None)


def test_one_model_by_its_name_alone() -> None:
    service = ScriptedService(all_models=TWO)
    assert send(service, "/v1/models/a/b", method="GET").json()["id"] == "a/b"
    response = send(ScriptedService(), "/v1/models/other", method="GET")
    assert response.status_code == 404
    assert "other" in response.json()["error"]["message"]


def test_models_are_listed_as_lm_studio_does() -> None:
    writes = ("completion", "chat", "tools")
    models = [Model("a/b", capabilities=writes), Model("c", state="unloaded", capabilities=("embedding",))]
    first, second = call(ScriptedService(all_models=models), "/api/v0/models").json()["data"]
    assert first == {
        "id": "a/b", "object": "model", "type": "llm", "publisher": "a", "arch": "llama", "compatibility_type": "gguf",
        "quantization": "Q4_K_M", "state": "loaded", "max_context_length": 8192, "loaded_context_length": 4096,
    }  # fmt: skip
    assert (second["type"], second["publisher"], second["state"]) == ("embeddings", "", "not-loaded")
    assert "loaded_context_length" not in second


# -- embeddings ------------------------------------------------------------------------------------------------------

EMBEDDINGS = "/v1/embeddings"


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("", 1),
        ("text", 1),
        (["one", "three"], 2),
        ([12, 34], 1),
        ([12, 34, "text", 56], 1),
        ([[12, 34], [12, "text"]], 2),
        ({"prompt_string": "text"}, 1),
        ({"content": [{"type": "text", "text": "text"}]}, 1),
        (["one", {"prompt_string": "two"}, {"content": [{"type": "text", "text": "three"}]}], 3),
    ],
)
def test_inputs(given: Any, count: int) -> None:
    body = ok(ScriptedService(), EMBEDDINGS, input=given, model="text-embedding-3-small")
    assert body["object"] == "list"
    assert body["model"] == "tiny"
    assert [(each["object"], each["index"]) for each in body["data"]] == [("embedding", n) for n in range(count)]
    assert all(len(each["embedding"]) == 3 for each in body["data"])
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"]


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        5,
        True,
        [True],
        {"content": "string"},
        {"content": [{"type": "unknown"}]},
        {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        {"content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]},
        ["x"] * 2049,
    ],
)
def test_an_input_that_is_none_is_refused(given: Any) -> None:
    status, error = refusal(ScriptedService(), EMBEDDINGS, input=given)
    assert status == 400
    assert error["param"].startswith("input")


def test_base64_is_little_endian_float32() -> None:
    body = ok(ScriptedService(), EMBEDDINGS, input="abc", encoding_format="base64")
    data = base64.b64decode(body["data"][0]["embedding"])
    assert data == np.asarray([1.0, 0.0, 0.5], "<f4").tobytes()


def test_dimensions_cut_a_vector_and_scale_it_to_length_1() -> None:
    (found,) = ok(ScriptedService(), EMBEDDINGS, input="abc", dimensions=2)["data"]
    assert found["embedding"] == [1.0, 0.0]
    assert math.hypot(*found["embedding"]) == pytest.approx(1)
    assert ok(ScriptedService(), EMBEDDINGS, input="ab", dimensions=1)["data"][0]["embedding"] == [0.0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 4}, "dimensions"),
    ],
)
def test_wrong_options_of_embeddings(body: dict[str, Any], param: str) -> None:
    assert refusal(ScriptedService(), EMBEDDINGS, input="x", **body)[1]["param"] == param


# -- reranking -------------------------------------------------------------------------------------------------------

DOCUMENTS = ["a machine", "learning is", "machine learning is", "Paris"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"])
def test_documents_are_ranked(path: str) -> None:
    body = ok(ScriptedService(), path, query="machine learning is", documents=DOCUMENTS)
    assert body["object"] == "list"
    assert body["model"] == "tiny"
    assert ok(ScriptedService(), path, query="x", documents=DOCUMENTS, model="m")["model"] == "m"
    assert body["results"] == [
        {"index": 2, "relevance_score": 3.0},
        {"index": 1, "relevance_score": 2.0},
        {"index": 0, "relevance_score": 1.0},
        {"index": 3, "relevance_score": 0.0},
    ]
    tokens = len("machine learning is") + sum(map(len, DOCUMENTS))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize(("top_n", "count"), [(0, 0), (1, 1), (4, 4), (99, 4), (None, 4)])
def test_the_best_documents_alone(top_n: int | None, count: int) -> None:
    given = [{"text": text} for text in DOCUMENTS]
    body = ok(ScriptedService(), "/rerank", query="Paris", documents=given, top_n=top_n, return_documents=True)
    assert len(body["results"]) == count
    assert [each["document"] for each in body["results"][:1]] == [{"text": "Paris"}][:count]


def test_texts_ask_for_the_shape_of_text_embeddings_inference() -> None:
    response = send(
        ScriptedService(), "/rerank", {"query": "Paris", "texts": DOCUMENTS, "return_text": True, "top_n": 1}
    )
    assert response.json() == [{"index": 3, "score": 1.0, "text": "Paris"}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": DOCUMENTS}, "query"),
        ({"query": 5, "documents": DOCUMENTS}, "query"),
        ({"query": "x"}, "documents"),
        ({"query": "x", "documents": []}, "documents"),
        ({"query": "x", "documents": 123}, "documents"),
        ({"query": "x", "documents": "x"}, "documents"),
        ({"query": ["x"], "documents": ["x"]}, "query"),
        ({"query": "x", "documents": [1]}, "documents[0]"),
        ({"query": "x", "documents": [{"image": "x"}]}, "documents[0].text"),
        ({"query": "x", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "x", "documents": ["a"] * 10_001}, "documents"),
    ],
)
def test_wrong_rankings_are_refused(body: dict[str, Any], param: str) -> None:
    status, error = refusal(ScriptedService(), "/v1/rerank", **body)
    assert (status, error["param"]) == (400, param)
