"""A server without MODEL: every model on this computer, loaded on demand, and their changes by clients."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import constants

import localllm
from localllm.hub import StoredModel, derived
from localllm.server import pulls, registry
from localllm.server.app import make_app
from localllm.server.catalogue import folder_of, stores
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.service import Service
from localllm.server.settings import ServerSettings, digest
from localllm.server.store import ModelStore
from tests.localllm.hub.hub_server import HubServer, Repo, serving
from tests.localllm.hub.stores import lm_studio_model, ollama_model, places
from tests.localllm.server.calls import LOCAL, served
from tests.localllm.server.test_together import DEMO, opened
from tests.localllm.support import write_model

TOY, OTHER, BIG = "ann/Toy-GGUF:Q4_K_M", "ann/Toy-GGUF:Q8_0", "ann/Big-GGUF:Q4_0"
OFFERS = ServerSettings(offer="stores")
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf").read_bytes()


@pytest.fixture
def hub(tiny: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setattr(registry, "SCAN_SECONDS", 0.0)
    monkeypatch.setattr(registry, "SCAN_SHARE", float("inf"))  # each request scans, however long the last scan took
    monkeypatch.setattr(registry, "PATIENCE", 20.0)
    big = os.urandom(1 << 20)
    repos = {
        "ann/Toy-GGUF": Repo({"Toy-Q4_K_M.gguf": tiny, "Toy-Q8_0.gguf": tiny + b" "}),
        "ann/Big-GGUF": Repo({"Big-Q4_0.gguf": big}),
        "bartowski/Llama-3.2-1B-Instruct-GGUF": Repo({"Llama-3.2-1B-Instruct-Q4_K_M.gguf": tiny}),
    }
    with serving(repos) as server:
        yield server


class Site:
    """A server over the stores below a folder."""

    def __init__(self, root: Path, endpoint: str, **options: Any) -> None:
        self.places = places(root)
        self.loads: list[Path] = []
        options.setdefault("load", lambda path: opened(path, ctx_size=128))
        self._load: Callable[[Path], Served] = options.pop("load")
        self.registry = ModelRegistry(stores(self.places), self.load, live=True, strict=True, **options)
        self.service = Service(self.registry)
        self.service.store = ModelStore(self.places, self.registry, lambda: 1 << 30, endpoint=endpoint)

    def load(self, path: Path) -> Served:
        self.loads.append(path)
        return self._load(path)

    @asynccontextmanager
    async def client(self, settings: ServerSettings = OFFERS) -> AsyncIterator[Client]:
        transport = httpx.ASGITransport(make_app(self.service, settings))
        try:
            async with httpx.AsyncClient(transport=transport, base_url=LOCAL, timeout=60) as http:
                yield Client(http)
        finally:
            self.registry.end()


class Client:
    """Requests to a server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def told(self, path: str, status: int = 200, method: str = "", **body: Any) -> Any:
        """Return the JSON of an answer, or its lines."""
        answer = await self.http.request(method or ("POST" if body else "GET"), path, json=body or None)
        assert answer.status_code == status, answer.text
        lines = [json.loads(line) for line in answer.text.splitlines()]
        return lines if answer.headers.get("content-type") == "application/x-ndjson" else lines[0] if lines else {}

    async def names(self) -> list[str]:
        return sorted(model["id"] for model in (await self.told("/v1/models"))["data"])

    async def said(self, model: str, **more: Any) -> str:
        answer = await self.told("/v1/chat/completions", model=model, **HELLO, **more)
        return str(answer["choices"][0]["message"]["content"])

    async def pulled(self, name: str) -> None:
        assert (await self.told("/api/pull", model=name, stream=False)) == {"status": "success"}


@pytest.fixture
def site(tmp_path: Path, hub: HubServer) -> Site:
    return Site(tmp_path, hub.url)


def put(root: Path, place: str, data: bytes) -> Path:
    path = lm_studio_model(root, place)
    path.write_bytes(data)
    return path


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


# -- downloads -------------------------------------------------------------------------------------------------------


def test_a_pulled_model_answers_at_once(site: Site, hub: HubServer, tiny: bytes) -> None:
    async def run() -> None:
        async with site.client() as one:
            lines = await one.told("/api/pull", model=TOY)
            assert lines[0] == {"status": "pulling manifest"}
            assert lines[-1] == {"status": "success"}
            [last] = [line for line in lines if line.get("completed") == len(tiny)]
            assert last["total"] == len(tiny)
            assert last["status"] == f"pulling {last['digest'][7:19]}"
            assert await one.names() == [TOY]
            await one.said(TOY)
            await one.pulled("llama3.2:1b")
            await one.said("llama3.2:1b")
            seen = len(hub.seen)
            await one.pulled("llama3.2:1b")  # it is here, so that the hub is not asked
            assert len(hub.seen) == seen

    asyncio.run(run())


def test_wrong_pulls_are_one_line(site: Site, hub: HubServer) -> None:
    async def run() -> None:
        async with site.client() as one:
            for wrong in ("", "nothing", "a/b/c", "../x", "x" * 400, "http://evil/a/b"):
                error = (await one.told("/api/pull", 400, model=wrong))["error"]
                assert "\n" not in error
            assert "insecure" in (await one.told("/api/pull", 400, model=TOY, insecure=True))["error"]
            [_, error] = await one.told("/api/pull", model="ann/Nope-GGUF")
            assert "has no model ann/Nope-GGUF" in error["error"]
            refused = await one.told("/api/pull", 400, model="ann/Nope-GGUF", stream=False)
            assert "has no model" in refused["error"]
            assert await one.names() == []

    asyncio.run(run())


def test_clients_share_a_download_which_ends_with_the_last_and_continues_later(site: Site, hub: HubServer) -> None:
    hub.faults.pause = 0.1  # 16 parts

    async def first_bytes(url: str) -> None:
        """Follow the download until bytes have come, and disconnect."""
        async with httpx.AsyncClient() as http, http.stream("POST", url + "/api/pull", json={"model": BIG}) as lines:
            async for line in lines.aiter_lines():
                if json.loads(line).get("completed", 0) > 200_000:
                    return

    async def whole(url: str) -> str:
        async with httpx.AsyncClient(timeout=30) as http:
            return (await http.post(url + "/api/pull", json={"model": BIG})).text

    with served(site.service, ServerSettings(port=0, offer="stores")) as port:
        url = f"http://127.0.0.1:{port}"

        async def run() -> None:
            _, _, text = await asyncio.gather(first_bytes(url), first_bytes(url), whole(url))
            assert text.endswith('{"status":"success"}\n')
            assert len(hub.asked("/content/")) == 1
            (await httpx.AsyncClient().request("DELETE", url + "/api/delete", json={"model": BIG})).raise_for_status()
            await first_bytes(url)
            await asyncio.sleep(0.3)
            hub.faults.pause = 0
            assert '"completed":1048576' in await whole(url)
            assert hub.asked("/content/")[-1]["range"].startswith("bytes=")

        asyncio.run(run())
        assert site.service.store is not None


def test_the_number_of_downloads_and_the_disk_are_limited(
    site: Site, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with site.client() as one:
            monkeypatch.setattr(pulls, "MOST_PULLS", 0)
            assert "which is the limit" in (await one.told("/api/pull", 429, model=TOY))["error"]
            monkeypatch.undo()
            monkeypatch.setattr(pulls, "SPARE", 1 << 60)
            assert "must stay free" in (await one.told("/api/pull", model=TOY))[-1]["error"]
            assert not hub.asked("/content/")

    asyncio.run(run())


# -- deleting, copying, creating -------------------------------------------------------------------------------------


def test_only_what_was_pulled_is_deleted(tmp_path: Path, tiny: bytes, site: Site) -> None:
    theirs = put(tmp_path, "bob/Theirs/theirs.gguf", tiny)

    async def run() -> None:
        async with site.client() as one:
            await one.pulled(TOY)
            await one.pulled(OTHER)
            await one.said(TOY)
            refused = await one.told("/api/delete", 403, "DELETE", model="bob/Theirs")
            assert "LM Studio" in refused["error"]
            assert str(tmp_path) not in refused["error"]
            for wrong in ("Toy-GGUF:Q4_K_M", "none", "ann/Toy-GGUF:Q2_K"):
                await one.told("/api/delete", 404, "DELETE", model=wrong)
            assert "is ambiguous" in (await one.told("/api/delete", 400, "DELETE", model="ann/Toy-GGUF"))["error"]
            await one.told("/api/delete", 200, "DELETE", model=TOY)
            assert await one.names() == [OTHER, "bob/Theirs"]
            await one.told("/api/delete", 404, "DELETE", model=TOY)
            await one.told("/api/delete", 200, "DELETE", name="ann/Toy-GGUF")  # now there is one

    asyncio.run(run())
    assert theirs.exists()
    assert not list(site.places.hub.glob("*/blobs/*"))


def test_a_derived_model_adds_its_prompt_and_parameters(tmp_path: Path, site: Site) -> None:
    async def run() -> None:
        async with site.client() as one:
            await one.pulled(TOY)
            parameters: dict[str, Any] = {"num_predict": 2, "temperature": 0, "stop": ["zz"]}
            first = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
            made: dict[str, Any] = {
                "model": "mario:7b",
                "from": TOY,
                "system": "You are Mario.",
                "parameters": parameters,
            }
            assert (await one.told("/api/create", **made, messages=first))[-1] == {"status": "success"}
            await one.told("/api/copy", source="mario:7b", destination="luigi")
            assert await one.names() == [TOY, "luigi", "mario:7b"]
            listed = {model["name"]: model for model in (await one.told("/api/tags"))["models"]}
            assert listed["luigi:latest"]["details"]["parent_model"] == TOY
            prompt = (await one.told("/apply-template", model="luigi", messages=HELLO["messages"]))["prompt"]
            assert [prompt.index(text) for text in ("You are Mario.", "one", "two", "Hello")] == sorted(
                prompt.index(text) for text in ("You are Mario.", "one", "two", "Hello")
            )
            own = [{"role": "system", "content": "Be brief."}, *HELLO["messages"]]
            prompt = (await one.told("/apply-template", model="luigi", messages=own))["prompt"]
            assert "Mario" not in prompt
            asked: dict[str, Any] = {"model": "mario:7b", "messages": HELLO["messages"], "stream": False}
            assert (await one.told("/api/chat", **asked))["eval_count"] == 2
            assert (await one.told("/api/chat", **asked, options={"num_predict": 3}))["eval_count"] == 3
            shown = await one.told("/api/show", model="mario:7b")
            assert shown["system"] == "You are Mario."
            assert 'PARAMETER stop "zz"' in shown["modelfile"]
            third: dict[str, Any] = {"model": "third", "from": "luigi", "system": "You are Peach."}
            await one.told("/api/create", **third)
            shown = await one.told("/api/show", model="third:latest")
            assert (shown["system"], shown["details"]["parent_model"]) == ("You are Peach.", TOY)
            assert len(site.loads) == 1  # all share the file of their base
            await one.told("/api/delete", 200, "DELETE", model="third")
            await one.told("/api/delete", 200, "DELETE", model=TOY)
            assert await one.names() == []  # the others have lost their base
            await one.told("/api/delete", 200, "DELETE", model="luigi")
            await one.pulled(TOY)
            assert await one.names() == [TOY, "mario:7b"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        ({"from": ""}, 400, "from"),
        ({"from": "none"}, 404, "is unknown"),
        ({"model": "a b"}, 400, "cannot be a model's name"),
        ({"model": "../x"}, 400, "cannot be a model's name"),
        ({"model": TOY}, 400, "is the name of a model that was downloaded"),
        ({"model": "toy-gguf"}, 400, f"is the name of a model that was downloaded ({TOY})"),
        ({"model": "hf.co/ann/Toy-GGUF"}, 400, "is the name of a model that was downloaded"),
        ({"model": "Toy-Q4_K_M.gguf"}, 400, "is the name of a model that was downloaded"),
        ({"model": "llama3.2:1b"}, 400, "is the short name of bartowski/"),
        ({"model": "x:latest:latest"}, 400, "cannot be a model's name"),
        ({"model": "/".join(["x" * 90] * 3)}, 400, "cannot be a model's name"),
        ({"template": "{{ .Prompt }}"}, 400, "template"),
        ({"quantize": "q4_K_M"}, 400, "localllm quantize"),
        ({"files": {"a.gguf": "sha256:0"}}, 400, "files"),
        ({"adapters": {"a": "b"}}, 400, "adapters"),
        ({"parameters": {"temperature": -1}}, 400, "parameters.temperature"),
        ({"parameters": {"top_k": "x"}}, 400, "parameters.top_k"),
        ({"messages": [{"role": "robot", "content": ""}]}, 400, "role"),
        ({"system": "x" * 300_000}, 400, "300000 characters"),
    ],
)
def test_wrong_derived_models_are_refused(site: Site, body: dict[str, Any], status: int, problem: str) -> None:
    async def run() -> None:
        async with site.client() as one:
            await one.pulled(TOY)
            assert problem in (await one.told("/api/create", status, **{"model": "new", "from": TOY, **body}))["error"]
            assert await one.names() == [TOY]

    asyncio.run(run())


def test_capitals_make_no_second_derived_model(tmp_path: Path, site: Site) -> None:
    async def run() -> None:
        async with site.client() as one:
            await one.pulled(TOY)
            for name in ("foo", "FOO", "Foo:Latest"):
                made: dict[str, Any] = {"model": name, "from": TOY, "system": name}
                await one.told("/api/create", **made)
            assert await one.names() == [TOY, "foo"]
            assert (await one.told("/api/show", model="FOO"))["system"] == "Foo:Latest"
            file = site.places.derived / "foo.json"  # two files, as another program may leave them
            file.with_name("FOO.json").write_text(file.read_text().replace('"foo"', '"FOO"'))
            await one.told("/api/delete", 200, "DELETE", model="FOO")
            assert await one.names() == [TOY, "foo"]
            await one.told("/api/delete", 200, "DELETE", model="Foo")
            assert await one.names() == [TOY]

    asyncio.run(run())


def test_a_derived_model_does_not_take_the_name_of_a_model_that_is_pulled_later(tmp_path: Path, site: Site) -> None:
    async def run() -> None:
        async with site.client() as one:
            await one.pulled(TOY)
            made: dict[str, Any] = {"model": OTHER, "from": TOY, "system": "You are Mario."}
            await one.told("/api/create", **made)
            assert "system" in await one.told("/api/show", model=OTHER)
            made = {"model": "second", "from": OTHER}
            await one.told("/api/create", **made)
            await one.pulled(OTHER)
            assert "system" not in await one.told("/api/show", model=OTHER)
            await one.said(OTHER)
            assert await one.names() == [TOY, OTHER, "second"]
            assert {path.name for path in site.loads} == {"Toy-Q8_0.gguf"}
            await one.told("/api/delete", 200, "DELETE", model=OTHER)
            assert "system" in await one.told("/api/show", model=OTHER)  # the derived model has its name again

    asyncio.run(run())


def test_the_texts_of_derived_models_are_limited(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived, "MOST_BYTES", 1500)

    async def run() -> None:
        async with site.client() as one:
            await one.pulled(TOY)
            made: dict[str, Any] = {"from": TOY, "system": "x" * 1000}
            await one.told("/api/create", model="a", **made)
            assert "delete some" in (await one.told("/api/create", 400, model="b", **made))["error"]
            await one.told("/api/create", model="a", **made)  # replaces itself
            await one.told("/api/delete", 200, "DELETE", model="a")
            await one.told("/api/create", model="b", **made)

    asyncio.run(run())


def test_times_that_are_no_dates_break_no_list(tmp_path: Path, tiny: bytes, site: Site) -> None:
    put(tmp_path, "bob/Own/own.gguf", tiny)
    folder = site.places.derived
    folder.mkdir(parents=True)
    fields = {"base": "bob/Own", "system": "", "parameters": {}, "messages": [], "license": ""}
    for name, created in (("a", float("inf")), ("b", -1e300), ("c", 10**400), ("d", 1e15), ("e", float("nan"))):
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "created": created, **fields}))

    async def run() -> None:
        async with site.client() as one:
            await site.registry.refresh(now=True)
            for model in site.service.models():
                site.registry._entries[model.id].info.created = 10**15  # a file system may hold it
            for path in ("/v1/models", "/api/tags", "/api/v0/models"):
                await one.told(path)
            assert await one.names() == ["bob/Own"]

    asyncio.run(run())


def test_a_hostile_file_of_a_derived_model_is_skipped(tmp_path: Path, site: Site) -> None:
    folder = site.places.derived
    folder.mkdir(parents=True)
    for name, content in (
        ("a", "[]"), ("b", '{"name": "c"}'), ("c", "{" * 10_000), ("d", json.dumps({"name": "d", "base": 5})),
    ):  # fmt: skip
        (folder / f"{name}.json").write_text(content)
    (folder / "e.json").symlink_to("/etc/passwd")
    os.mkfifo(folder / "f.json")

    async def run() -> None:
        async with site.client() as one:
            assert await one.names() == []

    asyncio.run(run())


# -- who may ---------------------------------------------------------------------------------------------------------

CHANGES = (
    ("POST", "/api/pull", {"model": TOY}),
    ("POST", "/api/create", {"model": "x", "from": TOY}),
    ("POST", "/api/copy", {"source": TOY, "destination": "x"}),
    ("DELETE", "/api/delete", {"model": TOY}),
    ("POST", "/models/unload", {"model": TOY}),
)


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        (ServerSettings(), {}, 501),
        (ServerSettings(offer="stores", locked="no API key"), {}, 403),
        (ServerSettings(offer="stores", origins=("*",)), {"Origin": "http://evil.example"}, 403),
        (ServerSettings(offer="stores"), {"Origin": "http://evil.example"}, 403),
        (ServerSettings(offer="stores"), {"Origin": "null"}, 403),
        (ServerSettings(offer="stores"), {"Host": "evil.example"}, 403),
        (ServerSettings(offer="stores", keys=frozenset({digest("k")})), {}, 401),
    ],
)
def test_who_may_not_change_models(site: Site, settings: ServerSettings, headers: dict[str, str], status: int) -> None:
    async def run() -> None:
        async with site.client(settings) as one:
            for method, path, body in CHANGES:
                answer = await one.http.request(method, path, json=body, headers=headers)
                assert answer.status_code == status, (path, answer.text)
        assert not list(site.places.hub.glob("*"))

    asyncio.run(run())


def test_a_page_of_this_server_or_a_key_may(site: Site) -> None:
    keyed = ServerSettings(offer="stores", keys=frozenset({digest("k")}), origins=("http://chat.example",))

    async def run() -> None:
        for settings, headers in (
            (OFFERS, {"Origin": LOCAL}),
            (keyed, {"Authorization": "Bearer k", "Origin": "http://chat.example"}),
        ):
            async with site.client(settings) as one:
                answer = await one.http.post("/api/pull", json={"model": TOY, "stream": False}, headers=headers)
                assert answer.status_code == 200, answer.text

    asyncio.run(run())


def test_the_options_decide_whether_models_are_locked() -> None:
    def locked(**options: Any) -> bool:
        return bool(ServerSettings.of(localllm.options.ServeOptions(**options), offer="stores").locked)

    assert not locked()
    assert not locked(host="localhost,::1")
    assert locked(host="0.0.0.0")
    assert locked(host="127.0.0.1,192.168.1.5")
    assert not locked(host="0.0.0.0", api_key=("k",))
    assert not locked(host="0.0.0.0", manage_models="on")
    assert locked(manage_models="off", api_key=("k",))


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
