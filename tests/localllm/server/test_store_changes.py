"""A server without MODEL: clients pull, delete, copy and derive models."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

import localllm
from localllm.hub import derived
from localllm.server import pulls
from localllm.server.settings import ServerSettings, digest
from tests.localllm.hub.hub_server import HubServer
from tests.localllm.server.calls import LOCAL, served
from tests.localllm.server.store_site import BIG, HELLO, OFFERS, OTHER, TOY, Site, put

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
