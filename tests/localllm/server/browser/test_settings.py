"""The web page's requests and local storage: API keys, settings, attachments, tools, errors, exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from localllm.server.settings import ServerSettings, digest
from localllm.server.turn import Turn
from tests.localllm.media_models import encoded, png, wav
from tests.localllm.server.browser.site import Site, answered, echo, last_turn, send, texts, until
from tests.localllm.server.scripted import Model, Step, called, done, said, script


def test_a_key_is_asked_for_and_kept(site: Callable[..., Site]) -> None:
    it = site(script("Hi"), ServerSettings(port=0, keys=frozenset({digest("secret")})))
    page = it.page(ready=False)
    page.wait_for_selector("#key[open] >> text=requires a key")
    page.fill("#key-value", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key[open] >> text=rejected this key")
    page.fill("#key-value", "secret")
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-ready]")
    send(page, "Hello")
    answered(page)
    again = it.page()
    assert again.locator("#key").is_hidden()
    assert texts(again, "#only-model") == ["tiny"]


def test_settings_files_and_the_model_are_sent(site: Callable[..., Site], tmp_path: Path) -> None:
    it = site(echo, all_models=[Model(), Model(id="other"), Model(id="vectors", capabilities=("embedding",))])
    page = it.page()
    page.click("#model")
    page.click("#models-list >> text=other")
    page.click("#open-settings")
    page.fill("#set-system", "Be brief.")
    page.wait_for_selector("#set-top_k[placeholder='40']")  # an empty field shows the server's default
    assert page.get_attribute("#set-seed", "placeholder") == "random"
    assert page.get_attribute("#set-max_tokens", "placeholder") == "no limit"
    page.fill("#set-temperature", "0.25")
    page.select_option("#set-thinking", "none")
    page.fill("#set-max_tokens", "99")
    page.click("#save-settings")
    (tmp_path / "a.txt").write_text("line ``` one\n")
    (tmp_path / "b.bin").write_bytes(b"\xff\x00")
    page.set_input_files("#attach-files", [tmp_path / "a.txt", tmp_path / "b.bin"])
    page.wait_for_selector(".notice >> text=b.bin is neither a UTF-8 text file")
    send(page, "Read this")
    answered(page)
    turn = last_turn(it)
    assert it.service.names[-1] == "other"
    assert turn.messages[0] == {"role": "system", "content": "Be brief."}
    assert turn.messages[1]["content"] == "Read this\n\nFile a.txt:\n````\nline ``` one\n\n````"
    assert (turn.generation.sampling, turn.generation.max_tokens) == ({"temperature": 0.25}, 99)
    assert turn.thinking.enabled is False
    assert texts(page, ".file summary") == ["a.txt"]


PASTE = """([data]) => {
    const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
    const clipboardData = new DataTransfer();
    clipboardData.items.add(new File([bytes], "pasted.png", { type: "image/png" }));
    document.querySelector("#prompt").dispatchEvent(new ClipboardEvent("paste", { clipboardData, cancelable: true }));
}"""


def test_pictures_and_sounds_are_attached_shown_and_sent(site: Callable[..., Site], tmp_path: Path) -> None:
    it = site(echo)
    page = it.page()
    (tmp_path / "a.png").write_bytes(png(seed=1))
    (tmp_path / "b.wav").write_bytes(wav())
    page.set_input_files("#attach-files", [tmp_path / "a.png", tmp_path / "b.wav"])
    page.wait_for_selector("#files >> text=b.wav")
    page.evaluate(PASTE, [encoded(png(seed=2))])
    page.wait_for_selector("#files >> text=pasted.png")
    assert page.locator("#files img.thumbnail").count() == 2
    send(page, "What is this?")
    answered(page)
    parts = last_turn(it).messages[0]["content"]
    assert parts == [
        {"type": "image", "image": png(seed=1)},
        {"type": "audio", "audio": wav()},
        {"type": "image", "image": png(seed=2)},
        {"type": "text", "text": "What is this?"},
    ]
    assert page.locator("#files li").count() == 0
    assert page.locator(".message img.picture").count() == 2
    until(page, "[...document.querySelectorAll('img.picture')].every((one) => one.naturalWidth === 40)")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector(".message img.picture")  # kept with the conversation


def test_calls_of_tools_are_shown_and_their_results_sent(site: Callable[..., Site]) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    def answers(turn: Turn) -> list[Step]:
        if turn.messages[-1]["role"] == "tool":
            return script(f"It is {turn.messages[-1]['content']}.")
        return [*called("add", '{"a":', "2}"), done("tool_calls")]

    it = site(answers)
    page = it.page()
    page.click("#open-settings")
    page.click("#settings summary >> text=Tools")
    page.fill("#set-tools", "nonsense")
    page.click("#save-settings")
    page.wait_for_selector("#settings-error")
    page.fill("#set-tools", json.dumps([tool]))
    page.click("#save-settings")
    send(page, "2 + 3")
    page.wait_for_selector(".call")
    assert texts(page, ".call code") == ["add"]
    page.fill("[aria-label='Result of add']", "five")
    page.click("text=Send results")
    page.wait_for_selector("text=It is five.")
    roles = [message["role"] for message in last_turn(it).messages]
    assert roles == ["user", "assistant", "tool"]


def test_an_error_is_told_and_the_answer_can_be_asked_for_again(site: Callable[..., Site]) -> None:
    count = 0

    def answers(turn: Turn) -> list[Step]:
        nonlocal count
        count += 1
        return [*said("begun"), RuntimeError("lost")] if count == 1 else script("well")

    page = site(answers).page()
    send(page, "x")
    page.wait_for_selector("[role=alert] >> text=No answer:")
    page.click("[aria-label='Answer again']")
    page.wait_for_selector("text=well")


def test_exports_come_back_whole(site: Callable[..., Site], tmp_path: Path) -> None:
    it = site(echo)
    page = it.page()
    for text in ("apple", "banana"):
        page.click("#new")
        send(page, text)
        answered(page)
    with page.expect_download() as found:
        page.click("#export-all")
    file = tmp_path / "export.json"
    found.value.save_as(file)
    for text in ("apple", "banana"):
        page.hover(f"#conversations li >> text={text}")
        page.click(f"[aria-label='Delete {text}']")
        page.click("#ask-yes")
        page.wait_for_selector(f"#conversations >> text={text}", state="detached")
    page.set_input_files("#import-file", file)
    until(page, "document.querySelectorAll('#conversations .open').length === 2")
    page.fill("#search", "HEARD banana")
    until(page, "document.querySelectorAll('#conversations .open').length === 1")
    page.click("#conversations .open")
    page.wait_for_selector("text=Heard 1: banana")
    assert texts(page, ".plain-text") == ["banana"]  # the question above the answer that the search found
