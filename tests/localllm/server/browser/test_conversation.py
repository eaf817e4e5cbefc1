"""Conversations on the web page: streaming, stopping, branches, reloads, two tabs, keyboard, and small screens."""

from __future__ import annotations

from collections.abc import Callable

from localllm.server.turn import Turn
from tests.localllm.server.browser.site import LONG, SCROLLS, TABLE, Site, answered, echo, send, texts, until
from tests.localllm.server.scripted import Step, done, said, script, thought

WRITE = """(records) => new Promise((done) => {
    indexedDB.open("localllm").onsuccess = (opened) => {
        const transaction = opened.target.result.transaction(["conversations", "messages"], "readwrite");
        for (const [store, record] of records) transaction.objectStore(store).put(record);
        transaction.oncomplete = () => done();
    };
})"""
SETTINGS = {"system": "", "sampling": {}, "tools": ""}
TALK = {"id": "t", "title": "talk", "created": 1, "updated": 1, "leaf": "a", "settings": SETTINGS}
ANSWER = {
    "id": "a", "conversation": "t", "parent": None, "role": "assistant", "created": 1, "content": "the beginning",
    "thought": "", "calls": [], "status": "streaming",
}  # fmt: skip
COUNT = """() => new Promise((done) => {
    indexedDB.open("localllm").onsuccess = (opened) => {
        const messages = opened.target.result.transaction("messages").objectStore("messages");
        messages.count().onsuccess = (counted) => done(counted.target.result);
    };
})"""


def test_an_answer_streams_with_markdown_code_thoughts_and_numbers(site: Callable[..., Site]) -> None:
    end = [*said("print(1)\n```\n\nDone."), done("end", 20, 12, answer_tokens=3)]
    it = site([*thought("Let me ", "see."), *said("**Bold** and\n\n```python\n"), 0.7, *end])
    page = it.page()
    send(page, "Hello")
    page.wait_for_selector(".markdown strong")  # Markdown is rendered before the answer is complete
    assert page.locator(".answer").get_attribute("aria-busy") == "true"
    assert page.locator("#stop").is_visible()
    page.wait_for_selector(".note >> text=/3 tokens · [0-9.]+ tokens.s/")  # statistics while the answer streams
    answered(page)
    assert texts(page, ".markdown strong") == ["Bold"]
    assert texts(page, ".note") == [""]
    assert texts(page, ".markdown .hljs-built_in") == ["print"]
    assert not page.locator(".thought-text").is_visible()
    page.click(".thought summary")
    assert texts(page, ".thought-text") == ["Let me see."]
    assert "12 of 20 prompt tokens cached" in texts(page, ".stats")[0]
    assert "tokens/s" in texts(page, ".stats")[0]
    assert "Done." in page.locator("#status").inner_text()


def test_stop_keeps_what_was_written_and_the_server_ends_the_answer(site: Callable[..., Site]) -> None:
    it = site(lambda turn: script("all of it") if turn.messages[-1]["role"] == "assistant" else [*said("A part"), LONG])
    page = it.page()
    send(page, "Go")
    page.wait_for_selector("text=A part")
    page.keyboard.press("Escape")
    page.wait_for_selector("text=Stopped.")
    assert texts(page, ".markdown") == ["A part"]
    until(page, "document.activeElement.id === 'prompt'")
    page.click("[aria-label=Continue]")
    answered(page)
    assert texts(page, ".markdown") == ["A partall of it"]
    assert it.service.closed == 2


def test_edits_and_regenerations_are_branches_that_the_arrows_switch(site: Callable[..., Site]) -> None:
    count = 0

    def answers(turn: Turn) -> list[Step]:
        nonlocal count
        count += 1
        return script(f"answer {count} to {turn.messages[-1]['content']}")

    it = site(answers)
    page = it.page()
    send(page, "one")
    answered(page)
    page.click("[aria-label='Answer again']")
    page.wait_for_selector("text=answer 2 to one")
    assert texts(page, ".answer .branches") == ["2 / 2"]
    page.click(".answer [aria-label='Previous branch']")
    page.wait_for_selector("text=answer 1 to one")
    page.hover(".you")
    page.click(".you [aria-label=Edit]")
    page.fill(".you textarea", "two")
    page.press(".you textarea", "Enter")
    page.wait_for_selector("text=answer 3 to two")
    assert texts(page, ".you .branches") == ["2 / 2"]
    page.click(".you [aria-label='Previous branch']")
    page.wait_for_selector("text=1 / 2 >> visible=true")
    assert texts(page, ".plain-text") == ["one"]
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert texts(page, ".plain-text") == ["one"]
    assert len(texts(page, ".branches")) == 2  # both branches survive the reload
    assert count == 3


def test_a_reload_in_the_middle_keeps_what_was_written(site: Callable[..., Site]) -> None:
    it = site([*said("The first half"), 0.5, *said(" and more"), LONG])
    page = it.page()
    send(page, "Go")
    page.wait_for_selector("text=The first half and more")
    page.wait_for_timeout(100)
    page.reload()
    page.wait_for_selector("text=Interrupted")
    assert texts(page, ".markdown")[0].startswith("The first half")
    assert page.locator("[aria-label=Continue]").count() == 1
    assert page.locator("#send").is_visible()


def test_two_tabs_see_the_same_and_neither_loses_anything(site: Callable[..., Site]) -> None:
    it = site(
        lambda turn: [*said("slow "), 1.0, *echo(turn)] if turn.messages[-1]["content"] == "first" else echo(turn)
    )
    one = it.page()
    send(one, "first")
    one.wait_for_selector("text=slow")
    two = it.page(one.url)
    two.wait_for_selector("text=Heard 1: first")  # the other tab saved the answer
    answered(one)
    answered(two)
    assert two.locator("text=Interrupted").count() == 0
    send(two, "second")
    answered(two, 2)
    one.wait_for_selector("text=Heard 3: second")
    assert texts(one, ".plain-text") == texts(two, ".plain-text") == ["first", "second"]
    send(one, "first")
    one.wait_for_selector("[aria-busy=true]")
    two.hover("#conversations li")
    two.click("[aria-label='Delete first']")  # while the answer streams in the other tab
    two.click("#ask-yes")
    one.wait_for_selector("text=No conversations yet")
    assert one.locator("#welcome").is_visible()
    one.wait_for_timeout(600)  # longer than the tab's save interval
    assert one.evaluate(COUNT) == 0
    assert it.service.closed == 3


def test_an_answer_that_ends_while_another_tab_opens_it_is_not_taken_for_a_cut_one(site: Callable[..., Site]) -> None:
    it = site(script("Hi"))
    page = it.page()
    page.evaluate(WRITE, [["conversations", TALK], ["messages", ANSWER]])
    page.goto(it.url + "#t")
    page.reload()
    page.wait_for_selector("text=the beginning")
    page.evaluate(WRITE, [["messages", ANSWER | {"content": "the beginning and the end", "status": "done"}]])
    # the page checks for 700 ms whether another tab still writes the answer
    page.wait_for_selector("text=the beginning and the end")
    assert page.locator("text=Interrupted").count() == 0


def test_a_phones_width_has_no_sideways_scrolling(site: Callable[..., Site]) -> None:
    it = site(script("x" * 500, "\n\n```\n", "y" * 500, "\n```\n\n", TABLE))
    page = it.page(width=360, height=640)
    assert not page.locator("#sidebar").is_visible()
    send(page, "z" * 300)
    answered(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate(SCROLLS, ".code pre")
    assert page.evaluate(SCROLLS, ".table")
    page.click("#open-sidebar")
    assert page.locator("#conversations .open").is_visible()
    page.keyboard.press("Escape")
    page.wait_for_selector("#sidebar", state="hidden")
    page.click("#open-sidebar")
    page.set_viewport_size({"width": 1000, "height": 640})  # rotate to landscape while the list is open
    page.wait_for_selector("#sidebar")
    send(page, "again")
    answered(page, 2)


def test_everything_can_be_done_with_the_keyboard(site: Callable[..., Site]) -> None:
    it = site(echo)
    page = it.page()
    keys = page.keyboard
    keys.type("first line")
    keys.press("Shift+Enter")
    keys.type("second line")
    keys.press("Enter")
    answered(page)
    assert texts(page, ".plain-text") == ["first line\nsecond line"]
    keys.press("ArrowUp")  # in an empty input box: edit the last message
    page.wait_for_selector(".you textarea:focus")
    keys.type(" more")
    keys.press("Enter")
    page.wait_for_selector("text=second line more")
    answered(page)
    keys.press("Control+Shift+O")
    page.wait_for_selector("#welcome")
    keys.type("other")
    keys.press("Enter")
    answered(page)
    keys.press("Control+k")
    keys.type("SECOND more")
    until(page, "document.querySelectorAll('#conversations .open').length === 1")
    keys.press("ArrowDown")
    keys.press("Enter")
    page.wait_for_selector("text=second line more")
    keys.press("Control+,")
    page.wait_for_selector("#settings[open]")
    keys.press("Escape")
    page.wait_for_selector("#settings", state="hidden")
    unnamed = page.eval_on_selector_all(
        "button, input:not([hidden]), textarea, select",
        "all => all.filter(e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)",
    )
    assert unnamed == []
