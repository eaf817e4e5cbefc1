"""`localllm web`: the URL and the browser that it opens."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

from localllm.cli.commands.page import open_page, page_address
from localllm.cli.main import main
from tests.localllm.support import REPOSITORY


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/"),
        ("0.0.0.0", "http://localhost:80/"),
        ("::", "http://localhost:80/"),
        ("::1", "http://[::1]:80/"),
        ("box.local", "http://box.local:80/"),
    ],
)
def test_the_address_is_one_that_a_browser_here_reaches(address: str, url: str) -> None:
    assert page_address(address, 80) == url


def test_a_text_browser_or_none_shows_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Browser(webbrowser.BaseBrowser):
        def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:
            opened.append(url)
            return True

    monkeypatch.setattr(webbrowser, "get", lambda: Browser("firefox"))
    assert open_page("http://localhost/")
    monkeypatch.setattr(webbrowser, "get", lambda: Browser("lynx"))
    assert not open_page("http://localhost/")
    assert opened == ["http://localhost/"]

    def none() -> webbrowser.BaseBrowser:
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "get", none)
    assert not open_page("http://localhost/")


def test_web_serves_the_demo_and_opens_its_page(tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    code = (
        "import sys, pathlib, webbrowser; from localllm.cli.main import main\n"
        "class Browser(webbrowser.BaseBrowser):\n"
        "    def open(self, url, new=0, autoraise=True):\n"
        "        import urllib.request\n"
        "        page = urllib.request.urlopen(urllib.request.Request(url, headers={'Accept': 'text/html'})).read()\n"
        "        pathlib.Path(sys.argv[1]).write_bytes(page)\n"
        "        import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return True\n"
        "webbrowser.get = lambda: Browser('test')\n"
        "sys.exit(main(['web', '--port', '0', '-t', '1', '--backend', 'cpu']))\n"
    )
    command = [sys.executable, "-c", code, str(opened)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 128 + signal.SIGTERM), done.stderr
    assert re.search(r"listening on http://127\.0\.0\.1:\d+", done.stderr)
    assert "<title>localllm</title>" in opened.read_text()


def test_web_without_its_page_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["web", "demo", "--no-web"]) == 2
    assert "give one of them" in capsys.readouterr().err
