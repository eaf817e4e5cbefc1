"""Fetching URLs: one resolution per request, a check of every redirect, and limits of size and time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from localllm.media import MediaError
from localllm.server import media_urls

NAME = "pictures.test"  # resolves to this computer, as if it were public


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        seen: list[str] = self.server.seen  # type: ignore[attr-defined]
        seen.append(f"{self.headers['Host']} {self.path}")
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        if self.path == "/slow":
            for _ in range(50):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
        self.wfile.write(b"x" * (200 if self.path == "/large" else 5))

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str], list[str]]]:
    """Return the URL of a server, its requests, and the names that were resolved."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.seen, resolved = [], list[str]()  # type: ignore[attr-defined]
    real = media_urls._is_public
    known = socket.getaddrinfo

    def resolve(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        resolved.append(host)
        return known("127.0.0.1" if host == NAME else host, port, *args, **kwargs)

    monkeypatch.setattr(media_urls.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(media_urls, "_is_public", lambda address: resolved[-1] == NAME or real(address))
    monkeypatch.setattr(media_urls, "_is_own", lambda address: False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with closing(server.socket):
        yield f"http://{NAME}:{server.server_address[1]}", server.seen, resolved  # type: ignore[attr-defined]
        server.shutdown()


def test_a_file_is_fetched_from_the_address_that_was_checked(site: tuple[str, list[str], list[str]]) -> None:
    url, seen, resolved = site
    assert media_urls.fetch(f"{url}/a.png?b=1#c", 100, 5) == b"xxxxx"
    assert seen == [f"{url.removeprefix('http://')} /a.png?b=1"]
    assert [name for name in resolved if name == NAME] == [NAME]  # once


def test_redirects_are_checked_again(site: tuple[str, list[str], list[str]]) -> None:
    url, seen, _ = site
    assert media_urls.fetch(f"{url}/to//a.png", 100, 5) == b"xxxxx"
    for target, problem in (
        (f"http://127.0.0.1:{url.rpartition(':')[2]}/a", "127.0.0.1: not a public address"),
        ("file:///etc/passwd", "expected an http or https URL"),
        ("/to//to//to//to//a", "redirects more than 3 times"),
    ):
        with pytest.raises(MediaError, match=problem):
            media_urls.fetch(f"{url}/to/{target}", 100, 5)
    assert not any("/etc" in each.partition(" /to/")[0] for each in seen)


def test_limits(site: tuple[str, list[str], list[str]]) -> None:
    url, _, _ = site
    with pytest.raises(MediaError, match="sends more than 100 bytes; send a smaller file"):
        media_urls.fetch(f"{url}/large", 100, 5)
    with pytest.raises(MediaError, match="answered with status 404"):
        media_urls.fetch(f"{url}/none", 100, 5)
    began = time.monotonic()
    with pytest.raises(MediaError, match="takes too long"):
        media_urls.fetch(f"{url}/slow", 100, 0.3)
    assert time.monotonic() - began < 2
