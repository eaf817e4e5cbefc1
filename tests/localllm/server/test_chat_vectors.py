"""Vectors from the model that chats."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

import localllm
from localllm.hub import StoredModel
from localllm.server.served import Served
from localllm.server.settings import ServerSettings
from tests.localllm.server.store_site import Site
from tests.localllm.server.whole import DEMO, opened

# -- vectors of the model that chats ---------------------------------------------------------------------------------


def test_the_model_that_chats_gives_the_vectors_of_embed(tmp_path: Path) -> None:
    texts = ["a cat", "Once upon a time there was a dog. " * 20, "x"]
    with localllm.load("demo", backend="cpu", threads=1, embeddings=True) as model:
        expected = model.embed(texts)
        last = model.embed(texts, pooling="last")
        rows = model.token_embeddings("a cat")

    async def run() -> None:
        for pooling, wanted in (("auto", expected), ("last", last)):
            site = Site(tmp_path, "http://127.0.0.1:9", hidden=StoredModel("demo", "", (DEMO,)), load=opened)
            async with site.client(ServerSettings(offer="stores", pooling=pooling)) as one:
                answers = await asyncio.gather(
                    *(one.told("/v1/embeddings", model="demo", input=texts) for _ in range(3)),
                    *(one.said("demo") for _ in range(3)),
                )
                for answer in answers[:3]:
                    found = np.array([each["embedding"] for each in answer["data"]], np.float32)
                    assert np.array_equal(found, wanted)
                assert len(set(answers[3:])) == 1
                assert await one.said("demo") == answers[3]
                ollama = await one.told("/api/embed", model="demo", input=texts)
                assert np.array_equal(np.array(ollama["embeddings"], np.float32), wanted)
                wrong = await one.told("/v1/embeddings", 400, model="demo", input=[[99_999]])
                assert "99999" in wrong["error"]["message"]
                await one.told("/v1/embeddings", 400, model="demo", input="a " * 5000)
            assert len(site.loads) == 1
        site = Site(tmp_path, "http://127.0.0.1:9", hidden=StoredModel("demo", "", (DEMO,)), load=opened)
        async with site.client(ServerSettings(offer="stores", pooling="none")) as one:
            [found] = await one.told("/embedding", model="demo", content="a cat", embd_normalize=-1)
            assert np.array_equal(np.array(found["embedding"], np.float32), rows)

    asyncio.run(run())


def test_vectors_survive_a_preemption(tmp_path: Path) -> None:
    """The cache has room for one and a half contexts, so that long texts preempt each other."""
    with localllm.load("demo", backend="cpu", threads=1, embeddings=True, ctx_size=512) as model:
        texts = [f"{number} was a time " * 60 for number in range(4)]
        expected = model.embed(texts)
        weights = sum(tensor.nbytes for tensor in model.file.tensors.values())
        block = model.executable.memory.cache // model.pool.blocks
    blocks: list[int] = []

    def load(path: Path) -> Served:
        served = opened(path, ctx_size=512, memory=weights + 48 * block)
        blocks.append(served.model.pool.blocks)
        return served

    async def run() -> None:
        site = Site(tmp_path, "http://127.0.0.1:9", hidden=StoredModel("demo", "", (DEMO,)), load=load)
        async with site.client() as one:
            answer = await one.told("/v1/embeddings", model="demo", input=texts)
            found = np.array([each["embedding"] for each in answer["data"]], np.float32)
            assert np.array_equal(found, expected)

    asyncio.run(run())
    assert 16 <= blocks[0] < 32
