"""The web page in headless Chromium, with answers that the test chooses.

Needs the `playwright` package, and Chromium on the PATH (Debian's `chromium`); skipped without them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from localllm.server.settings import Settings, digest
from localllm.server.turn import Turn
from tests.localllm.server.calls import served
from tests.localllm.server.scripted import Model, ScriptedService, Step, called, done, said, script, thought

sync_api = pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")
Answers = Callable[[Any], Sequence[Step]]
LONG = 60.0  # seconds that a paused answer waits: longer than any test
HOSTILE = """\
<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"><svg onload="window.hacked = 3">

<a href="javascript:window.hacked=4">raw link</a> [md link](javascript:window.hacked=5) [data](data:text/html,x)
[own path](/slots/0?action=erase) [outside](https://example.org/a) ![picture](https://example.org/leak.png)

<style>body { display: none }</style><div id="prompt" class="skip" style="position:fixed;inset:0">over the page</div>
<form action="/completion"><button>send</button></form><iframe src="/"></iframe><base href="https://example.org/">

```"><script>window.hacked=6</script>
</code></pre><script>window.hacked = 7</script>
```

"""
SCROLLS = """(frame) => {  // what is too wide scrolls in a frame that is in sight
    const found = document.querySelector(frame);
    return found.scrollWidth > found.clientWidth && found.getBoundingClientRect().right <= innerWidth;
}"""
COUNT = """() => new Promise((done) => {
    indexedDB.open("localllm").onsuccess = (opened) => {
        const messages = opened.target.result.transaction("messages").objectStore("messages");
        messages.count().onsuccess = (counted) => done(counted.target.result);
    };
})"""
TABLE = "|" + "|".join(f" column number {n} " for n in range(80)) + "|\n|" + "---|" * 80 + "\n"
TABLE += ("|" + "|".join("wide" for _ in range(80)) + "|\n") * 50


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield made
        made.close()


class Site:
    """A server whose answers are scripted, and the pages of one browser profile."""

    def __init__(self, browser: Any, service: ScriptedService, port: int) -> None:
        self.service = service
        self.url = f"http://127.0.0.1:{port}/"
        self.context = browser.new_context()
        self.context.set_default_timeout(10_000)
        self.problems: list[str] = []
        self.asked: list[str] = []  # the addresses of all requests

    def page(self, address: str = "", ready: bool = True, **viewport: int) -> Any:
        page = self.context.new_page()
        if viewport:
            page.set_viewport_size(viewport)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(address or self.url)
        if ready:
            page.wait_for_selector("html[data-ready]")
        return page


@pytest.fixture
def site(browser: Any) -> Iterator[Callable[..., Site]]:
    """Give a function that starts a server with answers and settings. At the end no page has had an error."""
    opened: list[tuple[Any, Site]] = []

    def start(answers: Answers | Sequence[Step], settings: Settings | None = None, **more: Any) -> Site:
        service = ScriptedService(answers, **more)
        context = served(service, settings or Settings(port=0))
        made = Site(browser, service, context.__enter__())
        opened.append((context, made))
        return made

    yield start
    for context, each in opened:
        each.context.close()
        context.__exit__(None, None, None)
        assert each.problems == []
        assert [url for url in each.asked if not url.startswith((each.url, "blob:"))] == []


def send(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true. The page's policy forbids eval, which Playwright's own function needs."""
    for _ in range(500):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never true: {expression}")


def answered(page: Any, count: int = 1) -> None:
    """Wait until so many answers are shown whole."""
    until(
        page,
        f"document.querySelectorAll('.answer[aria-busy=false] .stats').length === {count}"
        " && document.querySelectorAll('[aria-busy=true]').length === 0",
    )


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def echo(turn: Turn) -> list[Step]:
    """Answer with how many answers were asked for and what was said last, as words of the conversation show it."""
    return script(f"Heard {len(turn.messages)}: {turn.messages[-1]['content']}")


def last_turn(site: Site) -> Turn:
    turn = site.service.asked[-1]
    assert isinstance(turn, Turn)
    return turn


def test_an_answer_streams_with_markdown_code_thoughts_and_numbers(site: Callable[..., Site]) -> None:
    end = [*said("print(1)\n```\n\nDone."), done("end", 20, 12, answer_tokens=3)]
    it = site([*thought("Let me ", "see."), *said("**Bold** and\n\n```python\n"), 0.7, *end])
    page = it.page()
    send(page, "Hello")
    page.wait_for_selector(".markdown strong")  # shown before the answer has ended
    assert page.locator(".answer").get_attribute("aria-busy") == "true"
    assert page.locator("#stop").is_visible()
    answered(page)
    assert texts(page, ".markdown strong") == ["Bold"]
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
    assert len(texts(page, ".branches")) == 2  # both forks outlive the reload
    assert count == 3


def test_a_reload_in_the_middle_keeps_what_was_written(site: Callable[..., Site]) -> None:
    it = site([*said("The first half"), 0.5, *said(" and more"), LONG])
    page = it.page()
    send(page, "Go")
    page.wait_for_selector("text=The first half and more")
    page.wait_for_timeout(100)
    page.reload()
    page.wait_for_selector("text=Cut off")
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
    two.wait_for_selector("text=Heard 1: first")  # written by the other tab
    answered(one)
    answered(two)
    assert two.locator("text=Cut off").count() == 0
    send(two, "second")
    answered(two, 2)
    one.wait_for_selector("text=Heard 3: second")
    assert texts(one, ".plain-text") == texts(two, ".plain-text") == ["first", "second"]
    send(one, "first")
    one.wait_for_selector("[aria-busy=true]")
    two.hover("#conversations li")
    two.click("[aria-label='Delete first']")  # while the other tab writes in it
    two.click("#ask-yes")
    one.wait_for_selector("text=No conversations yet")
    assert one.locator("#welcome").is_visible()
    one.wait_for_timeout(600)  # longer than the tab waits between two saves
    assert one.evaluate(COUNT) == 0
    assert it.service.closed == 3


def test_a_hostile_answer_changes_nothing(site: Callable[..., Site]) -> None:
    it = site([*thought("<img src=x onerror='window.hacked=8'>"), *said(HOSTILE, TABLE), done()])
    page = it.page(width=800, height=700)
    before = page.evaluate("[document.querySelectorAll('script,style,form,dialog,iframe,base').length, document.title]")
    width = page.evaluate("document.documentElement.scrollWidth")
    send(page, "x")
    answered(page)
    assert page.evaluate("window.hacked") is None
    after = page.evaluate("[document.querySelectorAll('script,style,form,dialog,iframe,base').length]")
    assert after == before[:1]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(SCROLLS, ".table")
    assert page.locator("#messages img, #messages svg[onload], #messages [style], #messages [id]").count() == 0
    assert page.locator("#messages .skip").count() == 0
    links = page.eval_on_selector_all(
        "#messages .markdown a[href]", "all => all.map(a => [a.getAttribute('href'), a.rel])"
    )
    rel = "noopener noreferrer nofollow"
    assert links == [["https://example.org/a", rel], ["https://example.org/leak.png", rel]]
    assert "<script>window.hacked = 1</script>" in texts(page, ".markdown")[0]  # shown as it was written
    assert page.locator("#prompt").is_visible()
    send(page, "still works")
    answered(page, 2)


def test_a_hostile_title_file_name_model_and_import_are_text(site: Callable[..., Site], tmp_path: Path) -> None:
    name = "<img src=x onerror=window.hacked=1>"
    it = site(script("ok"), all_models=[Model(id=name)])
    page = it.page()
    message = {
        "id": "a",
        "parent": None,
        "role": "user",
        "content": name,
        "created": 1,
        "files": [{"name": name, "text": name}],
    }
    circle = [
        message,
        {"id": "b", "parent": "c", "role": "assistant", "content": "x"},
        {"id": "c", "parent": "b", "role": "tool"},
    ]
    talk = {
        "title": name,
        "messages": [*circle, None, {"id": "d", "role": "evil"}],
        "leaf": "a",
        "settings": {"system": 3},
    }
    file = tmp_path / "in.json"
    file.write_text(json.dumps({"format": "localllm-conversations", "version": 1, "conversations": [talk]}))
    page.set_input_files("#import-file", file)
    page.wait_for_selector(".you")
    assert texts(page, "#title") == [name]
    assert texts(page, ".plain-text") == [name]
    send(page, "go on")
    answered(page)
    assert page.evaluate("window.hacked") is None
    for text, problem in (("no", "it is not JSON"), ("{}", "not an export of this page")):
        file.write_text(text)
        page.set_input_files("#import-file", file)
        page.wait_for_selector(f"#problem >> text={problem}")


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
    page.set_viewport_size({"width": 1000, "height": 640})  # turned to landscape with the list open
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
    keys.press("ArrowUp")  # in an empty box: edit the last message
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


def test_a_key_is_asked_for_and_kept(site: Callable[..., Site]) -> None:
    it = site(script("Hi"), Settings(port=0, keys=frozenset({digest("secret")})))
    page = it.page(ready=False)
    page.wait_for_selector("#key[open] >> text=requires a key")
    page.fill("#key-value", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key[open] >> text=does not know this key")
    page.fill("#key-value", "secret")
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-ready]")
    send(page, "Hello")
    answered(page)
    again = it.page()
    assert again.locator("#key").is_hidden()
    assert again.locator("#model").input_value() == "tiny"


def test_settings_files_and_the_model_are_sent(site: Callable[..., Site], tmp_path: Path) -> None:
    it = site(echo, all_models=[Model(), Model(id="other"), Model(id="vectors", capabilities=("embedding",))])
    page = it.page()
    assert texts(page, "#model option") == ["tiny", "other"]
    page.select_option("#model", "other")
    page.click("#open-settings")
    page.fill("#set-system", "Be brief.")
    page.fill("#set-temperature", "0.25")
    page.fill("#set-max_tokens", "99")
    page.click("#save-settings")
    (tmp_path / "a.txt").write_text("line ``` one\n")
    (tmp_path / "b.bin").write_bytes(b"\xff\x00")
    page.set_input_files("#attach-files", [tmp_path / "a.txt", tmp_path / "b.bin"])
    page.wait_for_selector("#problem >> text=b.bin is not a text")
    send(page, "Read this")
    answered(page)
    turn = last_turn(it)
    assert it.service.names[-1] == "other"
    assert turn.messages[0] == {"role": "system", "content": "Be brief."}
    assert turn.messages[1]["content"] == "Read this\n\nFile a.txt:\n````\nline ``` one\n\n````"
    assert (turn.generation.sampling, turn.generation.max_tokens) == ({"temperature": 0.25}, 99)
    assert texts(page, ".file summary") == ["a.txt"]


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
    assert texts(page, ".plain-text") == ["banana"]  # the question stands above its answer
