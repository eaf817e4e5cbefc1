"""POST /slots/{id} saves, restores and erases a slot's KV cache; hostile file names cannot leave the directory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

import localllm
from localllm.generation.interfaces import SchedulerLimits
from localllm.loading.resolve import resolve
from localllm.saved.slot_files import SlotFiles
from localllm.server.app import make_app
from localllm.server.catalogue import only
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import ScriptedService

SAVING = ServerSettings(slot_files=True, parallel=2)
PROMPT = "Once upon a time there was a little dog who wanted to see the world."


def test_the_answers_have_llama_cpps_fields() -> None:
    saved = call(ScriptedService(), "/slots/1?action=save", {"filename": "a.bin"}, settings=SAVING).json()
    assert saved.pop("timings")["save_ms"] >= 0
    assert saved == {"id_slot": 1, "filename": "a.bin", "n_saved": 11, "n_written": 5}
    restored = call(ScriptedService(), "/slots/0?action=restore", {"filename": "b"}, settings=SAVING).json()
    assert restored.pop("timings")["restore_ms"] >= 0
    assert restored == {"id_slot": 0, "filename": "b", "n_restored": 10, "n_read": 1}
    erased = call(ScriptedService(), "/slots/1?action=erase", method="POST", settings=SAVING).json()
    assert erased == {"id_slot": 1, "n_erased": 11}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/slots/2?action=save", {"filename": "a"}),
        ("/slots/-1?action=save", {"filename": "a"}),
        ("/slots/٠?action=save", {"filename": "a"}),
        ("/slots/99999999999?action=save", {"filename": "a"}),
        ("/slots/0?action=delete", {"filename": "a"}),
        ("/slots/0", {"filename": "a"}),
        ("/slots/0?action=save", {}),
        ("/slots/0?action=save", {"filename": 5}),
        ("/slots/0?action=restore", b"{"),
        ("/slots/0?action=restore", b""),
    ],
)
def test_wrong_requests_are_refused(path: str, body: Any) -> None:
    response = call(ScriptedService(), path, body, method="POST", settings=SAVING)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_slot_is_saved_erased_restored_and_continued(tmp_path: Path) -> None:
    (tmp_path / "slots").mkdir()

    def opened(path: Path) -> Served:
        model = localllm.load(path, backend="cpu", threads=1, sequences=2, ctx_size=256)
        return Served(model, SchedulerLimits(2), slots=SlotFiles(tmp_path / "slots", model))

    registry = ModelRegistry(only("demo", Path(resolve("demo"))), opened)
    asked = {"prompt": PROMPT, "id_slot": 1, "temperature": 0, "n_predict": 12, "ignore_eos": True}

    async def main() -> None:
        app = make_app(Service(registry), SAVING)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

            async def post(path: str, body: Any = None) -> Any:
                response = await client.post(path, json=body)
                return response.json() | {"status": response.status_code}

            first = await post("/completion", asked)
            evaluated = first["timings"]["prompt_n"]
            saved = await post("/slots/1?action=save", {"filename": "story.bin"})
            assert saved["n_saved"] == evaluated + 11  # the last generated token is not in the KV cache
            assert saved["n_written"] == (tmp_path / "slots" / "story.bin").stat().st_size
            assert (await post("/slots/1?action=erase"))["n_erased"] == saved["n_saved"]
            # nothing is reused after the erase
            assert (await post("/completion", asked))["timings"]["prompt_n"] == evaluated
            await post("/slots/1?action=erase")
            restored = await post("/slots/0?action=restore", {"filename": "story.bin"})
            assert restored["n_restored"] == saved["n_saved"]
            again = await post("/completion", asked)
            assert again["timings"]["prompt_n"] == 1
            assert again["content"] == first["content"]
            for name in ("../story.bin", "/etc/passwd", "none.bin", "a/b", ".hidden", ""):
                for action in ("save", "restore") if name != "none.bin" else ("restore",):
                    wrong = await post(f"/slots/0?action={action}", {"filename": name})
                    assert wrong["status"] == 400
                    assert str(tmp_path) not in str(wrong)
            empty = await post("/slots/1?action=erase")
            assert empty["n_erased"] == saved["n_saved"]  # the tokens that slot 1 had in the KV cache
            assert (await post("/slots/1?action=erase"))["n_erased"] == 0
            assert (await post("/slots/1?action=save", {"filename": "empty"}))["n_saved"] == 0
            assert (await post("/slots/1?action=restore", {"filename": "empty"}))["n_restored"] == 0

    try:
        asyncio.run(main())
    finally:
        registry.end()
    assert sorted(path.name for path in (tmp_path / "slots").iterdir()) == ["empty", "story.bin"]
