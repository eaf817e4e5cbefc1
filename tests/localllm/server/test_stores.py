"""A server without MODEL: every model on this computer, loaded on demand."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.hub import StoredModel
from localllm.server.catalogue import folder_of
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.settings import ServerSettings
from tests.localllm.hub.hub_server import HubServer
from tests.localllm.hub.stores import ollama_model
from tests.localllm.server.calls import served
from tests.localllm.server.store_site import HELLO, TOY, Site, put
from tests.localllm.server.whole import DEMO, opened

# -- the list --------------------------------------------------------------------------------------------------------


def test_models_of_all_stores_are_listed_and_found_by_the_names_of_list(
    tmp_path: Path, tiny: bytes, hub: HubServer, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, "bob/Own/own-Q4_0.gguf", tiny)
    put(tmp_path, "bob/Two/two-Q4_0.gguf", tiny)
    put(tmp_path, "bob/Two/two-Q8_0.gguf", tiny)
    put(tmp_path, "bob/Broken/broken.gguf", b"GGUF" + b"\xff" * 100)
    manifest = ollama_model(tmp_path, "registry.ollama.ai/library/llama3.2/latest")
    ollama_model(tmp_path, "registry.ollama.ai/library/cut/1", layer={"mediaType": "x", "digest": "y"})
    [layer] = [each for each in json.loads(manifest.read_text())["layers"] if each["mediaType"].endswith("model")]
    (tmp_path / ".ollama/models/blobs" / layer["digest"].replace(":", "-")).write_bytes(tiny)

    async def run() -> None:
        site = Site(tmp_path, hub.url)
        async with site.client() as one:
            found = {model["id"]: model["status"]["value"] for model in (await one.told("/models"))["data"]}
            assert found == {
                "bob/Own:Q4_0": "unloaded", "bob/Two:Q4_0": "unloaded", "bob/Two:Q8_0": "unloaded",
                "bob/Broken": "failed", "llama3.2:latest": "unloaded",
            }  # fmt: skip
            for name in ("bob/Own", "Own", "bob/own", "llama3.2", "llama3.2:latest", "bob/Two:Q8_0", "own-q4_0.gguf"):
                await one.said(name)
            two = await one.told("/v1/chat/completions", 400, model="bob/Two", **HELLO)
            assert "is ambiguous: give one of bob/Two:Q4_0, bob/Two:Q8_0" in two["error"]["message"]
            for wrong in ("nobody/Here", "gpt-4", "../../etc/passwd", "x" * 5000):
                unknown = await one.told("/v1/chat/completions", 404, model=wrong, **HELLO)
                assert "this server has" in unknown["error"]["message"]
            broken = await one.told("/v1/chat/completions", 503, model="bob/Broken", **HELLO)
            assert str(tmp_path) not in broken["error"]["message"]

    asyncio.run(run())
    assert "cut:1 is skipped: has no weights on this computer" in caplog.text
    assert "bob/Broken cannot be read" in caplog.text


def test_a_request_without_a_model_gets_the_default_or_the_only_one(
    tmp_path: Path, tiny: bytes, hub: HubServer
) -> None:
    put(tmp_path, "bob/One/one.gguf", tiny)

    async def run() -> None:
        async with Site(tmp_path, hub.url).client() as one:
            assert (await one.told("/v1/chat/completions", **HELLO))["model"] == "bob/One"
        put(tmp_path, "bob/Two/two.gguf", tiny)
        async with Site(tmp_path, hub.url).client() as one:
            assert "name a model" in (await one.told("/v1/chat/completions", 404, **HELLO))["error"]["message"]
            assert (await one.told("/props"))["role"] == "router"
            await one.said("bob/Two")
            assert (await one.told("/v1/chat/completions", **HELLO))["model"] == "bob/Two"  # the only loaded one
            await one.said("bob/One")
            await one.told("/v1/chat/completions", 404, **HELLO)
        async with Site(tmp_path, hub.url, default="two").client() as one:
            assert (await one.told("/v1/chat/completions", **HELLO))["model"] == "bob/Two"
        async with Site(tmp_path, hub.url, default="gone").client() as one:
            await one.told("/v1/chat/completions", 404, **HELLO)

    asyncio.run(run())


def test_the_bundled_model_is_listed_if_there_is_no_other(tmp_path: Path, hub: HubServer) -> None:
    async def run() -> None:
        async with Site(tmp_path, hub.url, hidden=StoredModel("demo", "", (DEMO,))).client() as one:
            assert await one.names() == ["demo"]
            refused = await one.told("/api/create", 400, **{"model": "a", "from": "demo"})
            assert "it cannot be a base; pull one" in refused["error"]
            await one.told("/api/copy", 400, source="demo", destination="a")
            await one.pulled(TOY)
            taken = await one.told("/api/copy", 400, source=TOY, destination="demo")
            assert "demo is the name of a model" in taken["error"]
            assert await one.names() == [TOY]
            await one.said("demo")
            assert await one.names() == [TOY, "demo"]

    asyncio.run(run())


def test_the_list_follows_the_files(tmp_path: Path, tiny: bytes, site: Site) -> None:
    async def run() -> None:
        async with site.client() as one:
            assert await one.names() == []
            path = put(tmp_path, "bob/New/new.gguf", tiny)
            assert await one.names() == ["bob/New"]
            await one.said("bob/New")
            path.unlink()  # while it is loaded
            assert await one.names() == []
            await one.told("/v1/chat/completions", 404, model="bob/New", **HELLO)
            async with asyncio.timeout(5):
                while site.registry._residents.left:
                    await asyncio.sleep(0.01)
            put(tmp_path, "bob/New/new.gguf", tiny + b" ")
            await one.said("bob/New")
            assert len(site.loads) == 2

    asyncio.run(run())


def test_a_folder_is_followed_too(tmp_path: Path, tiny: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(tiny)

    async def run() -> None:
        models = ModelRegistry(folder_of(tmp_path), lambda path: opened(path), live=True)
        (tmp_path / "b.gguf").write_bytes(tiny)
        await models.refresh(now=True)
        assert [info.id for info in models.infos] == ["a", "b"]

    asyncio.run(run())


# -- loading ---------------------------------------------------------------------------------------------------------


def test_requests_for_a_model_share_one_load_even_if_the_first_client_leaves(
    tmp_path: Path, tiny: bytes, hub: HubServer
) -> None:
    put(tmp_path, "bob/One/one.gguf", tiny)
    put(tmp_path, "bob/Two/two.gguf", tiny)
    free = threading.Event()

    def load(path: Path) -> Served:
        free.wait(20)
        return opened(path, ctx_size=64)

    async def run() -> None:
        site = Site(tmp_path, hub.url, load=load)
        async with site.client() as one:
            first, second = (asyncio.create_task(one.said("bob/One")) for _ in range(2))
            left = asyncio.create_task(one.said("bob/Two"))
            await asyncio.sleep(0.1)
            assert (await one.told("/models"))["data"][0]["status"]["value"] in ("loading", "unloaded")
            first.cancel()
            left.cancel()
            free.set()
            assert await second
        assert [path.name for path in site.loads] == ["one.gguf"]  # no request waited for the other when its turn came

    asyncio.run(run())


def test_a_model_larger_than_the_memory_is_refused_before_it_is_read(
    tmp_path: Path, tiny: bytes, hub: HubServer
) -> None:
    put(tmp_path, "bob/One/one.gguf", tiny)

    async def run() -> None:
        site = Site(tmp_path, hub.url, memory=1000)
        async with site.client() as one:
            answer = await one.told("/v1/chat/completions", 400, model="bob/One", **HELLO)
            assert "bob/One needs" in answer["error"]["message"]
            assert "\n" not in answer["error"]["message"]
        assert not site.loads

    asyncio.run(run())


@pytest.mark.parametrize(
    "error", [localllm.models.ModelError("unknown architecture"), MemoryError(), ValueError("/secret")]
)
def test_a_model_that_cannot_be_loaded_is_unavailable(
    tmp_path: Path, tiny: bytes, hub: HubServer, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, "bob/One/one.gguf", tiny)

    def load(path: Path) -> Served:
        raise error

    async def run() -> None:
        async with Site(tmp_path, hub.url, load=load).client() as one:
            answer = await one.told("/v1/chat/completions", 503, model="bob/One", **HELLO)
            assert answer["error"]["message"] == "bob/One cannot be loaded; the server's log says why"

    asyncio.run(run())
    assert str(error) in caplog.text


def test_a_stream_goes_on_while_another_model_loads(tmp_path: Path, tiny: bytes, hub: HubServer) -> None:
    put(tmp_path, "bob/One/one.gguf", tiny)
    put(tmp_path, "bob/Two/two.gguf", tiny)
    free = threading.Event()

    def load(path: Path) -> Served:
        if path.name == "two.gguf":
            assert free.wait(20)
        return opened(path, ctx_size=512)

    async def run() -> None:
        async with Site(tmp_path, hub.url, load=load).client() as one:
            await one.said("bob/One")
            other = asyncio.create_task(one.said("bob/Two"))
            answer = await one.told("/v1/completions", model="bob/One", prompt="a", max_tokens=300, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 300
            assert not other.done()
            free.set()
            assert await other

    asyncio.run(run())


def test_the_router_loads_and_unloads(tmp_path: Path, tiny: bytes, hub: HubServer) -> None:
    put(tmp_path, "bob/One/one.gguf", tiny)
    put(tmp_path, "bob/Broken/broken.gguf", b"GGUF")

    async def run() -> None:
        async with Site(tmp_path, hub.url).client() as one:

            async def until(name: str, wanted: str) -> None:
                async with asyncio.timeout(20):
                    while (await one.told(f"/v1/models/{name}"))["status"]["value"] != wanted:
                        await asyncio.sleep(0.01)

            assert await one.told("/models/load", model="bob/One") == {"success": True}
            await until("bob/One", "loaded")
            assert await one.told("/models/unload", model="bob/One") == {"success": True}
            await until("bob/One", "unloaded")
            await one.told("/models/unload", 400, model="bob/One")
            await one.told("/models/load", 404, model="none")
            await one.told("/models/load", model="bob/Broken")
            await until("bob/Broken", "failed")

    asyncio.run(run())


def test_keep_alive(tmp_path: Path, tiny: bytes, hub: HubServer) -> None:
    put(tmp_path, "bob/One/one.gguf", tiny)

    async def run() -> None:
        async with Site(tmp_path, hub.url).client() as one:

            async def loaded() -> list[Any]:
                return list((await one.told("/api/ps"))["models"])

            asked: dict[str, Any] = {"model": "bob/One", "stream": False}
            assert (await one.told("/api/generate", **asked))["done_reason"] == "load"
            [model] = await loaded()
            assert model["expires_at"].startswith("2318")
            assert (await one.told("/api/generate", **asked, keep_alive=0))["done_reason"] == "unload"
            await asyncio.sleep(0.1)
            assert not await loaded()
            await one.told("/api/chat", **asked, keep_alive="1h30m", messages=HELLO["messages"])
            [model] = await loaded()
            assert not model["expires_at"].startswith("2318")
            await one.told("/api/embed", **asked, input="a", keep_alive="10ms")
            await asyncio.sleep(0.3)
            assert not await loaded()
            await one.told("/api/generate", 400, **asked, keep_alive="soon")

    asyncio.run(run())


# -- other APIs ------------------------------------------------------------------------------------------------------


def test_lm_studio_s_api(site: Site) -> None:
    async def run() -> None:
        async with site.client() as one:
            await one.pulled(TOY)
            model = await one.told(f"/api/v0/models/{TOY}")
            assert (model["id"], model["state"], model["type"], model["publisher"]) == (TOY, "not-loaded", "llm", "ann")
            assert "error" in await one.told("/api/v0/models/none", 404)
            answer = await one.told("/api/v0/chat/completions", model=TOY, **HELLO)
            assert answer["stats"]["stop_reason"] in ("eosFound", "maxPredictedTokensReached")
            assert answer["model_info"]["context_length"] == 128
            assert (await one.told("/api/v0/completions", model=TOY, prompt="a", max_tokens=2))["stats"]
            assert len((await one.told("/api/v0/embeddings", model=TOY, input="a"))["data"]) == 1
            assert "message" in (await one.told("/api/v0/chat/completions", 400, model=TOY, messages=[]))["error"]

    asyncio.run(run())


def test_ollama_s_and_openai_s_clients_use_pulled_models(site: Site) -> None:
    ollama, openai = pytest.importorskip("ollama"), pytest.importorskip("openai")
    with served(site.service, ServerSettings(port=0, offer="stores")) as port:
        url = f"http://127.0.0.1:{port}"
        theirs = ollama.Client(host=url, timeout=60)
        assert [part.status for part in theirs.pull("llama3.2:1b", stream=True)][-1] == "success"
        name = "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"
        assert [model.model for model in theirs.list().models] == [name]
        messages = HELLO["messages"]
        said = theirs.chat("llama3.2:1b", messages, options={"temperature": 0, "num_predict": 3}).message.content
        theirs.create("mario", from_="llama3.2:1b", system="You are Mario.")
        assert theirs.show("mario").details.parent_model == name
        vector = theirs.embed("mario", "a").embeddings[0]
        ours = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        assert {model.id for model in ours.models.list()} == {"mario", name}
        answer = ours.chat.completions.create(model="llama3.2:1b", messages=messages, max_tokens=3, temperature=0)
        assert answer.choices[0].message.content == said
        assert ours.embeddings.create(model=name, input="a", encoding_format="float").data[0].embedding == vector
        theirs.copy("mario", "luigi")
        for gone in ("luigi", "mario", "llama3.2:1b"):
            assert theirs.delete(gone).status == "success"
        with pytest.raises(ollama.ResponseError, match="is unknown"):
            theirs.chat("mario", messages)
        assert not theirs.list().models
    site.registry.end()
