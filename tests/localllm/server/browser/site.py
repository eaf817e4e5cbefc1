"""A server with scripted answers, the pages of one browser profile, and helpers for browser tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from localllm.server.turn import Turn
from tests.localllm.server.browser.managed import Management
from tests.localllm.server.scripted import ScriptedService, Step, script

Answers = Callable[[Any], Sequence[Step]]
LONG = 60.0  # pause of a held answer in seconds, longer than any test
SCROLLS = """(frame) => {  // what is too wide scrolls in a frame that is in sight
    const found = document.querySelector(frame);
    return found.scrollWidth > found.clientWidth && found.getBoundingClientRect().right <= innerWidth;
}"""
TABLE = "|" + "|".join(f" column number {n} " for n in range(80)) + "|\n|" + "---|" * 80 + "\n"
TABLE += ("|" + "|".join("wide" for _ in range(80)) + "|\n") * 50


class Site:
    """A server with scripted answers, and the pages that one browser profile opens on it."""

    def __init__(self, browser: Any, service: ScriptedService, port: int, management: Management | None = None) -> None:
        self.service = service
        self.management = management
        self.url = f"http://127.0.0.1:{port}/"
        self.context = browser.new_context()
        self.context.set_default_timeout(10_000)
        self.problems: list[str] = []
        self.asked: list[str] = []  # URLs of all requests that the pages made

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


def send(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def until(page: Any, expression: str) -> None:
    """Wait until a JavaScript expression is true.

    Playwright's wait_for_function needs eval, which the page's CSP forbids.
    """
    for _ in range(500):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never true: {expression}")


def answered(page: Any, count: int = 1) -> None:
    """Wait until the page shows `count` complete answers."""
    until(
        page,
        f"document.querySelectorAll('.answer[aria-busy=false] .stats').length === {count}"
        " && document.querySelectorAll('[aria-busy=true]').length === 0",
    )


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def echo(turn: Turn) -> list[Step]:
    """Return an answer with the number of messages in the request and the last message."""
    return script(f"Heard {len(turn.messages)}: {turn.messages[-1]['content']}")


def last_turn(site: Site) -> Turn:
    turn = site.service.asked[-1]
    assert isinstance(turn, Turn)
    return turn
