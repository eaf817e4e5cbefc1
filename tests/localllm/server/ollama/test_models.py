"""Ollama's /api/tags, /api/show, /api/ps, /api/version and /api/embed, and unsupported routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from localllm.server.errors import PromptTooLong
from localllm.server.ollama.reply import human
from tests.localllm.server.calls import call, lines
from tests.localllm.server.scripted import Model, ScriptedModel, ScriptedService

DETAILS = {
    "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"], "parameter_size": "1M",
    "quantization_level": "Q4_K_M", "context_length": 8192, "embedding_length": 64,
}  # fmt: skip


def test_tags() -> None:
    service = ScriptedService(all_models=[Model(), Model("b:7b", state="unloaded")])
    first, second = call(service, "/api/tags").json()["models"]
    assert first == {
        "name": "tiny:latest", "model": "tiny:latest", "modified_at": "2023-11-14T22:13:20Z", "size": 600_000,
        "digest": "0123456789abcdef" * 4, "details": DETAILS,
    }  # fmt: skip
    assert second["name"] == "b:7b"


def test_ps() -> None:
    service = ScriptedService(all_models=[Model(), Model("b", state="unloaded")])
    models = call(service, "/api/ps").json()["models"]
    assert [each["name"] for each in models] == ["tiny:latest"]
    assert models[0].keys() == {
        "name", "model", "size", "digest", "details", "expires_at", "size_vram", "context_length",
    }  # fmt: skip
    assert models[0]["context_length"] == 4096


@pytest.mark.parametrize("body", [{"model": "tiny"}, {"name": "tiny:latest"}, {"model": "tiny", "verbose": True}])
def test_show(body: Any) -> None:
    found = call(ScriptedService(), "/api/show", body).json()
    assert found["details"] == DETAILS
    assert found["capabilities"] == ["completion", "tools", "insert", "embedding", "thinking"]
    assert found["model_info"]["general.architecture"] == "llama"
    assert found["model_info"]["general.parameter_count"] == 1_000_000
    assert found["model_info"]["llama.context_length"] == 8192
    assert found["model_info"]["llama.embedding_length"] == 64
    assert "FROM tiny.gguf\n" in found["modelfile"]
    assert found["template"].startswith("{% for m in messages %}")


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (999, "999"), (1500, "2K"), (1_000_000, "1M"), (22_565_376, "22.57M"), (10**9, "1B"),
     (7_615_616_512, "7.6B"), (8_030_261_248, "8.0B")],
)  # fmt: skip
def test_numbers_as_ollama_writes_them(count: int, shown: str) -> None:
    assert human(count) == shown


def test_probes() -> None:
    response = call(ScriptedService(), "/")
    assert (response.text, response.headers["content-type"]) == ("Ollama is running", "text/plain; charset=utf-8")
    version = call(ScriptedService(), "/api/version").json()
    assert version.keys() == {"version"}
    assert [part.isdigit() for part in version["version"].split(".")] == [True] * 3
    for path in ("/", "/api/version", "/api/tags"):
        assert call(ScriptedService(), path, method="HEAD").status_code == 200


def test_pull() -> None:
    assert lines(call(ScriptedService(), "/api/pull", {"model": "tiny"})) == [{"status": "success"}]
    assert call(ScriptedService(), "/api/pull", {"name": "tiny:latest", "stream": False}).json() == {
        "status": "success"
    }
    response = call(ScriptedService(), "/api/pull", {"model": "llama3"})
    assert (response.status_code, "`localllm serve` without MODEL" in response.json()["error"]) == (501, True)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/create"), ("POST", "/api/copy"), ("POST", "/api/push"), ("DELETE", "/api/delete"),
     ("POST", "/api/blobs/sha256:00")],
)  # fmt: skip
@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "x"}'])
def test_what_is_not_done(method: str, path: str, body: bytes) -> None:
    response = call(ScriptedService(), path, body, method=method)
    assert response.status_code == 501
    assert response.json().keys() == {"error"}


def test_blobs_are_not_here() -> None:
    assert call(ScriptedService(), "/api/blobs/sha256:00", method="HEAD").status_code == 404


# -- embeddings ------------------------------------------------------------------------------------------------------


def test_embed() -> None:
    body = call(ScriptedService(), "/api/embed", {"model": "tiny", "input": "ab"}).json()
    assert body.keys() == {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
    assert body["embeddings"] == [[1.0, 0.0, 0.5]]
    assert body["prompt_eval_count"] == 3
    assert len(call(ScriptedService(), "/api/embed", {"input": ["ab", "c", ""]}).json()["embeddings"]) == 3
    for empty in ({}, {"input": ""}, {"input": []}, {"input": None}):
        assert call(ScriptedService(), "/api/embed", empty).json()["embeddings"] == []


def test_dimensions() -> None:
    body = call(ScriptedService(), "/api/embed", {"input": ["ab", "c"], "dimensions": 1}).json()
    assert body["embeddings"] == [[1.0], [0.0]]
    assert call(ScriptedService(), "/api/embed", {"input": "ab", "dimensions": 9}).json()["embeddings"] == [
        [1.0, 0, 0.5]
    ]


def test_long_inputs_are_cut_unless_told_otherwise() -> None:
    service = ScriptedService(all_models=[Model(context=4)])
    body = call(service, "/api/embed", {"input": "abcdefgh"}).json()
    assert body["prompt_eval_count"] == 4
    response = call(service, "/api/embed", {"input": "abcdefgh", "truncate": False})
    assert (response.status_code, response.json()["error"]) == (400, "the input length exceeds the context length")


def test_a_long_text_that_begins_with_long_characters_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ScriptedModel.tokenize

    async def tokenize(self: ScriptedModel, texts: Sequence[str], *special: bool) -> list[list[int]]:
        """Reject texts of more than 8 bytes without tokenizing them."""
        if (count := -(-len(texts[0].encode()) // 2)) > 4:
            raise PromptTooLong("too long", count, 4)
        return await real(self, texts, *special)

    monkeypatch.setattr(ScriptedModel, "tokenize", tokenize)
    service = ScriptedService(all_models=[Model(context=4)])
    response = call(service, "/api/embed", {"input": "\U0001f600" * 4 + "a" * 16})
    assert (response.status_code, response.json().get("prompt_eval_count")) == (200, 4)


def test_special_tokens_of_texts_are_text() -> None:
    assert call(ScriptedService(), "/api/embed", {"input": "<s>"}).json()["prompt_eval_count"] == 4


def test_embeddings() -> None:
    assert call(ScriptedService(), "/api/embeddings", {"prompt": "ab"}).json() == {"embedding": [1.0, 0.0, 0.5]}
    assert call(ScriptedService(), "/api/embeddings", {"prompt": ""}).json() == {"embedding": []}


@pytest.mark.parametrize(
    "body",
    [{"input": 5}, {"input": [5]}, {"input": {}}, {"input": "x", "dimensions": -1}, {"input": "x", "options": 5}],
)
def test_bad_inputs_are_refused(body: Any) -> None:
    assert call(ScriptedService(), "/api/embed", body).status_code == 400


def test_models_that_make_none() -> None:
    service = ScriptedService(all_models=[Model(capabilities=("rerank",))])
    for path, body in (("/api/embed", {"input": "x"}), ("/api/embeddings", {"prompt": "x"})):
        assert call(service, path, body).status_code == 400
    encoder = ScriptedService(all_models=[Model(capabilities=("embedding",))])
    response = call(encoder, "/api/chat", {"messages": [{"role": "user", "content": "x"}]})
    assert (response.status_code, response.json()["error"]) == (400, '"tiny" does not support generate')
