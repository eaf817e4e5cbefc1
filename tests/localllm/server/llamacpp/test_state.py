"""llama.cpp's /health, /props and /slots, and unsupported routes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from localllm.generation.request import Started
from localllm.server.app import make_app
from localllm.server.settings import ServerSettings
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import Model, ScriptedService, done, said


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
@pytest.mark.parametrize("state", ["loaded", "unloaded"])
def test_healthy(path: str, state: Any) -> None:
    response = call(ScriptedService(all_models=[Model(state=state)]), path)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_not_ready() -> None:
    response = call(ScriptedService(all_models=[Model(state="loading")]), "/health")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.json() == {
        "status": "loading model",
        "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"},
    }
    assert call(ScriptedService(all_models=[Model(state="failed")]), "/health").status_code == 503


def test_several_models_are_loaded_on_demand() -> None:
    models = [Model("a", state="loading"), Model("b", state="unloaded")]
    assert call(ScriptedService(all_models=models), "/health").status_code == 200
    assert call(ScriptedService(all_models=[]), "/health").status_code == 200


def test_props() -> None:
    body = call(ScriptedService(), "/props", settings=ServerSettings(parallel=3)).json()
    assert body["total_slots"] == 3
    assert body["model_path"] == "tiny.gguf"
    assert body["model_alias"] == "tiny"
    assert body["default_generation_settings"]["n_ctx"] == 4096
    assert body["default_generation_settings"]["params"]["seed"] == 4294967295
    assert "stop" not in body["default_generation_settings"]["params"]
    assert body["modalities"] == {"vision": False, "video": False, "audio": False}
    assert (body["bos_token"], body["eos_token"]) == ("<s>", "</s>")
    assert "<|assistant|>" in body["chat_template"]
    assert body["is_sleeping"] is False


@pytest.mark.parametrize(
    ("template", "capabilities", "lacks"),
    [
        ("{{ tools }}{{ reasoning_effort }}{{ preserve_thinking }}", ("chat", "tools", "thinking"), set()),
        ("{{ tools }}", ("chat", "tools"), {"reasoning_content", "reasoning_effort", "preserve_reasoning"}),
        (
            "{{ messages }}",
            ("chat",),
            {
                *("reasoning_content", "reasoning_effort", "preserve_reasoning"),
                *("tools", "tool_calls", "parallel_tool_calls", "object_arguments"),
            },
        ),
    ],
)
def test_what_chats_may_contain(template: str, capabilities: tuple[str, ...], lacks: set[str]) -> None:
    """`chat_template_caps` in /props has llama-server's keys, except for one."""
    model = Model(template=template, capabilities=capabilities)
    caps = call(ScriptedService(all_models=[model]), "/props").json()["chat_template_caps"]
    assert set(caps) == {
        *("supports_string_content", "supports_typed_content", "supports_system_role"),
        *("supports_tools", "supports_tool_calls", "supports_parallel_tool_calls", "supports_object_arguments"),
        *("supports_preserve_reasoning", "supports_reasoning_effort", "supports_reasoning_content"),
    }
    assert {name for name, able in caps.items() if not able} == {f"supports_{name}" for name in lacks}


def test_idle_slots() -> None:
    body = call(ScriptedService(), "/slots", settings=ServerSettings(parallel=2)).json()
    assert body == [{"id": number, "n_ctx": 4096, "speculative": False, "is_processing": False} for number in range(2)]
    assert call(ScriptedService(), "/slots", settings=ServerSettings(slots=False)).status_code == 501


def test_busy_slots() -> None:
    async def main() -> None:
        service = ScriptedService([Started(5, 2), *said("a\n", "b"), 0.1, done()])
        app = make_app(service, ServerSettings(parallel=2))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            body = {"prompt": "secret", "n_predict": 9, "temperature": 0.5}
            running = [asyncio.create_task(client.post("/completion", json=body)) for _ in range(3)]
            slots: Any = []
            while sum(each.get("next_token", [{}])[0].get("n_decoded", 0) for each in slots) < 4:
                await asyncio.sleep(0.001)
                slots = (await client.get("/slots")).json()
                assert len(slots) == 2
            first = slots[0]
            assert first["is_processing"] is True
            assert first["params"]["temperature"] == 0.5
            assert (first["n_prompt_tokens"], first["n_prompt_tokens_cache"]) == (5, 2)
            assert first["next_token"] == [
                {"has_next_token": True, "has_new_line": True, "n_remain": 7, "n_decoded": 2}
            ]
            assert "secret" not in str(slots)
            full = await client.get("/slots?fail_on_no_slot=1")
            assert (full.status_code, full.json()["error"]["type"]) == (503, "unavailable_error")
            await asyncio.gather(*running)
            assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "method"), [("/props", "POST"), ("/slots/1?action=save", "POST"), ("/lora-adapters", "POST")]
)
def test_what_is_not_done(path: str, method: str) -> None:
    for body in (None, b"", b"[]", b"{", b"{}"):
        response = call(ScriptedService(), path, body, method=method)
        assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")


def test_paths_and_methods_that_do_not_exist() -> None:
    for path in ("/nowhere", "/v1/nowhere", "/api/nowhere", "/completion/", "/completion//x", "/%00"):
        response = call(ScriptedService(), path)
        assert response.status_code == 404
        assert "error" in response.json()
    response = call(ScriptedService(), "/completion")
    assert (response.status_code, response.json()["error"]["code"]) == (405, 405)
    assert call(ScriptedService(), "/lora-adapters").json() == []
