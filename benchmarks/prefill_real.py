"""Real replicas for prefill_apart.py: processes with one thread each, over ZeroMQ and a relay, without Ray.

A replica runs the scheduler of `localllm serve`. Its steps may wait for the measured times of another model instead of
computing, so that replicas do not share a processor. With `apart`, replica 0 evaluates prompts and sends their cache
blocks to replica 1 (`localllm/distributed/prompts.py`), which decodes. Otherwise both do both, and the front's
rule (`distributed/fleet.py`) chooses one for each request. Times are taken where tokens are made, by a clock that all
processes share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise, product
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any

from prefill_apart import ATTAINED, BESIDE, MOST_ROWS, STALL, WORKLOADS, Costs, Line, goodput
from relay import Relays, relays

import localllm
from localllm.cluster.secured import Peer
from localllm.cluster.zeromq import Endpoint
from localllm.distributed.fleet import Fleet
from localllm.distributed.messages import chunks_of
from localllm.distributed.prompts import PromptClient, PromptServer, PromptSource, endpoint_bytes
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Event, Failed, Finished, Request, Token
from localllm.generation.scheduler import Scheduler
from localllm.options import SamplingOptions

CONTEXT = 2048
SLOTS = 16  # requests that fit in the cache of a replica at once
ANSWERING = 60.0  # seconds after the last arrival
NAMES = ("0", "1")
MARGIN = 0.93  # of the limit per token: the loop and the messages take time between steps


@dataclass(frozen=True, slots=True)
class Setting:
    """How two replicas work together."""

    apart: bool
    parallel: int  # requests that a replica runs at once
    itl_target: float = 0.0  # of a replica that does both
    delay: float = 0.0  # of the relay, in seconds
    bandwidth: float = 125e6  # of the relay, in bytes per second
    costs: Costs | None = None  # steps wait for these seconds instead
    most_waiting: int = 0  # tokens that wait for the replica for prompts, beyond which the other one evaluates prompts


@dataclass(slots=True)
class Asked:
    """A request of the trace."""

    arrival: float  # after the start
    prompt: list[int]
    answer: int
    arrived: float = 0.0  # by the clock
    times: list[float] = field(default_factory=list)


def waiting(executable: Any, costs: Costs) -> None:
    """Let an executable wait as if its steps, and the reading and writing of its blocks, took as long as `costs`."""
    layers = len(executable.block_bytes)

    def slow(name: str, seconds: Callable[..., float]) -> None:
        work = getattr(executable, name)

        def run(*given: Any) -> Any:
            began = monotonic()
            found = work(*given)
            sleep(max(0.0, seconds(*given) - (monotonic() - began)))
            return found

        setattr(executable, name, run)

    slow("step", lambda batch: costs.step(len(batch.tokens)))
    slow("read_blocks", lambda layer, numbers: costs.read * len(numbers) / layers)
    slow("write_blocks", lambda layer, numbers, content: costs.write * len(numbers) / layers)


def replica(path: str, pipe: Connection, parallel: int, itl_target: float, costs: Costs | None) -> None:
    """Run a replica in this process until the pipe closes."""
    warnings.simplefilter("ignore")  # the bundled model takes long prompts, too
    model = localllm.load(path, ctx_size=CONTEXT, threads=1, spec="off", sequences=SLOTS)
    assert isinstance(model, localllm.Model)
    if costs is not None:
        waiting(model.executable, costs)
    scheduler = Scheduler(model.new_core(SchedulerLimits(parallel, itl_target=itl_target)))
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    endpoint, source = Endpoint(endpoint_bytes(CONTEXT), patience=5.0), None
    server: PromptServer | None = None
    endpoints = [endpoint]  # a lost connection stays lost, and shows in `failed`
    sending = threading.Lock()
    pipe.send(endpoint.peer)

    def tell(*said: Any) -> None:
        with sending, suppress(OSError):
            pipe.send(said)

    def listener(number: int, times: list[float], event: Event) -> None:
        if isinstance(event, Token):
            times.append(monotonic())
        elif isinstance(event, Finished | Failed):
            tell("done", number, times, str(event.error) if isinstance(event, Failed) else "")

    async def answer(number: int, request: Request) -> None:
        if source is not None:
            await source.fetch(request)
        times: list[float] = []
        scheduler.submit(request, lambda event: listener(number, times, event))

    with suppress(EOFError, OSError):
        while True:
            kind, *given = pipe.recv()
            if kind == "accept":
                endpoint.accept(given[0])
                tell("accepted")
            elif kind == "connect":
                peer, prompts, most_waiting = given
                endpoint.connect(peer)
                if prompts:
                    server = PromptServer(model, scheduler, endpoint)
                else:
                    source = PromptSource(
                        model, scheduler, [PromptClient(endpoints.pop, retry=60.0)], most_waiting=most_waiting
                    )
                tell("connected")
            elif kind == "ask":
                number, prompt, tokens = given
                request = Request(prompt, SamplingOptions(temperature=0.0), tokens, ignore_eos=True)
                asyncio.run_coroutine_threadsafe(answer(number, request), loop)
            elif kind == "counts":
                tell("counts", (source.fetched, source.failed) if source is not None else (0, 0))
    del server
    os._exit(0)  # the threads of ZeroMQ and of the scheduler end with the process


class Replicas:
    """Two replicas, and who gets a request."""

    def __init__(self, path: str, setting: Setting, between: Relays) -> None:
        self._setting = setting
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self.counts = (0, 0)  # prompts whose blocks came from the other replica, and that failed, so far
        for number in range(2):
            ours, theirs = spawn.Pipe()
            most = SLOTS if setting.apart and not number else setting.parallel
            target = 0.0 if setting.apart and not number else setting.itl_target
            process = spawn.Process(target=replica, args=(path, theirs, most, target, setting.costs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        peers = [pipe.recv() for pipe in self._pipes]
        if setting.apart:
            for pipe, peer in zip(self._pipes, reversed(peers), strict=True):
                pipe.send(("accept", peer.public_key))
                pipe.recv()
            for number, (pipe, peer) in enumerate(zip(self._pipes, reversed(peers), strict=True)):
                via = Peer(f"tcp://{between.to(peer.address.removeprefix('tcp://'))}", peer.public_key)
                pipe.send(("connect", via, not number, setting.most_waiting))
                pipe.recv()
            sleep(0.5)

    def run(self, trace: Sequence[Asked]) -> None:
        """Send the requests when they arrive, and take the times of their tokens."""
        fleet, done = Fleet("benchmark", self._setting.parallel), threading.Semaphore(0)
        fleet.update(NAMES)

        def read(pipe: Connection) -> None:
            with suppress(EOFError, OSError):
                while (found := pipe.recv())[0] == "done":
                    _, number, times, problem = found
                    assert not problem, problem
                    trace[number].times = times
                    fleet.ended(number)
                    done.release()
                self.counts = max(self.counts, found[1])

        readers = [threading.Thread(target=read, args=(pipe,), daemon=True) for pipe in self._pipes]
        for reader in readers:
            reader.start()
        began = monotonic()
        for number, one in enumerate(trace):
            sleep(max(0.0, began + one.arrival - monotonic()))
            one.arrived = monotonic()
            chunks = chunks_of(one.prompt)
            name = NAMES[1] if self._setting.apart else fleet.ranked(NAMES, chunks, len(one.prompt))[0]
            fleet.sent(number, name, chunks)
            self._pipes[int(name)].send(("ask", number, one.prompt, one.answer))
        until = monotonic() + ANSWERING
        for _ in trace:
            if not done.acquire(timeout=max(0.0, until - monotonic())):
                break
        for pipe in self._pipes:
            pipe.send(("counts",))
        for reader in readers:
            reader.join(5)
            assert not reader.is_alive(), "a replica does not answer"

    def end(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(5)
            process.kill()
            process.join()


@contextmanager
def opened(path: str, setting: Setting) -> Iterator[Replicas]:
    with relays(setting.delay, setting.bandwidth) as between:
        found = Replicas(path, setting, between)
        try:
            yield found
        finally:
            found.end()


def trace_of(mean: tuple[int, int], rate: float, seconds: float, seed: str) -> list[Asked]:
    """Draw requests as the simulation does: Poisson arrivals, prompts and answers of half to double the mean."""
    chance, now, found = random.Random(seed), 0.0, list[Asked]()
    while (now := now + chance.expovariate(rate)) < seconds:
        prompt, answer = (max(2, round(each * 2 ** chance.uniform(-1, 1) / 1.08)) for each in mean)
        found.append(Asked(now, [chance.randrange(1, 1000) for _ in range(prompt)], answer))
    return found


def good(one: Asked, first: float, each: float) -> bool:
    """Return whether a request met the limits, as the simulation counts it."""
    if len(one.times) < one.answer or any(b - a > STALL for a, b in pairwise(one.times)):
        return False
    mean = (one.times[-1] - one.times[0]) / max(one.answer - 1, 1)
    return one.times[0] - one.arrived <= first and mean <= each


def summary(trace: Sequence[Asked], first: float, each: float) -> dict[str, float]:
    """Return the share of good requests, their number per second, and the 90th percentiles of both times in ms."""
    answered = [one for one in trace if one.times]
    ttft = sorted(one.times[0] - one.arrived for one in answered)
    itl = sorted((one.times[-1] - one.times[0]) / max(len(one.times) - 1, 1) for one in answered)
    met, span = sum(good(one, first, each) for one in trace), trace[-1].arrival - trace[0].arrival

    def high(values: Sequence[float]) -> float:
        return round(1000 * values[int(0.9 * (len(values) - 1))], 1) if values else 0.0

    found = {"met": round(met / len(trace), 3), "good per second": round(met / max(span, 1e-9), 3)}
    return {**found, "requests": len(trace), "first token ms": high(ttft), "token ms": high(itl)}


def rate_of(shares: Mapping[float, Sequence[float]]) -> float:
    """Return the rate at which ATTAINED of the requests met the limits, interpolated between the rates."""
    below, before = 0.0, 1.0
    for rate, several in sorted(shares.items()):
        share = sum(several) / len(several)
        if share < ATTAINED:
            return below + (rate - below) * (before - ATTAINED) / (before - share)
        below, before = rate, share
    return below


def points(costs: Costs, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run every point of `given.points` (KIND:FIRST:EACH), all arrangements in turn at each rate, or at once if they
    wait.
    """
    path, network, slow = str(given.model), given.network, None
    if given.waiting:
        path, slow = "demo", costs
        with localllm.load("demo", threads=1, spec="off") as model:
            network *= given.faster * sum(model.executable.block_bytes) / costs.block_bytes  # its blocks are smaller
    delays = [float(each) / 1000 for each in given.delays.split(",")]
    for text in given.points.split(","):
        kind, first, each = text.split(":")
        limits = float(first) * costs.prompt(WORKLOADS[kind][0]), float(each) * costs.step(1)
        target, faster = MARGIN * limits[1], given.faster if given.waiting else 1.0
        line = Line(delays[0], given.network * faster)
        predicted = {
            "together": max(goodput(costs, kind, 0, 2, *limits, line, 100, rows) for rows in BESIDE),
            "apart": goodput(costs, kind, 1, 1, *limits, line, 100),
        }

        def most(beside: int) -> int:
            return max([rows for rows in range(1, SLOTS + 1) if costs.step(rows + beside) <= target], default=1)  # noqa: B023

        settings = {
            f"together, {rows} rows beside": Setting(False, count, target, costs=slow)
            for count, rows in {most(rows): rows for rows in BESIDE}.items()
        }
        for delay in delays:
            settings[f"apart, {1000 * delay:g} ms"] = Setting(True, most(0), 0.0, delay, network, slow)
        if given.spill:
            queue = int(0.5 * first_tokens(costs, limits[0]))
            settings["apart or here"] = Setting(True, most(0), target, delays[0], network, slow, queue)
        rates = [float(each) * max(predicted.values()) for each in given.rates.split(",")]
        shares: dict[str, dict[float, list[float]]] = {name: {} for name in settings}
        runs = []
        with ExitStack() as stack:
            replicas = {name: stack.enter_context(opened(path, setting)) for name, setting in settings.items()}
            with ThreadPoolExecutor(len(replicas) if given.waiting else 1) as pool:

                def run(name: str, rate: float, seconds: float, seed: str) -> dict[str, Any]:
                    trace = trace_of(WORKLOADS[kind], rate, seconds, seed)  # noqa: B023
                    replicas[name].run(trace)  # noqa: B023
                    row = {"arrangement": name, "rate": round(rate, 4), **summary(trace, *limits)}  # noqa: B023
                    return row | {"fetched, failed": replicas[name].counts}  # noqa: B023

                list(pool.map(lambda name: run(name, rates[0], 6 / rates[0], "warm"), replicas))  # noqa: B023
                for number, rate in product(range(given.rounds), rates):
                    seed = f"{number} {rate}"
                    for row in pool.map(lambda name: run(name, rate, given.requests / rate, seed), replicas):  # noqa: B023
                        shares[row["arrangement"]].setdefault(rate, []).append(row["met"])
                        runs.append(row)
                        print(json.dumps(row), flush=True)
        found = {name: round(rate_of(own), 3) for name, own in shares.items()}
        apart, together = (
            max(rate for name, rate in found.items() if name.startswith("together") is each) for each in (False, True)
        )
        yield {
            "requests": kind, "multiples": [float(first), float(each)],
            "limits ms": [round(1000 * limit, 1) for limit in limits],
            "parallel": {name: setting.parallel for name, setting in settings.items()},
            "predicted": {k: round(v, 3) for k, v in predicted.items()},
            "goodput": found, "gain": round(apart / together, 2) if together else None, "runs": runs,
        }  # fmt: skip


def first_tokens(costs: Costs, seconds: float) -> int:
    """Return the number of prompt tokens that a replica for prompts evaluates in `seconds`."""
    return int(seconds / costs.prompt(MOST_ROWS) * MOST_ROWS)
