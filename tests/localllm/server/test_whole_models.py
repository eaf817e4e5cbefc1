"""The whole server with several models, or with a model that embeds texts."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.generation.interfaces import SchedulerLimits
from localllm.server.catalogue import folder_of, models_in, only
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from tests.localllm.server.whole import DEMO, client, opened
from tests.localllm.test_embedding import write_embedder


def test_models_are_loaded_when_they_are_asked_for_and_unloaded_by_age(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "deep/c.gguf", "mmproj-x.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(DEMO, tmp_path / name)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    assert [model.name for model in models_in(tmp_path)] == ["a", "b", "broken", "deep/c"]

    async def run() -> None:
        with opened(DEMO, ctx_size=64) as one:
            need = one.bytes
        assert need > DEMO.stat().st_size  # includes the KV cache
        registry = ModelRegistry(folder_of(tmp_path), lambda path: opened(path, ctx_size=64), memory=2 * need)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        async with client(registry) as http:
            for name in ("a", "b", "deep/c"):
                answer = await http.post("/v1/chat/completions", json={**body, "model": name})
                assert answer.json()["model"] == name
            states = {info.id: info.state for info in registry.infos}
            assert states == {"a": "unloaded", "b": "loaded", "deep/c": "loaded", "broken": "failed"}
            assert set(Service(registry).loads()) == {"b", "deep/c"}
            assert (await http.post("/v1/chat/completions", json={**body, "model": "x"})).status_code == 404
            broken = await http.post("/v1/chat/completions", json={**body, "model": "broken"})
            assert broken.status_code == 503
            assert str(tmp_path) not in broken.text
            listed = (await http.get("/v1/models")).json()
            assert {model["id"] for model in listed["data"]} == set(states)

    asyncio.run(run())


def test_a_model_that_does_not_fit_with_its_cache_is_refused_and_freed() -> None:
    loaded: list[Served] = []

    def load(path: Path) -> Served:
        loaded.append(opened(path, ctx_size=64))
        return loaded[-1]

    async def run() -> None:
        registry = ModelRegistry(only("demo", DEMO), load, memory=DEMO.stat().st_size + 1000)
        with pytest.raises(LocalLLMError, match=r"demo needs \d+ MiB, the server may use \d MiB .* smaller context"):
            await registry.load("demo")
        assert [info.state for info in registry.infos] == ["failed"]
        assert registry.loaded("demo") is None

    asyncio.run(run())
    assert len(loaded) == 1
    with pytest.raises(LocalLLMError, match="closed"):
        loaded[0].model.logits([1])


def test_links_out_of_a_folder_of_models_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "models"
    (folder / "below").mkdir(parents=True)
    shutil.copy(DEMO, folder / "below" / "a.gguf")
    (folder / "b.gguf").symlink_to("below/a.gguf")
    (folder / "out.gguf").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe.gguf")
    registry = ModelRegistry(folder_of(folder), opened)
    assert [info.id for info in registry.infos] == ["b", "below/a"]
    assert "out is skipped: it is a link to a file outside" in caplog.text


def test_a_folder_without_models_is_told(tmp_path: Path) -> None:
    with pytest.raises(LocalLLMError, match="no GGUF files"):
        folder_of(tmp_path)


def test_a_server_for_embeddings() -> None:
    async def run() -> None:
        vectors = ModelRegistry(
            only("demo", DEMO),
            lambda path: Served(localllm.load(path, backend="cpu", threads=1, embeddings=True), SchedulerLimits()),
            embeds=True,
        )
        async with client(vectors) as http:
            answer = (await http.post("/v1/embeddings", json={"input": ["a cat", "a dog"]})).json()
            assert "\nllamacpp:n_decode_total 1.0\n" in (await http.get("/metrics")).text
        with localllm.load("demo", backend="cpu", threads=1, embeddings=True) as model:
            expected = model.embed(["a cat", "a dog"])
        for found, vector in zip(answer["data"], expected, strict=True):
            assert found["embedding"] == pytest.approx(vector.tolist(), abs=1e-6)

    asyncio.run(run())


def test_vectors_of_tokens_and_of_any_length() -> None:
    def load(path: Path) -> Served:
        return Served(localllm.load(path, backend="cpu", threads=1, embeddings=True), SchedulerLimits())

    async def run() -> None:
        with localllm.load("demo", backend="cpu", threads=1, embeddings=True) as model:
            long, rows = model.embed("a cat", normalize=False), model.token_embeddings("a cat")
        for settings, body, expected in (
            (ServerSettings(), {"embd_normalize": -1}, [long.tolist()]),
            (ServerSettings(pooling="none"), {}, rows.tolist()),
        ):
            registry = ModelRegistry(only("demo", DEMO), load, embeds=True)
            async with client(registry, settings) as http:
                [found] = (await http.post("/embedding", json={"content": "a cat", **body})).json()
            assert len(found["embedding"]) == len(expected)
            for ours, theirs in zip(found["embedding"], expected, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-6)

    asyncio.run(run())


def test_a_query_counts_with_each_document(tmp_path: Path) -> None:
    path = write_embedder(tmp_path / "rank.gguf", "bert-rank")

    async def run() -> None:
        registry = ModelRegistry(only("rank", path), lambda path: Served(localllm.load(path), SchedulerLimits()))
        async with client(registry) as http:
            await registry.load("rank")
            texts = {"query": "ab", "documents": ["c", "def"]}
            answer = (await http.post("/v1/rerank", json=texts)).json()
            # [CLS] a b [SEP] c [SEP] and [CLS] a b [SEP] d e f [SEP]
            assert answer["usage"] == {"prompt_tokens": 6 + 8, "total_tokens": 6 + 8}

    asyncio.run(run())
