"""Measure how long a client waits for a short answer while another client attacks the server, for each attack.

    python benchmarks/neighbours_attacked.py [MODEL] [--only WORD ...] [--seconds 30] [--checkout FOLDER] [--label TEXT]
    python benchmarks/neighbours_attacked.py --table [--all]

The server listens on 127.0.0.1 with the default options. The attacker's address is 127.0.0.1, the neighbour's address
is 127.0.0.2. The neighbour requests 4 tokens repeatedly: alone at first, then while the attack's requests are open, for
at most `--seconds`. If the server has not recovered afterwards, the next attack gets a new server. `--checkout` is the
folder of the server's source; an older checkout gives the times before a change. With a large context (`-c`), large
texts are tokenized instead of rejected. One JSON line per attack goes to benchmarks/results/neighbours_attacked.jsonl.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import neighbours_attacks
from compare import RESULTS, ROOT, machine
from neighbours_attacks import ATTACKS, Held, Sent

OUT = RESULTS / "neighbours_attacked.jsonl"
ATTACKER, NEIGHBOUR = "127.0.0.1", "127.0.0.2"
MOST = 2.0  # maximum seconds that an attack may add to the neighbour's wait
ALONE = 10  # number of answers without an attack


@dataclass(slots=True)
class Row:
    """The neighbour's waits in seconds, without and during an attack."""

    label: str
    attack: str
    alone: list[float]
    waits: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # the neighbour's failed requests
    statuses: list[int] = field(default_factory=list)  # HTTP statuses of the attack; -1: disconnected, or timed out
    seconds: float = 0.0  # duration of the attack
    memory: int = 0  # resident memory of the server after the attack, in MiB

    @property
    def kind(self) -> str:
        return self.attack.partition(" ")[0]

    @property
    def worst(self) -> tuple[int, float]:
        """Return a sort key for severity: the number of failures, then the longest wait."""
        return len(self.failures), max(self.waits, default=0.0)

    def cell(self, named: bool) -> str:
        """Return the waits as a table cell: alone, median, longest. If `named`, the cell includes the attack's name."""
        failed = f", {len(self.failures)} of {len(self.waits)} failed" if self.failures else ""
        name = f"{self.attack.removeprefix(self.kind).strip()}: " if named else ""
        waits = self.waits or [0.0]
        return f"{name}{median(self.alone):.2f}, {median(waits):.2f}, {max(waits):.2f} s{failed}"

    @property
    def beyond(self) -> float:
        """Return the longest wait during the attack minus the wait without it."""
        return max(self.waits, default=0.0) - median(self.alone)


def ask(port: int, path: str, body: Any, source: str, seconds: float) -> tuple[int, bytes]:
    """Send a request from an address. Return its status and the answer, or -1 and the error."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds, source_address=(source, 0))
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return -1, repr(error).encode()
    finally:
        connection.close()


class Neighbour:
    """A client that requests 4 tokens repeatedly."""

    def __init__(self, port: int) -> None:
        self._port, self._number = port, 0

    def once(self, row: Row | None = None, seconds: float = 60) -> float:
        """Send one request and return its duration."""
        self._number += 1
        body = {"messages": [{"role": "user", "content": f"canary {self._number}"}], "max_tokens": 4}
        began = time.perf_counter()
        status, answer = ask(self._port, "/v1/chat/completions", body, NEIGHBOUR, seconds)
        took = time.perf_counter() - began
        if row is not None:
            row.waits.append(round(took, 3))
            if status != 200:
                row.failures.append(f"{status} {answer[:150].decode(errors='replace')}")
        return took


@contextmanager
def serving(model: str, checkout: Path, options: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Context manager around the server of a checkout; yields its process and port."""
    with tempfile.NamedTemporaryFile("wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        words = [sys.executable, "-m", "localllm", "serve", model, "--port", "0", *options]
        process = subprocess.Popen(words, cwd=checkout, env=environment, stdout=log, stderr=log)
        try:
            while not (found := re.search(r"listening on http://\S+:(\d+)", Path(log.name).read_text())):
                if process.poll() is not None:
                    raise SystemExit(Path(log.name).read_text())
                time.sleep(0.1)
            yield process, int(found[1])
        finally:
            process.kill()
            process.wait()


def memory(process: subprocess.Popen[bytes]) -> int:
    """Return the resident memory of a process in MiB, or 0 if the system does not report it."""
    with suppress(OSError):
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        return int(found[1]) >> 10 if found else 0
    return 0


def send(port: int, sent: Sent, row: Row, seconds: float) -> list[threading.Thread]:
    """Send the requests of an attack, each in its own thread."""
    threads = []
    for path, body in sent.requests():

        def work(path: str = path, body: Any = body) -> None:
            row.statuses.append(ask(port, path, body, ATTACKER, seconds)[0])

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        time.sleep(sent.pause)
    return threads


@contextmanager
def held(port: int, connections: Held) -> Iterator[None]:
    """Context manager that holds connections open."""
    opened: list[socket.socket] = []
    try:
        for _ in range(connections.count):
            with suppress(OSError):
                opened.append(socket.create_connection(("127.0.0.1", port), 5, (ATTACKER, 0)))
                opened[-1].sendall(connections.data)
        yield
    finally:
        for each in opened:
            each.close()


def attacked(port: int, name: str, row: Row, seconds: float) -> None:
    """Run an attack, and time the neighbour's requests during it."""
    attack, neighbour = ATTACKS[name], Neighbour(port)
    began = time.perf_counter()

    def left() -> float:
        return seconds - (time.perf_counter() - began)

    if isinstance(attack, Held):
        with held(port, attack):
            while left() > 0.5 * seconds:
                neighbour.once(row, max(left(), 5))
                time.sleep(0.2)
    else:
        threads = send(port, attack, row, seconds)
        time.sleep(0.1)
        while left() > 0:
            neighbour.once(row, max(left(), 5))
            if not any(thread.is_alive() for thread in threads):
                break
            time.sleep(0.2)
        row.statuses += [-1] * sum(thread.is_alive() for thread in threads)
    row.seconds = round(time.perf_counter() - began, 2)


def measure(model: str, checkout: Path, label: str, names: list[str], seconds: float, options: list[str]) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < len(names):  # a new server if the old one has not recovered
        with serving(model, checkout, options) as (process, port):
            neighbour, alone = Neighbour(port), list[float]()
            for name in names[len(rows) :]:
                for _ in range(ALONE if alone else ALONE + 2):
                    alone.append(round(neighbour.once(), 3))
                row = Row(label, name, alone[-ALONE:])
                attacked(port, name, row, seconds)
                row.memory = memory(process)
                rows.append(row)
                print(line(row), file=sys.stderr, flush=True)
                write(row, model)
                if neighbour.once(seconds=5) > 2 * max(alone) + 0.2 or row.memory > 2048:
                    break
                alone = alone[:0] + alone[-ALONE:]
    return rows


def write(row: Row, model: str) -> None:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    with OUT.open("a") as file:
        file.write(json.dumps({"when": when, "model": model, **asdict(row), "machine": machine()}) + "\n")


def line(row: Row) -> str:
    failed = f" {len(row.failures)} failed" if row.failures else ""
    late = "  <<<" if row.beyond > MOST or row.failures else ""
    return (
        f"{row.label}: {row.attack:24} alone {median(row.alone):.3f} median {median(row.waits or [0]):.3f} "
        f"max {max(row.waits, default=0):.3f}{failed} ({row.seconds:.1f} s, {row.memory} MiB){late}"
    )


def stored() -> list[Row]:
    """Return the newest result row of every label and attack."""
    rows: dict[tuple[str, str], Row] = {}
    for text in OUT.read_text().splitlines() if OUT.exists() else ():
        found = json.loads(text)
        rows[found["label"], found["attack"]] = Row(**{each.name: found[each.name] for each in fields(Row)})
    return list(rows.values())


def table(rows: list[Row], whole: bool = False) -> str:
    """Return the Markdown for docs/serve.md: the worst attack of each kind, or all attacks if `whole`."""
    labels = list(dict.fromkeys(row.label for row in rows))
    lines = [f"| attack | {' | '.join(labels)} |", f"|---|{'---|' * len(labels)}"]
    names = [row.attack for row in rows]
    for name in dict.fromkeys(names if whole else [name.partition(" ")[0] for name in names]):
        cells = []
        for label in labels:
            found = [row for row in rows if row.label == label and (row.attack if whole else row.kind) == name]
            cells.append(max(found, key=lambda row: row.worst).cell(not whole) if found else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="run the attacks with one of these words in their name"
    )
    parser.add_argument("--seconds", type=float, default=30, help="that an attack lasts at most [30]")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="source of the server")
    parser.add_argument("-c", "--ctx-size", default="1024", help="context of the server [1024]")
    parser.add_argument("-np", "--parallel", default="4", help="answers that it writes at once [4]")
    parser.add_argument("--megabytes", type=float, default=30, help="size of a large text [30]")
    parser.add_argument("--label", default="now", help="name of the column")
    parser.add_argument("--table", action="store_true", help="print the stored results: the table of docs/serve.md")
    parser.add_argument("--all", action="store_true", help="with --table: every attack")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(stored(), arguments.all))
        return
    options = ["-c", arguments.ctx_size, "-np", arguments.parallel]
    neighbours_attacks.megabytes = arguments.megabytes
    names = [name for name in ATTACKS if not arguments.only or any(word in name for word in arguments.only)]
    rows = measure(arguments.model, arguments.checkout.resolve(), arguments.label, names, arguments.seconds, options)
    late = [row.attack for row in rows if row.beyond > MOST or row.failures]
    print(f"{len(rows)} attacks; too long or failed: {', '.join(late) or 'none'}")


if __name__ == "__main__":
    main()
