"""The web page's list of models: choosing, loading, downloading and deleting models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from huggingface_hub import constants

from localllm.hub.short_names import KNOWN
from localllm.hub.stored_model import DerivedModel
from localllm.server.settings import ServerSettings
from tests.localllm.hub.hub_server import Repo, serving
from tests.localllm.server.browser.managed import Line, Management, part
from tests.localllm.server.browser.site import LONG, Site, answered, echo, send, texts, until
from tests.localllm.server.calls import served
from tests.localllm.server.scripted import Model, ScriptedService, script
from tests.localllm.server.store_site import Site as Stores
from tests.localllm.support import write_model

NAMES = "#models-list .name"
OTHER = Model("user/other-GGUF:Q8_0", state="unloaded", quantization="Q8_0", file_bytes=3 << 30, parameters=3 * 10**9)
BROKEN = Model("broken", state="failed", capabilities=())
MODELS = (Model(), OTHER, Model("vectors", capabilities=("embedding",)), BROKEN)
QWEN = Model("unsloth/Qwen3-0.6B-GGUF:Q4_K_M", state="unloaded")
SUCCESS = {"status": "success"}
GIB = 1 << 30


def managed(*pulls: Sequence[Line], made: Any = QWEN) -> Callable[[ScriptedService], Management]:
    return lambda service: Management(service, pulls, made)


def test_each_conversation_has_its_model_and_a_vanished_one_is_told(site: Callable[..., Site]) -> None:
    it = site(echo, all_models=MODELS)
    page = it.page()
    page.click("#model")
    assert texts(page, NAMES) == [model.id for model in MODELS]
    facts = texts(page, "#models-list small")
    assert facts[0] == "1M · Q4_K_M · 585.9 KiB · loaded"
    assert facts[1] == "3.0B · Q8_0 · 3.0 GiB"
    assert facts[2].endswith("for embeddings")
    assert facts[3].endswith("could not be loaded")
    assert page.locator("#models-list .open:disabled").count() == 1
    page.keyboard.type("q8 OTHER")
    assert texts(page, NAMES) == [OTHER.id]
    page.keyboard.press("Enter")
    page.wait_for_selector("#models", state="hidden")
    page.keyboard.type("one")  # the message box has the focus
    page.keyboard.press("Enter")
    answered(page)
    assert it.service.names[-1] == OTHER.id
    other = page.url
    page.keyboard.press("Control+Shift+O")
    page.click("#model")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#model-name').innerText === 'tiny'")
    send(page, "two")
    answered(page)
    assert it.service.names[-1] == "tiny"
    page.click("#conversations .open >> text=one")
    until(page, "document.querySelector('#model-name').innerText === 'other-GGUF:Q8_0'")
    assert OTHER.id not in texts(page, ".stats")[0]
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert OTHER.id not in texts(page, ".stats")[0]

    it.service.infos = MODELS[:1] + MODELS[2:]
    page.goto(other)
    page.reload()
    page.wait_for_selector(f"#gone >> text={OTHER.id} is not in this server's list of models any more.")
    send(page, "three")  # asks for a choice, and keeps the text
    page.wait_for_selector("#models[open]")
    page.keyboard.press("Escape")
    assert page.input_value("#prompt") == "three"
    page.click("#gone >> text=Use tiny")
    assert page.locator("#gone").is_hidden()
    page.press("#prompt", "Enter")
    answered(page, 2)
    assert it.service.names[-1] == "tiny"
    assert texts(page, ".stats")[0].startswith(f"{OTHER.id} · ")  # the first answer came from another model


def test_a_model_that_loads_is_told(site: Callable[..., Site]) -> None:
    it = site(lambda turn: [1.4, *script("Loaded.")], all_models=(Model(), replace(OTHER, state="loading")))
    page = it.page()
    page.click("#model")
    page.wait_for_selector(f"#models-list li >> text={OTHER.id} >> xpath=.. >> text=loading…")
    page.click(f"#models-list >> text={OTHER.id}")
    send(page, "x")
    page.wait_for_selector(f".note >> text=Loading {OTHER.id}… 1 s")
    answered(page)
    assert texts(page, ".note") == [""]


def test_a_download_shows_its_progress_and_its_model_is_chosen(site: Callable[..., Site]) -> None:
    first: list[Line] = [{"status": "pulling manifest"}, 0.2, part(4 * GIB, GIB), 0.3]
    last: list[Line] = [part(4 * GIB, 4 * GIB), {"status": "verifying sha256 digest"}, SUCCESS]
    lines = [*first, part(4 * GIB, GIB + GIB // 10), 1.0, *last]
    it = site(echo, manage=managed(lines))
    page = it.page()
    page.click("#model")  # the only model, but others can be downloaded
    assert texts(page, "#known .name") == [known.name for known in KNOWN]
    assert "378.6 MiB · Apache-2.0" in texts(page, "#known small")
    page.click("[aria-label='Download qwen3:0.6b']")
    page.wait_for_selector("#download-text >> text=/^1.1 GiB of 4.0 GiB · [0-9.]+ .iB.s · [0-9]+ .* left$/")
    assert page.evaluate("document.querySelector('#download-bar').position") == pytest.approx(0.275)
    assert page.locator("#known button:not(:disabled)").count() == 0
    page.keyboard.press("Escape")
    assert page.locator("#model").inner_text().split()[-2:] == ["27", "%"]
    until(page, "document.querySelector('#model-name').innerText === 'Qwen3-0.6B-GGUF:Q4_K_M'")
    assert page.locator("#model-progress").inner_text() == ""
    send(page, "x")
    answered(page)
    assert it.service.names[-1] == QWEN.id
    page.click("#model")
    assert texts(page, "#download-text") == ["Downloaded."]
    page.click("#get summary")
    [row] = [row for row in texts(page, "#known li") if row.startswith("qwen3:0.6b")]
    assert row.endswith("on this server")


def test_the_users_short_names_are_listed_first_and_downloaded(site: Callable[..., Site]) -> None:
    it = site(echo, manage=managed([part(GIB, GIB), SUCCESS]))
    assert it.management is not None
    it.management.names = {"writer": "ann/Writer-GGUF:Q5_K_M", "qwen3:0.6b": QWEN.id}
    page = it.page()
    page.click("#model")
    names = [known.name for known in KNOWN if known.name != "qwen3:0.6b"]
    assert texts(page, "#known .name") == ["writer", "qwen3:0.6b", *names]
    assert texts(page, "#known small")[0] == "ann/Writer-GGUF:Q5_K_M"
    page.click("[aria-label='Download writer']")
    page.wait_for_selector("#download-text >> text=Downloaded.")
    assert ("/api/pull", "writer") in it.management.asked


def test_a_download_is_cancelled_fails_and_is_resumed(site: Callable[..., Site]) -> None:
    endless: list[Line] = [part(4 * GIB, GIB), LONG]
    full: list[Line] = [part(4 * GIB, GIB), {"error": "<b>the disk is full</b>"}]
    it = site(echo, manage=managed(endless, full, [part(4 * GIB, 4 * GIB), SUCCESS, LONG]))
    page = it.page()
    page.click("#model")
    page.fill("#get-name", " Unsloth/qwen3-0.6b-gguf:Q4_K_M ")
    page.keyboard.press("Enter")
    page.wait_for_selector("#download-text >> text=1.0 GiB of 4.0 GiB")
    page.click("#stop-download")
    page.wait_for_selector("#download-text >> text=Cancelled. The part already downloaded is kept.")
    page.click("#resume")
    page.wait_for_selector("[role=alert]#download-error >> text=Download failed: <b>the disk is full</b>")
    assert texts(page, "#download-text") == ["Stopped at 1.0 GiB of 4.0 GiB."]
    page.click("#resume")  # the success ends it, even if the connection stays open
    page.wait_for_selector("#download-text >> text=Downloaded.")
    assert it.management is not None
    assert it.management.asked == [("/api/pull", "Unsloth/qwen3-0.6b-gguf:Q4_K_M")] * 3
    until(page, "document.querySelector('#model-name').innerText === 'Qwen3-0.6B-GGUF:Q4_K_M'")
    page.click("#stop-download")
    assert page.locator("#download").is_hidden()


GARBAGE: dict[str, tuple[list[Line], str]] = {
    "html": ([b"<html>\n"], "could not be read"),
    "json": ([b'{"status": 3}\n'], "could not be read"),
    "null": ([b"null\n"], "could not be read"),
    "long": ([b"x" * (5 << 20), LONG], "could not be read: a line of it never ends"),
    "numbers": ([part(-5, 3), part(3, 9), {"status": "x", "total": "many"}], "ended before"),
    "empty": ([], "The connection ended before the download did."),
}  # fmt: skip


def test_a_senseless_stream_ends_in_one_line(site: Callable[..., Site]) -> None:
    it = site(echo, manage=managed(*(lines for lines, _ in GARBAGE.values())))
    page = it.page()
    page.click("#model")
    page.fill("#get-name", "a/b")
    page.keyboard.press("Enter")
    for number, (_, problem) in enumerate(GARBAGE.values()):
        page.wait_for_selector(f"#download-error:visible >> text={problem}")
        if number + 1 < len(GARBAGE):
            page.evaluate("document.querySelector('#download-error').textContent = ''")
            page.click("#resume")


def test_models_are_unloaded_and_deleted(site: Callable[..., Site]) -> None:
    it = site(echo, all_models=(*MODELS, Model("mario", derived=DerivedModel("mario", "tiny"))), manage=managed())
    page = it.page()
    management = it.management
    assert management is not None
    page.click("#model")
    page.click("[aria-label='Unload tiny']")
    page.click("[aria-label='Load tiny']")
    page.wait_for_selector("[aria-label='Unload tiny']")
    delete = f"[aria-label='Delete {OTHER.id}']"
    page.click(delete)
    page.wait_for_selector("#ask-text >> text=from the server's disk: 3.0 GiB")
    assert page.evaluate("getComputedStyle(document.querySelector('#ask-yes')).backgroundColor") == "rgb(179, 38, 30)"
    page.keyboard.press("Escape")
    page.click("[aria-label='Delete mario']")
    page.wait_for_selector("#ask-text >> text=Its base, tiny, stays.")
    page.keyboard.press("Escape")
    management.refusal = "the model answers a request now"
    page.click(delete)
    page.click("#ask-yes")
    page.wait_for_selector("[role=alert]#models-error >> text=Not deleted: the model answers a request now")
    assert OTHER.id in texts(page, NAMES)
    management.refusal = ""
    page.click(delete)
    page.click("#ask-yes")
    page.wait_for_selector(delete, state="detached")
    assert page.locator("#models-error").is_hidden()
    changes = [("/models/unload", "tiny"), ("/models/load", "tiny"), *[("/api/delete", OTHER.id)] * 2]
    assert management.asked == changes


@pytest.mark.parametrize("count", [1, 2])
def test_a_server_that_does_not_download_says_so(site: Callable[..., Site], count: int) -> None:
    settings = ServerSettings(port=0, offer="model" if count == 1 else "folder")
    page = site(echo, settings, all_models=MODELS[:count]).page()
    reason = "`localllm serve` without MODEL"
    if count == 1:  # nothing to choose: the name is text, and the settings say why
        assert texts(page, "#only-model") == ["tiny"]
        assert page.locator("#model").is_hidden()
        page.click("#open-settings")
        page.wait_for_selector(f"#set-model >> text={reason}")
    else:
        page.click("#model")
        page.wait_for_selector(f"#get-off >> text={reason}")
        assert page.locator("#get, [data-does=delete]").locator("visible=true").count() == 0


def test_ten_thousand_models_with_hostile_names_stay_usable(site: Callable[..., Site]) -> None:
    name = "<img src=x onerror=window.hacked=1>"
    page = site(echo, all_models=[Model(f"{name} {n}") for n in range(10_000)], manage=managed()).page()
    page.click("#model")
    assert page.locator("#models-list li").count() == 200
    page.wait_for_selector("#models-more >> text=9,800 more. Type to find them.")
    page.fill("#models-filter", "9999")
    assert texts(page, NAMES) == [f"{name} 9999"]
    page.keyboard.press("Enter")
    assert texts(page, "#model-name") == [f"{name} 9999"]
    assert page.evaluate("window.hacked") is None


def test_a_model_of_the_hub_is_downloaded_used_and_deleted(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    tiny = write_model(tmp_path / "tiny.gguf").read_bytes()
    repos = {"ann/Toy-GGUF": Repo({"Toy-Q4_K_M.gguf": tiny}), "ann/Gated-GGUF": Repo({"a.gguf": tiny}, gated=True)}
    with serving(repos) as hub:
        real = Stores(tmp_path, hub.url)
        try:
            with served(real.service, ServerSettings(port=0, offer="stores")) as port:
                page = Site(browser, cast("ScriptedService", real.service), port).page()
                page.click("#model >> text=Choose a model")
                page.fill("#get-name", "ann/Gated-GGUF")
                page.keyboard.press("Enter")
                page.wait_for_selector("#download-error >> text=ann/Gated-GGUF is gated: accept its terms")
                page.fill("#get-name", "Ann/toy-gguf:q4_k_m")
                page.keyboard.press("Enter")
                until(page, "document.querySelector('#model-name').innerText === 'Toy-GGUF:Q4_K_M'")
                page.keyboard.press("Escape")
                send(page, "Hi")
                answered(page)
                page.click("#model")
                page.click("[aria-label='Unload ann/Toy-GGUF:Q4_K_M']")
                page.wait_for_selector("[aria-label='Load ann/Toy-GGUF:Q4_K_M']")
                page.click("[aria-label='Delete ann/Toy-GGUF:Q4_K_M']")
                page.click("#ask-yes")
                page.wait_for_selector("#models-list li", state="detached")
                page.context.close()
        finally:
            real.registry.end()
    assert list(tmp_path.rglob("blobs/*")) == []
