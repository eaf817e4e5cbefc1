"""Put mixed load on localllm serve for an hour. Check for errors, resource leaks, and answers that change.

    python benchmarks/soak.py [MODEL] [--minutes 60] [--workers 6] [--pause 0.2]

Some workers send requests of all four APIs (`soak_requests.py`), others disconnect (`soak_vanishing.py`). Three fixed
requests, greedy or with a seed, are sent in between and must always give the same tokens. After every minute all
workers pause, the server becomes idle, and its memory, file descriptors, threads and cache blocks are counted. The run
passes if:

- no answer was wrong: 5xx, a broken stream, an error without its API's format, or no end
- memory (RSS) of the last sixth of the minutes exceeds the second sixth's by at most 2 % and 4 MiB
- descriptors and threads have not increased from the second sixth to the last; no block of the cache is lost
- the server stops when told to, and its log has no error

A minute is 60 ticks of about a second, counted while this program runs. So if this program and the server are suspended
together, nothing counts as late. Requests that span the suspension and fail are counted separately. Ctrl-C or SIGTERM
ends the run after the current minute and evaluates the results so far. One JSON line per run goes to
benchmarks/results/soak.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import httpx
import soak_vanishing
from soak_requests import MAKERS, WORDS, Wanted, Wrong, check

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "soak.jsonl"
GROWTH, MARGIN = 1.02, 4 << 20  # maximum memory growth: a factor, and bytes
LONGEST = 240  # maximum duration of a request in ticks
SEND_SECONDS = 10  # the server's limit: it disconnects clients that do not read for longer
SAID = {"prompt": " ".join(WORDS[:20]), "n_predict": 64, "return_tokens": True}
CHAT = {"messages": [{"role": "user", "content": "I want to book a table for two."}], "max_tokens": 48}
FIXED = (  # requests whose answers never change, each with the part of the answer to compare
    ("/completion", {**SAID, "temperature": 0}, lambda body: body["tokens"]),
    ("/completion", {**SAID, "temperature": 0, "cache_prompt": False}, lambda body: body["tokens"]),
    ("/v1/chat/completions", {**CHAT, "temperature": 0.9, "seed": 5}, lambda body: body["choices"][0]["message"]),
)


@dataclass(slots=True)
class Clock:
    """Counts ticks of about a second. A longer tick means that this program was suspended."""

    ticks: float = 0.0
    suspended: int = 0

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.25)
            took = time.monotonic() - began
            self.suspended += took > 5
            self.ticks += min(took, 1.0)

    async def wait(self, seconds: float) -> None:
        until = self.ticks + seconds
        while self.ticks < until:
            await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of the idle server after a minute. `lost_blocks` are neither free nor kept for later prompts."""

    minute: int
    requests: int
    tokens_per_second: float
    rss: int  # resident memory in bytes
    children_rss: int
    descriptors: int
    threads: int
    free_blocks: int
    lost_blocks: int


@dataclass(slots=True)
class Soak:
    """A run: the actions of its clients, and the failures that they detected."""

    port: int
    pid: int
    pause: float
    clock: Clock = field(default_factory=Clock)
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    first: list[Any] = field(default_factory=list)  # the first answers to FIXED
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    busy: int = 0
    tokens: float = 0.0
    stopping: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wrong(self, text: str) -> None:
        self.errors.append(f"{self.clock.ticks:.0f} s: {text}"[:1000])
        print("wrong:", self.errors[-1], flush=True)

    # -- clients ---------------------------------------------------------------------------------------------------

    async def work(self, seed: int) -> None:
        """Send requests of all kinds while the gate is open."""
        chance = Random(seed)
        while True:
            await self.gate.wait()
            limits = httpx.Limits(max_keepalive_connections=chance.choice((0, 1)))
            async with httpx.AsyncClient(base_url=self.url, timeout=None, limits=limits) as http:
                while self.gate.is_set():
                    if chance.random() < 0.1:
                        await self._one("fixed", self._fixed(http, chance.randrange(len(FIXED))))
                    else:
                        wanted = chance.choice(MAKERS)(chance)
                        await self._one(wanted.kind, self._ask(http, wanted))
                    await self.clock.wait(chance.expovariate(1 / self.pause) if self.pause else 0)

    async def vanish(self, seed: int) -> None:
        chance = Random(seed)
        while True:
            await self.gate.wait()
            kind = chance.choice(list(soak_vanishing.KINDS))
            await self._one(kind, soak_vanishing.KINDS[kind](self.port, chance, self.clock.wait))
            await self.clock.wait(chance.expovariate(1 / (self.pause + 0.3)))

    async def _one(self, kind: str, work: Coroutine[Any, Any, None]) -> None:
        """Perform one random action, and record failures."""
        self.busy += 1
        began, before = self.clock.ticks, self.clock.suspended
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=5)
                if self.clock.ticks - began > LONGEST:
                    task.cancel()
                    raise Wrong(f"no end after {LONGEST} s")
            task.result()
        except (Wrong, httpx.HTTPError, OSError, ValueError, KeyError, LookupError) as error:
            if self.clock.suspended > before and not isinstance(error, Wrong):
                kind = "failed while suspended"
            else:
                self.wrong(f"{kind}: {type(error).__name__}: {error}")
        finally:
            self.busy -= 1
            self.counts[kind] += 1

    async def _ask(self, http: httpx.AsyncClient, one: Wanted) -> None:
        response = await self._sent(http, one.path, one.content)
        try:
            check(one, response.status_code, response.content)
        except (Wrong, ValueError, KeyError, LookupError) as error:
            raise Wrong(f"{error!r}; asked {one.path} {one.content[:300]!r}") from None

    async def _sent(self, http: httpx.AsyncClient, path: str, content: bytes) -> httpx.Response:
        """Post a request. Retry once if a kept-alive connection had been closed, as every client does."""
        for last in (False, True):
            try:
                return await http.post(path, content=content, headers={"Content-Type": "application/json"})
            except (httpx.RemoteProtocolError, httpx.ReadError) as error:
                if last or "without sending a response" not in str(error):
                    raise
                self.counts["sent again on a new connection"] += 1
        raise AssertionError

    async def _fixed(self, http: httpx.AsyncClient, number: int) -> None:
        path, body, chosen = FIXED[number]
        response = await self._sent(http, path, json.dumps(body).encode())
        if response.status_code != 200:
            raise Wrong(f"status {response.status_code}: {response.text[:300]}")
        found = chosen(response.json())
        if number == len(self.first):
            self.first.append(found)
        elif found != self.first[number]:
            raise Wrong(f"another answer than at the start: {found} instead of {self.first[number]}")

    # -- samples ---------------------------------------------------------------------------------------------------

    async def run(self, minutes: int, workers: int) -> None:
        """Run the clients, and sample the server after every minute."""
        for sign in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(sign, self._stop)
        ticking = asyncio.create_task(self.clock.run())
        async with httpx.AsyncClient(base_url=self.url, timeout=None) as http:
            for number in range(len(FIXED)):
                await self._one("fixed", self._fixed(http, number))
        tasks = [asyncio.create_task(self.work(seed)) for seed in range(workers)]
        tasks += [asyncio.create_task(self.vanish(1000 + seed)) for seed in range(2)]
        for minute in range(1, minutes + 1):
            if self.stopping:
                break
            began = self.clock.ticks
            self.gate.set()
            await self.clock.wait(60)
            self.gate.clear()
            while self.busy:
                await asyncio.sleep(0.1)
            await self._sample(minute, self.clock.ticks - began)
            for task in tasks:
                if task.done():
                    task.result()
        async with httpx.AsyncClient(base_url=self.url, timeout=None) as http:
            for number in range(len(FIXED)):
                await self._one("fixed", self._fixed(http, number))
        for task in (*tasks, ticking):
            task.cancel()

    def _stop(self) -> None:
        self.stopping = True

    async def _sample(self, minute: int, seconds: float) -> None:
        """Wait until no request runs and connections are closed, then sample the server."""
        before = self.samples[-1].descriptors if self.samples else 0
        for attempt in range(LONGEST):
            numbers = await self._numbers()
            busy = numbers["llamacpp:requests_processing"] + numbers["llamacpp:requests_deferred"]
            descriptors = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
            blocks = _blocks(numbers)
            lost = blocks["all"] - blocks["free"] - blocks["kept"]
            if not busy and ((descriptors <= before and not lost) or attempt > 5):
                break
            await self.clock.wait(1)
        else:
            self.wrong(f"requests without a client go on: {numbers}")
        tokens = numbers["llamacpp:tokens_predicted_total"]
        status = _status(self.pid)
        one = Sample(
            minute=minute,
            requests=self.counts.total(),
            tokens_per_second=round((tokens - self.tokens) / seconds, 1),
            rss=status["VmRSS"],
            children_rss=sum(_status(child)["VmRSS"] for child in _children(self.pid)),
            descriptors=descriptors,
            threads=status["Threads"],
            free_blocks=blocks["free"],
            lost_blocks=lost,
        )
        self.tokens = tokens
        self.samples.append(one)
        print(json.dumps(asdict(one)), f"{len(self.errors)} errors", flush=True)

    async def _numbers(self) -> dict[str, float]:
        async with httpx.AsyncClient(base_url=self.url, timeout=None) as http:
            lines = (await http.get("/metrics")).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
        return {name: float(value) for name, value in pairs}


def _blocks(numbers: dict[str, float]) -> Counter[str]:
    """Count the cache blocks of all models by state."""
    found = Counter[str]()
    for name, value in numbers.items():
        if match := re.fullmatch(r'localllm_cache_blocks\{.*state="(\w+)"\}', name):
            found[match[1]] += int(value)
    return found


def _status(pid: int) -> dict[str, int]:
    """Return the resident bytes and the number of threads of a process."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "Threads"):
            found[name] = int(value.split()[0]) << (10 if name == "VmRSS" else 0)
    return found


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def growth(samples: list[Sample]) -> list[str]:
    """Return the resource counts that grew from the second sixth of the minutes to the last."""
    if not samples:
        return ["no minute was sampled"]
    part = max(1, len(samples) // 6)
    early, late = samples[part : 2 * part] or samples[:1], samples[-part:]
    found = []
    for name in ("rss", "children_rss"):
        then, now = (mean(getattr(one, name) for one in some) for some in (early, late))
        if now > then * GROWTH + MARGIN:
            found.append(f"{name} grew from {then / 2**20:.1f} to {now / 2**20:.1f} MiB")
    for name in ("descriptors", "threads"):
        most, now = (max(getattr(one, name) for one in some) for some in (early, late))
        if now > most:
            found.append(f"{name} grew from {most} to {now}")
    if lost := [one.minute for one in samples if one.lost_blocks]:
        found.append(f"blocks of the cache were lost in minutes {lost}")
    return found


@contextmanager
def serving(model: str, threads: int, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Context manager around the server; yields its process and port."""
    words = ["serve", model, "--port", "0", "-t", str(threads), "--timeout", str(SEND_SECONDS)]
    with log.open("wb") as to:
        process = subprocess.Popen(
            [sys.executable, "-m", "localllm", *words], cwd=ROOT, stdout=to, stderr=to, start_new_session=True
        )  # Ctrl-C must reach only this program
    try:
        while not (found := re.search(r"listening on http://127.0.0.1:(\d+)", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.2, help="mean seconds between the requests of a worker")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--log", type=Path, default=Path("/tmp/soak-server.log"))
    arguments = parser.parse_args()
    with serving(arguments.model, arguments.threads, arguments.log) as (process, port):
        soak = Soak(port, process.pid, arguments.pause)
        asyncio.run(soak.run(arguments.minutes, arguments.workers))
        process.send_signal(signal.SIGTERM)
        try:
            if code := process.wait(60):
                soak.wrong(f"the server ended with {code}")
        except subprocess.TimeoutExpired:
            soak.wrong("the server does not stop")
    told = arguments.log.read_text(errors="replace")
    if at := re.search("Traceback|unexpected error", told):
        soak.wrong(f"the server's log: {told[at.start() : at.start() + 800]}")
    kinds = {maker(Random(0)).kind for maker in MAKERS} | {*soak_vanishing.KINDS, "fixed"}
    missing = [f"nothing was done of: {kind}" for kind in sorted(kinds - {*soak.counts})]
    problems = [*soak.errors, *growth(soak.samples), *missing]
    columns = {name: [getattr(one, name) for one in soak.samples] for name in Sample.__dataclass_fields__}
    row = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "model": arguments.model,
        "minutes": len(soak.samples), "workers": arguments.workers, "pause": arguments.pause,
        "requests": soak.counts.total(), "counts": dict(sorted(soak.counts.items())),
        "suspended": soak.clock.suspended, "problems": problems[:20], "samples": columns,
    }  # fmt: skip
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row["counts"], indent=1), *problems, f"{len(problems)} problems", sep="\n")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
