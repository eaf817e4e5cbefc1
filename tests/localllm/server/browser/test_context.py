"""Keeping a conversation on the web page within the context: meter, dropped and deleted messages, edited answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from localllm.server.errors import PromptTooLong
from localllm.server.turn import Turn
from tests.localllm.server.browser.site import Site, answered, echo, last_turn, send, texts, until
from tests.localllm.server.scripted import Step, done, said, script

SCROLL = "document.querySelector('#scroll')"
LEFT = f"{SCROLL}.scrollHeight - {SCROLL}.scrollTop - {SCROLL}.clientHeight"
CONTENTS = "[...document.querySelectorAll('.plain-text, .markdown')].map(one => one.innerText.trim())"


def sent(it: Site) -> list[str]:
    return [str(message["content"]) for message in last_turn(it).messages]


def test_the_meter_shows_the_context_and_drops_the_oldest(site: Callable[..., Site]) -> None:
    used = 500
    it = site(lambda turn: [*said(f"reply to {turn.messages[-1]['content']}"), done("end", used, 0, answer_tokens=100)])
    page = it.page()
    send(page, "one")
    answered(page)
    assert page.locator("#context").is_hidden()  # 600 of 4096 tokens
    used = 3600
    for count, text in enumerate(("two", "three"), 2):
        send(page, text)
        answered(page, count)
    page.wait_for_selector("#context >> text=3,700 of 4,096 tokens")
    page.click("text=Drop the oldest")
    until(page, "document.querySelectorAll('.dropped').length === 4")
    page.wait_for_selector("#context >> text=/^about 1,\\d+ of 4,096 tokens/")
    assert page.evaluate(CONTENTS)[0] == "one"  # still on the page
    send(page, "four")
    answered(page, 4)
    assert sent(it) == ["three", "reply to three", "four"]
    page.hover(".dropped")
    page.click(".dropped [aria-label='Include in the context again']")
    until(page, "document.querySelectorAll('.dropped').length === 3")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".dropped").count() == 3
    send(page, "five")
    answered(page, 5)
    assert sent(it)[0] == "one"


def test_a_full_context_offers_to_drop_the_oldest(site: Callable[..., Site]) -> None:
    def answers(turn: Turn) -> list[Step]:
        return [PromptTooLong("too long", 5000, 4096)] if len(turn.messages) > 3 else echo(turn)

    it = site(answers)
    page = it.page()
    for count, text in enumerate(("one", "two"), 1):
        send(page, text)
        answered(page, count)
    send(page, "three")
    page.wait_for_selector("[role=alert] >> text=No answer:")
    page.click("text=Drop the oldest messages and try again")
    page.wait_for_selector("text=Heard 1: three")
    assert texts(page, ".dropped .plain-text") == ["one", "two"]


def test_a_deleted_message_is_gone_and_its_replies_stay(site: Callable[..., Site]) -> None:
    it = site(echo)
    page = it.page()
    other = it.page(page.url)
    page.bring_to_front()  # Chromium slows background tabs down
    for count, text in enumerate(("one", "two"), 1):
        send(page, text)
        answered(page, count)
    page.hover(".answer")
    page.click(".answer [aria-label=Delete]")
    until(page, "document.querySelectorAll('.answer').length === 1")
    assert page.evaluate(CONTENTS) == ["one", "two", "Heard 3: two"]
    send(page, "three")
    answered(page, 2)
    assert sent(it) == ["one", "two", "Heard 3: two", "three"]
    for left in range(4, -1, -1):
        page.hover("article")
        page.click("article [aria-label=Delete] >> nth=0")
        until(page, f"document.querySelectorAll('article').length === {left}")
        if left == 3:  # an answer without a question, a question, and its answer
            until(page, "document.querySelectorAll('[aria-label=\"Answer again\"]').length === 1")
    page.wait_for_selector("#welcome")
    page.reload()
    page.wait_for_selector("#welcome")
    other.goto(page.url)
    other.wait_for_selector("#welcome")
    page.fill("#search", "Heard")  # the text is not stored either
    page.wait_for_selector("text=Nothing found")


def test_an_edited_answer_is_a_branch_and_the_model_sees_it(site: Callable[..., Site], tmp_path: Path) -> None:
    it = site(echo)
    page = it.page()
    send(page, "one")
    answered(page)
    page.click(".answer [aria-label=Edit]")
    page.fill(".answer textarea", "My own **words**")
    page.press(".answer textarea", "Control+Enter")
    page.wait_for_selector(".markdown strong")
    assert texts(page, ".answer .branches") == ["2 / 2"]
    send(page, "two")
    page.wait_for_selector("text=Heard 3: two")
    assert sent(it) == ["one", "My own **words**", "two"]
    page.click(".answer [aria-label='Previous branch']")
    page.wait_for_selector("text=Heard 1: one")
    page.click(".answer [aria-label=Edit]")
    page.press(".answer textarea", "Escape")
    assert texts(page, ".answer .markdown") == ["Heard 1: one"]
    with page.expect_download() as found:
        page.click("[aria-label='Export as Markdown']")
    assert found.value.suggested_filename == "one.md"
    found.value.save_as(tmp_path / "one.md")
    assert (tmp_path / "one.md").read_text() == "# one\n\n## You\n\none\n\n## Answer\n\nHeard 1: one\n"


def test_notices_stay_until_they_are_closed(site: Callable[..., Site], tmp_path: Path) -> None:
    page = site(script("line\n\n" * 40)).page()
    send(page, "x")
    answered(page)
    for name in ("a.bin", "b.pdf"):
        (tmp_path / name).write_bytes(b"\xff\x00")
    page.set_input_files("#attach-files", [tmp_path / "a.bin", tmp_path / "b.pdf"])
    page.wait_for_selector(".notice >> text=b.pdf")
    assert [text.split()[0] for text in texts(page, ".notice")] == ["a.bin", "b.pdf"]
    until(page, f"{LEFT} < 2")  # the notices do not cover the end of the conversation
    page.click(".notice [aria-label='Close the message']")
    assert [text.split()[0] for text in texts(page, ".notice")] == ["b.pdf"]


def test_an_example_is_sent_and_the_shortcuts_are_listed(site: Callable[..., Site]) -> None:
    it = site(echo)
    page = it.page()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    page.wait_for_selector("#shortcuts[open] >> text=Search conversations")
    page.keyboard.press("Escape")
    page.fill("#prompt", "?")  # in a text field, it is a character
    assert page.locator("#shortcuts").is_hidden()
    page.fill("#prompt", "")
    example = texts(page, "#examples button")[2]
    page.click(f"#examples >> text={example}")
    page.wait_for_selector(f"text=Heard 1: {example}")
    assert page.locator("#examples").is_hidden()
