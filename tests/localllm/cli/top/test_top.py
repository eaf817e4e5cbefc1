"""`localllm top` on a real server with the bundled model, and on servers of other programs."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.app import UsageError
from localllm.cli.main import main
from localllm.cli.top import asking
from localllm.cli.top.asking import Client, Look, address_of
from localllm.cli.top.numbers import buckets_of, total, view_of
from localllm.server.metrics import Metrics
from localllm.server.settings import ServerSettings, digest
from tests.localllm.server.calls import served
from tests.localllm.server.scripted import ScriptedService
from tests.localllm.support import PROGRAM, REPOSITORY, Terminal

KEY = "a-key-of-the-test"


@contextmanager
def program(folder: Path, *words: str) -> Iterator[str]:
    """Run `localllm serve demo` in a process; yield its URL."""
    keys, log = folder / "keys", folder / "log"
    keys.write_text(f"{KEY}\nanother\n")
    command = [*PROGRAM, "serve", "demo", "--port", "0", "-t", "1", "--backend", "cpu", "-np", "2"]
    command += ["--api-key-file", str(keys), *words]
    with log.open("wb") as to:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=to, stderr=to)
    try:
        for _ in range(1200):
            if found := re.search(r"listening on (http://\S+)", log.read_text()):
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        assert found is not None
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with program(tmp_path_factory.mktemp("server")) as url:
        yield url


def ask(url: str, **fields: Any) -> http.client.HTTPResponse:
    """Send a chat request, and return the response as soon as its headers arrive."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection.getresponse()


def look(url: str) -> Look:
    return Client(address_of(url), KEY).look()


def test_the_numbers_are_those_of_the_answers(server: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = look(server)
    used = [json.load(ask(server, max_tokens=count, ignore_eos=True))["usage"] for count in (5, 12, 30)]
    after = look(server)
    tokens = sum(each["completion_tokens"] for each in used)
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in used)
    assert tokens == 47

    def grown(name: str) -> float:
        return (total(after, name) or 0) - (total(before, name) or 0)

    assert grown("localllm_generated_tokens_total") == tokens
    assert grown("localllm_inter_token_seconds_count") == tokens - 3
    assert grown("localllm_evaluated_tokens_total") == sum(each["prompt_tokens"] for each in used) - cached
    assert grown("localllm_answers_total") == 3
    assert grown("localllm_first_token_seconds_count") == 3
    assert buckets_of(after, "localllm_inter_token_seconds")[-1][1] >= tokens - 3

    (tmp_path / "key").write_text(f"{KEY}\n")
    assert main(["top", "--once", server, "--api-key-file", str(tmp_path / "key")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == server
    assert lines[1].startswith("demo, localllm ")
    view = view_of([look(server)], time.time(), lately=False)
    assert re.search(rf"^answers +{view.answers:.0f} +cached +{view.cached_share:.0%}$", out, re.M)
    assert re.search(rf"^ITL +\S+ m?s +\S+ m?s +\S+ m?s +{view.times[1].count:.0f}$", out, re.M)
    assert "since the start (from histograms)" in out
    assert "no answers are running" in out
    assert "\x1b" not in out
    assert max(map(len, lines)) <= 80


def test_an_answer_that_is_written_has_a_line(server: str) -> None:
    response = ask(server, max_tokens=1500, ignore_eos=True, stream=True)
    try:
        while b"content" not in response.readline():
            pass
        response.readline()
        for _ in range(100):
            seen = look(server)
            if seen.slots and seen.slots[0].rate:
                break
        (slot,) = seen.slots
        assert seen.slot_count == 2
        assert 1 < slot.written <= 1500
        assert slot.left == 1500 - slot.written
        assert slot.processed + slot.cached == slot.prompt > 5
        assert slot.rate > 1
        assert total(seen, "llamacpp:requests_processing") == 1
        assert (total(seen, "localllm_generated_tokens_total") or 0) >= slot.written
    finally:
        response.close()


def test_a_terminal_shows_it_until_q(server: str) -> None:
    for leave, columns in (("q", 40), ("\x03", 100)):
        terminal = Terminal("top", server, "--interval", "1", columns=columns, environ={"LOCALLLM_API_KEY": KEY})
        terminal.wait_for(r"(?s)TTFT.*q leaves")
        terminal.resize(60)
        terminal.wait_for(r"(?s)TTFT.*q leaves")
        terminal.type(leave)
        assert terminal.end() == 0
        assert "\x1b[?1049h" in terminal.written  # the alternate screen, which top leaves at the end
        assert terminal.written.rindex("\x1b[?1049l") > terminal.written.rindex("TTFT")


def test_a_dumb_terminal_gets_plain_text(server: str) -> None:
    terminal = Terminal("top", server, "--interval", "1", columns=40, environ={"LOCALLLM_API_KEY": KEY, "TERM": "dumb"})
    terminal.wait_for(r"(?s)TTFT.*last 1 s.*TTFT")
    terminal.type("q")
    assert terminal.end() == 0
    assert "\x1b" not in terminal.written
    assert max(map(len, terminal.written.splitlines())) <= 40


def test_a_server_that_goes_away_and_comes_back_is_told(tmp_path: Path) -> None:
    with program(tmp_path) as url:
        terminal = Terminal("top", url, "--interval", "1", columns=100, environ={"LOCALLLM_API_KEY": KEY})
        terminal.wait_for("q leaves")
    terminal.wait_for(r"no answer for \d+ s: nothing answers at", 120)
    assert terminal.process.poll() is None
    with program(tmp_path, "--port", url.rpartition(":")[2]):
        terminal.wait_for("q leaves")
    terminal.type("q")
    assert terminal.end() == 0


# -- no server, another server, a wrong key --------------------------------------------------------------------------


def one_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["top", "--once", *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return str(err)


def test_a_wrong_key_or_none_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(ScriptedService(), ServerSettings(port=0, keys=frozenset({digest(KEY)}))) as port:
        url = f"127.0.0.1:{port}"
        assert "requires an API key; give it with --api-key-file" in one_line(capsys, url)
        assert "does not accept this API key" in one_line(capsys, url, "--api-key", "wrong")
        (tmp_path / "keys").write_text("\n")
        assert "has no API keys" in one_line(capsys, url, "--api-key-file", str(tmp_path / "keys"))
        monkeypatch.setenv("LOCALLLM_API_KEY", KEY)
        assert main(["top", "--once", url]) == 0
        assert "the server does not tell" not in capsys.readouterr().out


def test_a_server_that_hides_its_numbers_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with served(ScriptedService(), ServerSettings(port=0, metrics=False)) as port:
        assert "it was started with --no-metrics" in one_line(capsys, f"127.0.0.1:{port}")
    with served(ScriptedService(), ServerSettings(port=0, slots=False)) as port:
        assert main(["top", "--once", f"127.0.0.1:{port}"]) == 0
        assert "the server does not report its slots" in capsys.readouterr().out


def test_nothing_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = one_line(capsys, f"http://127.0.0.1:{port}/v1")
    assert told == (
        f"error: nothing answers at http://127.0.0.1:{port}: Connection refused; start localllm serve, "
        "or give its URL\n"
    )
    assert "no such host: no.such.host.invalid" in one_line(capsys, "no.such.host.invalid")


Handler = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextmanager
def other(answer: Handler) -> Iterator[str]:
    """Yield the URL of another program's server."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):
                answer(self)

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as it:
        it.daemon_threads = True
        threading.Thread(target=it.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{it.server_address[1]}"
        it.shutdown()


def page(status: int, body: bytes, **headers: str) -> Handler:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def forever(request: http.server.BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b"# " + b"x" * 100_000 + b"\n")


def slowly(request: http.server.BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b"#\n")
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (page(200, b"<html>hello</html>"), "is not localllm serve: its /metrics has no localllm metrics"),
        (page(200, b"# TYPE up gauge\nup 1\n"), "is not localllm serve: its /metrics has no localllm metrics"),
        (page(200, b"\xff\x00" * 1000), "is not localllm serve: its /metrics has no localllm metrics"),
        (page(404, b"no"), "is not localllm serve: GET /metrics has status 404"),
        (page(302, b"", Location="http://example.org/"), "is not localllm serve: GET /metrics has status 302"),
        (page(403, b"\x1b[31m"), "start it with --allowed-host"),
        (forever, "it sends more than 8 MiB"),
        (slowly, "did not answer in time"),
        (lambda request: request.wfile.write(b"SSH-2.0-OpenSSH\r\n\r\n"), "does not speak HTTP"),
        (lambda request: None, "does not speak HTTP"),
    ],
    ids=range(10),
)
def test_another_server_is_one_line(
    answer: Handler, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is slowly:
        monkeypatch.setattr(asking, "MOST_SECONDS", 0.5)
    with other(answer) as place:
        told = one_line(capsys, place)
    assert f"http://{place}" in told
    assert reason in told


def test_strange_slots_beside_good_metrics_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    good = Metrics(lambda: (1, 0)).text()

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        page(200, good if request.path == "/metrics" else b'[{"id": "\x1b[2J", "is_processing": true')(request)

    with other(answer) as place:
        assert main(["top", "--once", place]) == 0
    assert "running" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("localhost", "http://localhost:80"), ("http://h:9/", "http://h:9"), ("h:9/v1", "http://h:9"),
        ("https://h/a/v1/", "https://h:443/a"), ("[::1]:8080", "http://[::1]:8080"),
    ],
)  # fmt: skip
def test_addresses(text: str, told: str) -> None:
    assert str(address_of(text)) == told


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://h",
        "http://",
        "h:x",
        "h:99999",
        "http://u:p@h",
        "h/a b",
        "h\r\nX: y",
        "h?x=1",
        "http://[::1",
        "\x1b[31m",
    ],
)
def test_what_is_no_address_is_wrong_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="is not the address of a server"):
        address_of(text)
    if text:
        assert main(["top", text]) == 2
        assert "\x1b" not in capsys.readouterr().err


def test_two_addresses_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "a", "b"]) == 2
    assert "expected one URL, got 2" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_it_quietly(server: str) -> None:
    read, write = os.pipe()
    os.close(read)
    environ = {**os.environ, "LOCALLLM_API_KEY": KEY}
    done = subprocess.run(
        [*PROGRAM, "top", server], stdout=write, stderr=subprocess.PIPE, cwd=REPOSITORY, env=environ, timeout=60
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
