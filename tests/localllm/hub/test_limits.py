"""A hub whose answers have no end: nothing fills the memory or waits forever."""

from __future__ import annotations

import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from localllm.hub import StoreError, limits
from localllm.hub.client import Hub
from tests.localllm.hub.hub_server import Repo, described

Answer = Callable[["_Handler"], None]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer: Answer
    sent: ClassVar[list[int]] = []  # bytes of each part

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        with suppress(OSError):
            type(self).answer(self)

    def begin(self, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Transfer-Encoding": "chunked", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def part(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.sent.append(len(data))


@pytest.fixture
def hub_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Hub]]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(limits, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "MOST_SECONDS", 1.0)
    servers: list[ThreadingHTTPServer] = []

    def hub(answer: Answer) -> Hub:
        _Handler.sent.clear()
        handler = type("Handler", (_Handler,), {"answer": staticmethod(answer)})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return Hub(f"http://127.0.0.1:{server.server_address[1]}")

    yield hub
    for server in servers:
        server.shutdown()
        server.server_close()


def _endless(one: _Handler, status: int = 200, **headers: str) -> None:
    one.begin(status, **headers)
    for _ in range(2000):  # 120 MB
        one.part(b'{"siblings": "' + b"x" * 60_000)


def _bomb(one: _Handler) -> None:
    one.begin(Content_Encoding="gzip")
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    one.part(packer.compress(b"[") + packer.flush(zlib.Z_SYNC_FLUSH))
    for _ in range(20):
        one.part(packer.compress(b" " * (1 << 24)) + packer.flush(zlib.Z_SYNC_FLUSH))


def _slow(one: _Handler) -> None:
    one.begin()
    for _ in range(40):
        one.part(b" ")
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (_endless, "longer than 1 MiB"),
        (lambda one: _endless(one, 404), "longer than 1 MiB"),
        (lambda one: _endless(one, 302, Location="/elsewhere"), "longer than 1 MiB"),
        (_bomb, "longer than 1 MiB"),
        (_slow, "longer than"),
        (lambda one: _endless(one, Content_Encoding="br"), "unknown encoding"),
    ],
    ids=["list", "error", "redirect", "gzip", "slow", "encoding"],
)
def test_an_answer_without_an_end_is_refused(hub_of: Callable[[Answer], Hub], answer: Answer, problem: str) -> None:
    hub = hub_of(answer)
    for ask in (lambda: hub.listing("ann/Toy-GGUF"), lambda: hub.search("toy", 5)):
        began = time.monotonic()
        with pytest.raises(StoreError, match=problem):
            ask()
        assert time.monotonic() - began < 3
    assert sum(_Handler.sent) < 20 << 20


def test_a_compressed_list_is_read(hub_of: Callable[[Answer], Hub]) -> None:
    def answer(one: _Handler) -> None:
        assert one.headers["Accept-Encoding"] == "gzip"
        one.begin(Content_Encoding="gzip")
        data = gzip.compress(json.dumps(described("ann/Toy-GGUF", Repo({"Toy-Q4_0.gguf": b"x" * 100}))).encode())
        for at in range(0, len(data), 50):
            one.part(data[at : at + 50])
        one.wfile.write(b"0\r\n\r\n")

    assert list(hub_of(answer).listing("ann/Toy-GGUF").files) == ["Toy-Q4_0.gguf"]
