"""Fuzz a real server over a socket, while a second client requests short answers.

A case fails if the response has a status that docs/serve.md does not list or an error of another API, contains a path
or traceback, or is late. A run fails if the server exits, logs an unexpected error, grows, or delays the second client.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.fuzz.case import random_of
from tests.fuzz.requests import Request, make
from tests.localllm.support import REPOSITORY

STATUSES = {200, 204, 400, 401, 403, 404, 405, 408, 413, 414, 415, 429, 431, 501}
SECONDS = 60.0  # limit for a response; the server itself rejects or ends slower requests
IDLE = 0.6  # seconds of silence after which the client abandons a connection with damaged bytes
GROWTH = 1.3  # allowed growth of the server's memory in the second half of the cases; the first half fills caches
ASKED = {"prompt": "Once upon a time", "n_predict": 4, "temperature": 0}
LARGE = 32 << 20  # bytes of a body that is rejected unread
LEAKS = re.compile(rb"Traceback \(most|File \"/|/site-packages/")


@dataclass(slots=True)
class Server:
    """A running `localllm serve`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def memory(self) -> int:
        """Return the resident memory in bytes."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(found[1]) << 10 if found else 0


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Server]:
    """Run a server with the bundled model and additional options `words`."""
    log = folder / "log"
    command = [sys.executable, "-m", "localllm", "serve", "demo", "--port", "0", "-c", "512", *words]
    with log.open("wb") as to:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=to, stderr=to)
    try:
        end = time.monotonic() + 120
        while not (found := re.search(r"listening on http://127.0.0.1:(\d+)", log.read_text(errors="replace"))):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        yield Server(process, int(found[1]), log)
    finally:
        process.kill()
        process.wait()


def exchange(port: int, data: bytes, address: str, wire: bool = False) -> bytes:
    """Send bytes from a loopback address and return the response. Raise TimeoutError if it does not end."""
    with socket.create_connection(("127.0.0.1", port), SECONDS, (address, 0)) as made:
        parts: list[bytes] = []
        end = time.monotonic() + SECONDS
        try:
            made.sendall(data)
            if wire and len(data) % 8:  # in most cases, so that the server does not wait
                with suppress(OSError):  # the server may have closed the connection
                    made.shutdown(socket.SHUT_WR)
            made.settimeout(IDLE if wire else SECONDS)
            while part := made.recv(1 << 16):
                parts.append(part)
                if time.monotonic() > end:
                    raise TimeoutError
        except (ConnectionError, BrokenPipeError):
            pass  # the server may close before reading everything
        except TimeoutError:
            if not wire:
                raise
        return b"".join(parts)


def judge(request: Request, response: bytes) -> tuple[str, str]:
    """Return the outcome for the tally, and the failure or ""."""
    if not response:
        # A 413 may be lost while the client is still sending.
        refused = request.form == "wire" or len(request.data) > LARGE
        return "closed", "" if refused else "closed without a response"
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", response)
    if not found:
        return "none", f"not HTTP: {response[:80]!r}"
    status = int(found[1])
    head, _, body = response.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body = b"".join(re.split(rb"(?:^|\r\n)[0-9a-fA-F]+\r\n", body))
    if LEAKS.search(response):
        return str(status), f"status {status} names a file or a traceback: {body[:300]!r}"
    if status not in STATUSES and status // 100 != 1:
        return str(status), f"status {status}: {body[:300]!r}"
    if request.form == "wire" or status == 200:
        if b"internal error" in body:
            return str(status), f"internal error: {body[-300:]!r}"
        return str(status), ""
    return str(status), _shape(request.path, status, head, body)


def _shape(path: str, status: int, head: bytes, body: bytes) -> str:
    """Return what is wrong with the body of an error, or ""."""
    try:
        error = json.loads(body)["error"]
        message = error if path.startswith("/api/") else error["message"]
    except (ValueError, KeyError, TypeError):
        return f"status {status} without the shape of an error: {body[:200]!r}"
    if not isinstance(message, str) or not message.strip() or len(message) > 2500 or "\n" in message:
        return f"status {status} with the message {str(message)[:200]!r}"
    if status == 429 and b"retry-after" not in head.lower():
        return "status 429 without Retry-After"
    return ""


@dataclass(slots=True)
class Neighbour:
    """A second client. It requests short greedy answers one after another, and measures the seconds of each."""

    port: int
    address: str = "127.0.0.2"
    waits: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    first: bytes | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        body = json.dumps(ASKED).encode()
        head = (
            b"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        began = time.monotonic()
        try:
            response = exchange(self.port, head + b"Content-Length: %d\r\n\r\n" % len(body) + body, self.address)
        except OSError as error:
            self.wrong.append(f"the second client: {error!r}")
            return
        self.waits.append(time.monotonic() - began)
        content = re.search(rb'"content": ?("(?:[^"\\]|\\.)*")', response)
        self.first = self.first or (content[1] if content else None)
        if content is None or content[1] != self.first:
            self.wrong.append(
                f"the second client got {response[:60]!r} ... {content[1] if content else response[-200:]!r}"
            )

    def run(self) -> None:
        while not self.stop.wait(0.2):
            self.ask()


def run(asked: argparse.Namespace) -> int:
    """Run the cases over four connections. Print failures, the second client's latencies and the memory."""
    tally: Counter[str] = Counter()
    findings: list[str] = []
    seen: Counter[str] = Counter()
    lock = threading.Lock()
    numbers = iter(range(asked.first, asked.first + asked.cases))
    end = time.monotonic() + asked.seconds

    def tell(number: int, request: Request, what: str) -> None:
        alike = re.sub(r"\d+", "#", f"{request.kind} {request.path} {what[:60]}")
        findings.append(what)
        seen[alike] += 1
        if seen[alike] > 3:
            return
        asked.keep.mkdir(parents=True, exist_ok=True)
        (asked.keep / f"http-{asked.seed}-{number}").write_bytes(request.data)
        print(f"http seed {asked.seed} case {number} ({request.kind} {request.path}): {what}", flush=True)

    def work(server: Server) -> None:
        while time.monotonic() < end and server.process.poll() is None:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            request = make(random_of("http", asked.seed, number))
            began = time.monotonic()
            try:
                word, wrong = judge(request, exchange(server.port, request.data, "127.0.0.1", request.form == "wire"))
            except TimeoutError:
                word, wrong = "hang", f"no end of the response after {SECONDS:.0f} s"
            except OSError as error:
                word, wrong = "refused", f"no connection: {error}"
            with lock:
                tally[f"{request.kind} {word}"] += 1
                slowest[request.kind] = max(slowest.get(request.kind, 0.0), time.monotonic() - began)
                if wrong:
                    tell(number, request, wrong)

    slowest: dict[str, float] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-http-") as scratch:
        folder = Path(scratch)
        (folder / "slots").mkdir()
        words = ["--cache-dir", str(folder / "cache"), "--slot-save-path", str(folder / "slots"), "--parallel", "4"]
        with serving(folder, *words) as server:
            other = Neighbour(server.port)
            for _ in range(8):
                other.ask()
            alone = median(other.waits)
            other.waits.clear()
            memory = [server.memory]
            threads = [threading.Thread(target=work, args=(server,), daemon=True) for _ in range(4)]
            watching = threading.Thread(target=other.run, daemon=True)
            for thread in (*threads, watching):
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.5)
                if server.process.poll() is None:
                    memory.append(server.memory)
            other.stop.set()
            watching.join(SECONDS)
            if server.process.poll() is not None:
                findings.append(f"the server ended with {server.process.returncode}")
            findings += other.wrong
            told = server.log.read_text(errors="replace")
            if at := re.search("Traceback|unexpected error", told):
                asked.keep.mkdir(parents=True, exist_ok=True)
                (asked.keep / f"http-{asked.seed}.log").write_text(told)
                findings.append(f"the server's log, kept whole: {told[at.start() : at.start() + 200]}")
    waits = sorted(other.waits) or [0.0]
    warm = memory[len(memory) // 2]
    if waits[-1] > alone + asked.patience:
        findings.append(f"the second client waited {waits[-1]:.2f} s, alone {alone:.3f} s")
    if memory[-1] > GROWTH * warm and memory[-1] - warm > 64 << 20:
        findings.append(f"memory grew from {warm >> 20} to {memory[-1] >> 20} MiB")
    for what in findings[-6:]:
        print(what[:1500])
    if asked.tally:
        print(*(f"{count:7}  {what}" for what, count in tally.most_common()), sep="\n")
        print("longest:", {kind: round(seconds, 1) for kind, seconds in slowest.items()})
    print(
        f"http seed {asked.seed}: {tally.total()} cases in {time.monotonic() - began:.0f} s; second client: alone "
        f"{alone:.3f} s, median {median(waits):.3f} s, most {waits[-1]:.2f} s of {len(waits)}; memory "
        f"{memory[0] >> 20} MiB at the start, {warm >> 20} in the middle, {max(memory) >> 20} most, "
        f"{memory[-1] >> 20} at the end; {len(findings)} findings"
    )
    return 1 if findings else 0
