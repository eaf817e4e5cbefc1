"""The server process: listening, loading the model in the background, connection timeouts, and shutdown."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from localllm.generation.request import Started
from localllm.server.limits import ServerLimits
from localllm.server.run import ListenError, listen
from localllm.server.settings import ServerSettings
from tests.localllm.server.calls import served
from tests.localllm.server.scripted import ScriptedService, done, said, script
from tests.localllm.server.test_streams import wait_for

ROOT = Path(__file__).resolve().parents[3]


def connect(port: int, address: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20, (address, 0))


def ask(path: str = "/health", method: str = "GET", body: bytes = b"") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def until(client: socket.socket, end: bytes) -> bytes:
    """Read until `end` arrives or the connection is closed."""
    seen = b""
    while end not in seen and (new := client.recv(65536)):
        seen += new
    return seen


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            listen(ServerSettings(port=port))


@pytest.mark.parametrize("address", ["256.0.0.1.invalid", "192.0.2.1", "\x00", "a" * 300])
def test_addresses_that_cannot_be_had_are_one_line(address: str) -> None:
    with pytest.raises(ListenError) as caught:
        listen(ServerSettings(addresses=("127.0.0.1", address), port=0))
    assert "\n" not in str(caught.value)


def test_several_addresses_have_one_port() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        sockets = listen(ServerSettings(addresses=("127.0.0.1", "::1"), port=0))
    except ListenError:
        pytest.skip("no IPv6 loopback")
    assert len({each.getsockname()[1] for each in sockets}) == 1
    for each in sockets:
        each.close()


def test_requests_on_one_connection() -> None:
    with served(ScriptedService(script("a"))) as port, connect(port) as client:
        for _ in range(3):
            client.sendall(ask())
            assert b'{"status":"ok"}' in until(client, b"}")
        client.sendall(ask("/completion", "POST", b'{"prompt": "x"}'))
        assert b'"content":"a"' in until(client, b"}}")


def test_names_of_headers_are_written_as_usual() -> None:
    with served(ScriptedService(script("a"))) as port:
        for path in ("/health", "/metrics"):
            with connect(port) as client:
                client.sendall(ask(path))
                head = until(client, b"\r\n\r\n").partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]
            names = [line.partition(b":")[0].decode() for line in head]
            assert all(name == name.title() for name in names if name != "date")  # uvicorn adds the date header
            assert "Content-Type" in names
            assert len({name.lower() for name in names}) == len(names)
            assert ("Process-Start-Time-Unix" in names) is (path == "/metrics")


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_headers_that_do_not_come_close_the_connection(sent: bytes) -> None:
    with (
        served(ScriptedService(), ServerSettings(port=0, limits=ServerLimits(header_seconds=0.1))) as port,
        connect(port) as client,
    ):
        client.sendall(sent)
        assert closed(client)


def test_a_byte_now_and_then_does_not_keep_a_connection() -> None:
    with (
        served(ScriptedService(), ServerSettings(port=0, limits=ServerLimits(header_seconds=0.3))) as port,
        connect(port) as client,
    ):
        client.sendall(ask())
        until(client, b"}")
        client.settimeout(0.05)
        ended = False
        for letter in ask("/" + "x" * 2000):
            try:
                client.sendall(bytes([letter]))
                ended = client.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
            if ended:
                break
        assert ended


def test_headers_are_limited() -> None:
    with served(ScriptedService()) as port, connect(port) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"a" * 100_000)
        assert until(client, b"\r\n\r\n").startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize(("digits", "status"), [(11, b"413"), (19, b"413"), (20, b"413"), (21, b"400"), (400, b"400")])
def test_a_body_over_the_limit_is_refused_before_it_is_sent(digits: int, status: bytes) -> None:
    """An announced Content-Length over the limit gives 413 before the body is sent. h11 rejects lengths of more than 20
    digits with 400.
    """
    head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: %s\r\n\r\n{" % (b"9" * digits)
    with served(ScriptedService(), ServerSettings(port=0, limits=ServerLimits(body_bytes=1000))) as port:
        with connect(port) as client:
            client.sendall(head)
            seen = until(client, b"}}")
            assert seen.startswith(b"HTTP/1.1 " + status)
            assert (b"the body has %s bytes; the limit is 1000" % (b"9" * digits) in seen) == (status == b"413")
        with connect(port) as client:
            client.sendall(ask())
            assert until(client, b"}").startswith(b"HTTP/1.1 200")


def test_a_chunked_body_over_the_limit_is_refused() -> None:
    with (
        served(ScriptedService(), ServerSettings(port=0, limits=ServerLimits(body_bytes=1000))) as port,
        connect(port) as client,
    ):
        client.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.sendall(b"800\r\n" + b" " * 2048 + b"\r\n")
        assert until(client, b"}}").startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",  # a TLS handshake
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n\r\n\r\n\r\n\r\nnonsense\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_not_http_harms_nobody(sent: bytes) -> None:
    with served(ScriptedService(), ServerSettings(port=0, limits=ServerLimits(header_seconds=0.2))) as port:
        with connect(port) as client:
            client.sendall(sent)
            seen = until(client, b"\r\n\r\n")
            assert seen == b"" or seen.startswith(b"HTTP/1.1 ")
            assert b"HTTP/1.1 5" not in seen
        with connect(port) as client:
            client.sendall(ask())
            assert until(client, b"}").startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_cut_off() -> None:
    endless = [Started(1, 0), *said(*["x" * 1000] * 20_000)]
    service = ScriptedService(endless)
    with (
        served(service, ServerSettings(port=0, limits=ServerLimits(send_seconds=0.2))) as port,
        connect(port) as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(ask("/completion", "POST", b'{"prompt": "x", "stream": true}'))
        wait_for(lambda: service.closed == 1)


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", ask()])
def test_one_address_cannot_take_all_connections(sent: bytes) -> None:
    """One address gets at most half of the six connections plus one, which is four.

    Other addresses get the rest, and closed connections free their places.
    """
    with (
        served(ScriptedService(), ServerSettings(port=0, limits=ServerLimits(connections=6))) as port,
        ExitStack() as stack,
    ):
        held = [stack.enter_context(connect(port)) for _ in range(4)]
        for each in held:
            each.sendall(sent)
            if sent.endswith(b"\r\n\r\n"):
                assert b'{"status":"ok"}' in until(each, b"}")
        with connect(port) as refused:
            assert until(refused, b"\x00").startswith(b"HTTP/1.1 429 ")
        for _ in range(3):
            with _other(port) as other:
                other.sendall(ask())
                assert b'{"status":"ok"}' in until(other, b"}")
        held[0].close()
        wait_for(lambda: _answers(port))


def _other(port: int) -> socket.socket:
    try:
        return connect(port, "127.0.0.2")
    except OSError:
        pytest.skip("this system has no second loopback address")


def _answers(port: int) -> bool:
    with connect(port) as client:
        client.sendall(ask())
        return until(client, b"}").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/completion", "/tokenize"])
def test_a_client_that_ends_its_side_gets_its_answer(path: str) -> None:
    service = ScriptedService([Started(1, 0), 0.3, *said("late"), done()])
    with served(service) as port, connect(port) as client:
        client.sendall(ask(path, "POST", b'{"prompt": "x", "content": "x"}'))
        client.shutdown(socket.SHUT_WR)
        seen = until(client, b"\x00")
        while seen.startswith(b"HTTP/1.1 100 "):  # skip interim 100 responses, as clients do
            seen = seen.partition(b"\r\n\r\n")[2]
        assert seen.startswith(b"HTTP/1.1 200 ")
        assert (b"late" if path == "/completion" else b'"tokens"') in seen


def test_a_client_that_ends_its_side_within_a_request_is_gone() -> None:
    with served(ScriptedService()) as port, connect(port) as client:
        client.sendall(ask("/completion", "POST", b'{"prompt": "x"}')[:-3])
        client.shutdown(socket.SHUT_WR)
        assert until(client, b"\x00") == b""


@pytest.mark.parametrize("host", ["localhost", "evil.example"])
def test_a_broken_body_gets_one_response_and_no_error_in_the_log(host: str, caplog: pytest.LogCaptureFixture) -> None:
    head = f"POST /completion HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with served(ScriptedService(script("a"))) as port, connect(port) as client:
        client.sendall(head + b"-1\r\n")
        seen = until(client, b"\x00")
        assert seen.startswith(b"HTTP/1.1 400 ")
        assert seen.count(b"HTTP/1.1") == 1
    assert "unexpected error" not in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("first", [3600.0, said("a")[0]])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_ends_when_its_client_closes_the_connection(first: Any, stream: bool) -> None:
    service = ScriptedService([Started(1, 0), first, 3600.0, done()])
    with served(service) as port:
        with connect(port) as client:
            client.sendall(
                ask("/completion", "POST", b'{"prompt": "x", "stream": true}' if stream else b'{"prompt": "x"}')
            )
            wait_for(lambda: bool(service.asked))
        wait_for(lambda: service.closed == 1)


def test_two_ends_of_a_body_close_the_connection() -> None:
    """A request with both Transfer-Encoding and Content-Length is rejected.

    Otherwise a proxy could treat the rest of the body as a second request.
    """
    hidden = ask("/slots")
    with served(ScriptedService(script("a"))) as port, connect(port) as client:
        head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        client.sendall(head + b"Content-Length: %d\r\n\r\n0\r\n\r\n" % (5 + len(hidden)) + hidden)
        seen = until(client, b"\x00")
        assert seen.startswith(b"HTTP/1.1 400 ")
        assert seen.count(b"HTTP/1.1") == 1


# -- shutdown --------------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from localllm.base.errors import LocalLLMError
from localllm.generation.request import Started
from localllm.server.admission import Admission
from localllm.server.app import make_app
from localllm.server.run import listen, run_server
from localllm.server.settings import ServerSettings
from tests.localllm.server.scripted import Model, ScriptedService, done, said
settings = ServerSettings(port=0)
sockets = listen(settings)
print(sockets[0].getsockname()[1], flush=True)
model = Model(state="loading")
service = ScriptedService([Started(1, 0), *said("a"), float(sys.argv[1]), *said("last"), done()], [model])
async def load():
    await asyncio.sleep(0.1)
    if len(sys.argv) > 2:
        raise LocalLLMError("the file is broken")
    model.state = "loaded"
admission = Admission(settings.limits)
try:
    run_server(make_app(service, settings, admission=admission), settings, admission, sockets, load)
except LocalLLMError as error:
    print(error, flush=True)
print("closed", service.closed, flush=True)
"""


class Program:
    """`localllm serve` in a separate process."""

    def __init__(self, *words: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out.decode(), err.decode()

    def ready(self) -> None:
        for _ in range(500):
            with connect(self.port) as client:
                client.sendall(ask())
                seen = until(client, b"}")
            if b" 200 " in seen:
                return
            assert b'"status":"loading model"' in seen
            time.sleep(0.02)
        raise AssertionError("not ready")

    def stream(self) -> socket.socket:
        """Start a streamed answer, and return the socket after the first word."""
        client = connect(self.port)
        client.sendall(ask("/completion", "POST", b'{"prompt": "x", "stream": true}'))
        assert b'"content":"a"' in until(client, b"}\n\n")
        return client


def closed(client: socket.socket) -> bool:
    """Return whether the peer has closed or reset the connection."""
    try:
        return until(client, b"\x00") == b""
    except OSError:
        return True


def test_a_signal_lets_answers_end() -> None:
    program = Program("1.0")
    program.ready()
    with program.stream() as client:
        program.process.send_signal(signal.SIGTERM)
        rest = until(client, b"\x00")
        assert b'"content":"last"' in rest
        assert b'"stop":true' in rest
    code, out, err = program.ended()
    assert (code, out, err) == (0, "closed 1\n", "")


def test_a_second_signal_ends_them() -> None:
    program = Program("3600")
    program.ready()
    with program.stream() as client:
        program.process.send_signal(signal.SIGTERM)
        refused = False
        for _ in range(500):  # until the first signal takes effect and new connections are refused
            try:
                connect(program.port).close()
            except OSError:
                refused = True
                break
            time.sleep(0.02)
        assert refused
        program.process.send_signal(signal.SIGTERM)
        code, out, _ = program.ended()
        assert (code, out) == (0, "closed 1\n")
        assert closed(client)


def test_a_second_signal_is_quiet_with_many_streams() -> None:
    program = Program("3600")
    program.ready()
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(program.stream())
        program.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        program.process.send_signal(signal.SIGTERM)
        code, out, err = program.ended()
    assert (code, out, err) == (0, "closed 12\n", "")


def test_a_model_that_cannot_be_loaded_stops_the_server() -> None:
    code, out, err = Program("0", "broken").ended()
    assert (code, out, err) == (0, "the file is broken\nclosed 0\n", "")
