"""Fixtures for headless Chromium. Tests are skipped without the `playwright` package or without Chromium on
the PATH.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from localllm.server.settings import ServerSettings
from tests.localllm.server.browser.managed import Management
from tests.localllm.server.browser.site import Answers, Site
from tests.localllm.server.calls import served
from tests.localllm.server.scripted import ScriptedService, Step


@pytest.fixture(scope="module")  # module scope, because Playwright's event loop would disturb other tests
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def site(browser: Any) -> Iterator[Callable[..., Site]]:
    """Yield a function that starts a server with scripted answers. Afterwards, check that no page had an error."""
    opened: list[tuple[Any, Site]] = []

    def start(
        answers: Answers | Sequence[Step],
        settings: ServerSettings | None = None,
        manage: Callable[[ScriptedService], Management] | None = None,
        **more: Any,
    ) -> Site:
        service = ScriptedService(answers, **more)
        management = manage(service) if manage is not None else None
        routes = management.routes() if management is not None else ()
        context = served(service, settings or ServerSettings(port=0), routes)
        made = Site(browser, service, context.__enter__(), management)
        opened.append((context, made))
        return made

    yield start
    for context, each in opened:
        each.context.close()
        context.__exit__(None, None, None)
        assert each.problems == []
        assert [url for url in each.asked if not url.startswith((each.url, "blob:"))] == []
