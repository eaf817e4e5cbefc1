"""Prefill in separate replicas (DistServe, arXiv:2401.09670) against replicas that do both, in a simulation of measured
steps.

    python benchmarks/prefill_apart.py MODEL.gguf [-t 1] [--delays 0.2,1,5] [--network 125e6] [--requests 200]
    python benchmarks/prefill_apart.py MODEL.gguf --real [--points agent:2:1.5,chat:4:4] [--rates 0.5,0.8,1.1]
    python benchmarks/prefill_apart.py --real --waiting 1b-Q4_K_M.gguf [--points ...] [--rates ...]
    python benchmarks/prefill_apart.py --table

The costs are measured first: passes of 1 to 512 rows with the model, and reading, checking and writing its cache blocks
in the format of `localllm/saved`. Replicas on 2, 3 and 4 machines are then simulated with these costs:

- together: each replica evaluates prompts in the steps of its answers. `generation/budget.py` chooses the number of
  prompt rows, with the limit as `--itl-target`; requests go where the fewest tokens wait.
- apart: some replicas evaluate prompts in full passes, and give the first token. Finished blocks are sent while the
  next pass runs; the connection of each machine has a delay and a bandwidth. The others only decode. The best division
  of the machines counts.

Goodput is the largest rate of requests (Poisson) at which 90 % of them meet two limits: the time to the first token,
and the mean time per token after it, without a stall of a second. The limits are multiples of the time for the mean
prompt alone, and of a step with one answer. Costs are processor time, so that other programs disturb less. One JSON
line per run goes to benchmarks/results/prefill_apart.jsonl.

`--real` measures two replicas of this machine instead (prefill_real.py): processes with one thread each, on the same
trace of requests, in turn. With `apart`, blocks pass through a relay. POINTS are workloads with the two limits; RATES
are multiples of the larger goodput of the simulation. The goodput is interpolated between the rates. With
`--waiting 1b-Q4_K_M.gguf`, the bundled model waits in each step for the stored time of that model, so the replicas do
not share a processor. The lines have "real", and go to the same file.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import count, pairwise, product
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from compare import RESULTS, ROOT, machine

sys.path.insert(0, str(ROOT))

import localllm
from localllm.engine import SequenceRows
from localllm.generation.budget import Budget
from localllm.plan import BLOCK

STORED = RESULTS / "prefill_apart.jsonl"
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MOST_ROWS = 512  # of a pass
REPEATS = {1: 20, 33: 8, 129: 4}  # from this number of rows on
ATTAINED = 0.9  # share of the requests that must meet both limits
WORKLOADS = {
    "chat": (512, 128),
    "document": (1536, 96),
    "agent": (256, 256),
}  # mean tokens
ITL = (1.5, 2.0, 4.0)  # limits, as multiples of a pass with one row
TTFT = (2.0, 4.0)  # limits, as multiples of the time for the prompt alone
STALL = 1.0  # seconds between two tokens that miss the limit, even if the mean is short
DECODING = 16  # maximum requests of a replica
BESIDE = (
    0,
    4,
)  # rows of prompts for which a step has room when all requests of a replica decode; the better one counts
WAITING = 128  # tokens that an open request counts in the choice of a replica (`distributed/fleet.py`)


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    block_bytes: int  # of all layers
    read: float  # per block: read from the cache and hash
    write: float  # per block: hash and write to the cache

    def step(self, rows: int) -> float:
        at = bisect_left(self.rows, rows)
        if self.rows[min(at, len(self.rows) - 1)] == rows:
            return self.seconds[at]
        at = min(max(at, 1), len(self.rows) - 1)
        (a, b), (x, y) = self.rows[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        return x + (y - x) * (rows - a) / (b - a)

    def prompt(self, tokens: int) -> float:
        return sum(self.step(min(MOST_ROWS, tokens - start)) for start in range(0, tokens, MOST_ROWS))


@dataclass(slots=True)
class Request:
    number: int
    arrived: float
    prompt: int
    answer: int
    left: int = 0  # prompt tokens
    times: list[float] = field(default_factory=list)

    def good(self, first: float, each: float) -> bool:
        if len(self.times) < self.answer:
            return False
        if any(later - earlier > STALL for earlier, later in pairwise(self.times)):
            return False
        mean = (self.times[-1] - self.times[0]) / max(self.answer - 1, 1)
        return self.times[0] - self.arrived <= first and mean <= each


@dataclass(slots=True)
class Replica:
    """A replica with its steps."""

    costs: Costs
    budget: Budget | None  # of a replica that does both; None: prompts or answers only
    most: int  # requests that run at once
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    importing: float = 0.0  # seconds of the next step for blocks that arrived
    busy: bool = False

    def work(self) -> float:
        return sum(one.left + WAITING for one in self.waiting + self.running)

    def step(self) -> tuple[float, list[tuple[Request, int]]] | None:
        """Choose a step: its seconds, and the rows of each request."""
        while self.waiting and len(self.running) < self.most:
            self.running.append(self.waiting.pop(0))
        parts = [(one, 1) for one in self.running if not one.left]
        decoding = len(parts)
        prompts = [one for one in self.running if one.left]
        if prompts:
            rows = MOST_ROWS if self.budget is None else self.budget.prompt_rows(decoding, len(self.running))
            order = [*prompts[:1], *sorted(prompts[1:], key=lambda one: one.left)]
            for place, one in enumerate(order):
                share = max(rows // 2, 1) if self.budget and place == 0 and len(order) > 1 else rows
                used = min(share, one.left)
                if used:
                    parts.append((one, used))
                rows -= used
        if not parts:
            return None
        total = sum(rows for _, rows in parts)
        seconds = self.costs.step(total) + self.importing
        self.importing = 0.0
        if self.budget is not None:
            self.budget.observe(decoding, total - decoding, seconds)
        return seconds, parts


@dataclass(frozen=True, slots=True)
class Line:
    """The network between two machines."""

    delay: float
    bandwidth: float  # bytes per second


def run(
    costs: Costs, requests: Sequence[Request], prefill: int, others: int, target: float, line: Line, beside: int = 0
) -> None:
    """Simulate replicas: `prefill` evaluate prompts only (0: all do both).

    A replica decodes as many requests as a step with `beside` more rows, of prompts, can have within the target.
    """
    most = max([rows for rows in range(1, DECODING + 1) if costs.step(rows + beside) <= target], default=1)
    makers = [Replica(costs, None, DECODING) for _ in range(prefill)]
    both = [Replica(costs, None if prefill else Budget(MOST_ROWS, target), most) for _ in range(others)]
    free = dict.fromkeys(range(prefill), 0.0)  # when the connection of a machine has sent everything before
    numbers = count()
    events: list[tuple[float, int, Callable[[float], None]]] = []

    def at(time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(events, (time, next(numbers), act))

    def go(replica: Replica, now: float) -> None:
        if replica.busy or (chosen := replica.step()) is None:
            return
        replica.busy = True
        seconds, parts = chosen
        at(now + seconds, lambda now: end(replica, parts, now))

    def end(replica: Replica, parts: list[tuple[Request, int]], now: float) -> None:
        replica.busy = False
        for one, rows in parts:
            if one.left:
                one.left -= rows
                if prefill:
                    send(replica, one, rows, now)
                if one.left:
                    continue
            one.times.append(now)
            if (prefill and replica in makers) or len(one.times) == one.answer:
                replica.running.remove(one)
        go(replica, now)

    def send(replica: Replica, one: Request, rows: int, now: float) -> None:
        place = next(number for number, each in enumerate(makers) if each is replica)
        blocks = rows / BLOCK
        free[place] = max(free[place], now + costs.read * blocks) + blocks * costs.block_bytes / line.bandwidth
        if not one.left and one.answer > 1:
            at(free[place] + line.delay, lambda now: arrive(one, now))

    def arrive(one: Request, now: float) -> None:
        replica = min(both, key=lambda each: len(each.waiting) + len(each.running))
        replica.importing += costs.write * one.prompt / BLOCK
        replica.waiting.append(one)
        go(replica, now)

    def begin(one: Request, now: float) -> None:
        replica = min(makers or both, key=Replica.work)
        replica.waiting.append(one)
        go(replica, now)

    for one in requests:
        at(one.arrived, lambda now, one=one: begin(one, now))  # type: ignore[misc]
    while events:
        now, _, act = heapq.heappop(events)
        act(now)


def drawn(kind: str, rate: float, number: int, seed: int) -> list[Request]:
    """Draw requests: Poisson arrivals, prompts and answers of half to double the mean (log-uniform)."""
    chance, now, found = random.Random(seed), 0.0, []
    prompt, answer = WORKLOADS[kind]
    for each in range(number):
        now += chance.expovariate(rate)
        tokens = [max(2, round(mean * 2 ** chance.uniform(-1, 1) / 1.08)) for mean in (prompt, answer)]
        found.append(Request(each, now, *tokens, left=tokens[0]))
    return found


def goodput(
    costs: Costs, kind: str, prefill: int, others: int, first: float, each: float, line: Line, number: int,
    beside: int = 0,
) -> float:  # fmt: skip
    """Return the largest rate at which enough requests meet the limits."""

    def meets(rate: float) -> bool:
        shares = []
        for seed in range(2):
            requests = drawn(kind, rate, number, seed)
            run(costs, requests, prefill, others, each, line, beside)
            shares.append(sum(one.good(first, each) for one in requests) / number)
        return sum(shares) / len(shares) >= ATTAINED

    low, high = 0.0, 1.2 * (prefill + others) / costs.prompt(WORKLOADS[kind][0])
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def measured(path: Path, threads: int) -> Costs:
    """Measure steps of several numbers of rows, and the handling of cache blocks."""
    with localllm.load(path, threads=threads, ctx_size=2048, spec="off", sequences=2) as model:
        engine, executable = model.engine, model.executable
        found = []
        for rows in ROWS:
            times = []
            for _ in range(next(times for least, times in reversed(REPEATS.items()) if rows >= least)):
                sequence = engine.add()
                engine.step([SequenceRows(sequence, [1] * 512, "none")]) if rows == 1 else None
                began = thread_time()
                engine.step([SequenceRows(sequence, [1 + n % 100 for n in range(rows)], "last")])
                times.append(thread_time() - began)
                sequence.free()
            found.append(min(times))
        sequence = engine.add()
        engine.step([SequenceRows(sequence, [1] * 512, "none")])
        table, layers = sequence.tables()[0][: 512 // BLOCK], range(len(executable.block_bytes))
        began = thread_time()
        content = [np.ascontiguousarray(executable.read_blocks(layer, table)) for layer in layers]
        for each in content:
            blake2b(each.data)
        read = thread_time() - began
        began = thread_time()
        for layer, each in zip(layers, content, strict=True):
            blake2b(each.data)
            executable.write_blocks(layer, table, each)
        write = thread_time() - began
        sequence.free()
        blocks = 512 / BLOCK
        return Costs(ROWS, tuple(found), sum(executable.block_bytes), read / blocks, write / blocks)


def known(model: str, rows: Iterable[dict[str, Any]], faster: float) -> Costs:
    """Return the costs of a model from its newest run, on a machine that is `faster`."""
    row = [row for row in rows if row["model"] == model and not row.get("waiting")][-1]
    unit, block = 1 / (1000 * faster), row["block"]
    times = {int(rows): each * unit for rows, each in row["ms"].items()}
    seconds = block["read ms"] * unit, block["write ms"] * unit
    return Costs(tuple(times), tuple(times.values()), block["bytes"], *seconds)


def cells(costs: Costs, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Simulate every kind of requests on every number of machines, with every pair of limits."""
    delays = [float(each) / 1000 for each in given.delays.split(",")]
    for kind, machines, first, each in product(WORKLOADS, map(int, given.machines.split(",")), TTFT, ITL):
        limits = first * costs.prompt(WORKLOADS[kind][0]), each * costs.step(1)

        def most(prefill: int, delay: float = 0.0, beside: int = 0) -> float:
            line, others = Line(delay, given.network), machines - prefill  # noqa: B023
            return goodput(costs, kind, prefill, others, *limits, line, given.requests, beside)  # noqa: B023

        together = max(most(0, beside=rows) for rows in BESIDE)
        apart = {prefill: most(prefill, delays[0]) for prefill in range(1, machines)}
        best = max(apart, key=apart.__getitem__)
        found = [apart[best], *[most(best, delay) for delay in delays[1:]]]
        yield {
            "requests": kind, "machines": machines, "first token": round(limits[0], 2), "token": round(limits[1], 4),
            "multiples": [first, each], "together": round(together, 4), "prefill replicas": best,
            "apart": {f"{1000 * delay:g} ms": round(rate, 4) for delay, rate in zip(delays, found, strict=True)},
            "gain": round(max(found) / together, 2),
        }  # fmt: skip


def real(costs: Costs, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from prefill_real import points  # imports this module

    return points(costs, given)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown for docs/machines.md: the gain of the newest run, by machines and limits."""
    newest = [row for row in rows if not row.get("real")][-1]
    lines = [
        "| requests, machines | " + " | ".join(f"{first:g}x, {each:g}x" for first, each in product(TTFT, ITL)) + " |"
    ]
    lines.append("|---|" + "---:|" * (len(TTFT) * len(ITL)))
    found: dict[str, list[str]] = {}
    for cell in newest["cells"]:
        found.setdefault(f"{cell['requests']}, {cell['machines']}", []).append(f"{cell['gain']:.2f}")
    lines += [f"| {name} | " + " | ".join(gains) + " |" for name, gains in found.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL.gguf")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--delays", default="0.2,1,5", help="milliseconds")
    parser.add_argument("--network", type=float, default=125e6, help="bytes per second")
    parser.add_argument("--requests", type=int, default=200, help="of each simulation, or run, per rate")
    parser.add_argument("--machines", default="2,3,4")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--points", default="agent:2:1.5,chat:2:1.5,agent:4:4", help="KIND:FIRST:EACH, with --real")
    parser.add_argument("--rates", default="0.5,0.8,1.1", help="with --real")
    parser.add_argument("--waiting", metavar="MODEL", default="", help="steps wait as long as this model's, as stored")
    parser.add_argument("--faster", type=float, default=2.0, help="shorten these waits, and raise the bandwidth")
    parser.add_argument("--rounds", type=int, default=1, help="with --real")
    parser.add_argument("--spill", action="store_true", help="with --real: a long queue for prompts is avoided, too")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(table([json.loads(line) for line in STORED.read_text(encoding="utf-8").splitlines()]))
        return
    stored = STORED.read_text(encoding="utf-8").splitlines()
    costs = (
        known(given.waiting, map(json.loads, stored), given.faster)
        if given.waiting
        else measured(given.model, given.threads)
    )
    found = []
    for cell in real(costs, given) if given.real else cells(costs, given):
        print(json.dumps({name: value for name, value in cell.items() if name != "runs"}), flush=True)
        found.append(cell)
    times = {rows: round(1000 * each, 2) for rows, each in zip(costs.rows, costs.seconds, strict=True)}
    block = {"tokens": BLOCK, "bytes": costs.block_bytes, "read ms": 1000 * costs.read, "write ms": 1000 * costs.write}
    line = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(),
        "model": given.waiting or given.model.name,
        "threads": given.threads, "ms": times, "block": block, "network": given.network,
        "largest gain": max(cell["gain"] or 0.0 for cell in found), "real": given.real, "waiting": bool(given.waiting),
        "cells": found,
    }  # fmt: skip
    with STORED.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
