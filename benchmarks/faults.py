"""Kill or stop replicas and stages of `localllm serve --ray` at random, and check every stream token by token.

    python benchmarks/faults.py [MODEL] [--minutes 3] [--replicas 2] [--stages 1] [--clients 6] [--every 5] [--seed 1]
        [--nodes 3]

Clients with fixed seeds ask for streams, plain and with a grammar, without pause. Every few seconds a process is killed
(SIGKILL) or stopped (SIGSTOP). The answers must have the tokens and the text that a server without Ray gave before. At
the end, when all clients are done, the run passes if:

- no stream was wrong, was broken off, or took longer than 60 s; no client waits for ever
- all replicas run again, no request is open, and no block of their caches is lost
- the memory (RSS) of the front grew by at most 10 % and 16 MiB after the first third
- no process is left after the server's end

It also says how long streams paused, and how long the faults took to be repaired. One JSON line per run goes to
benchmarks/results/faults.jsonl. Only processes that this run has started are killed: they have FAULTS_RUN in their
environment.

With `--nodes N`, the replicas run on a cluster of N nodes on this machine (faults_nodes.py). The faults are then whole
nodes: all processes of a node are killed, and some seconds later it starts again. The head is killed at the end; the
server must end with one error within 20 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from faults_nodes import RUN, Nodes, processes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "faults.jsonl"
STARTING = 90.0  # seconds for a server to start
LONGEST = 60.0  # seconds for a stream
GROWTH, MARGIN = 1.1, 16 << 20  # maximum growth of the front's memory: a factor, and bytes
OWN_LINE = re.compile(r"\d\d:\d\d:\d\d ")  # of the server's log
PAUSE = 0.5  # seconds without a token that count as a pause
DOWN = 2.0, 8.0  # seconds until a killed node is started again
LEFT = 30.0  # seconds for the last processes to end: Ray's agents look for their node now and then
HEAD_ENDS = 20.0  # seconds for the server to end after the head
REPLICA, STAGE = "ray::ServeReplica:", "ray::StageProcess"
WORDS = "a cat, two dogs, the old boat, some rain, her red hat, a long day, the big tree, his friend"
GRAMMAR = "root ::= ([a-z]+ [ ,.])+"


@dataclass(slots=True)
class Stream:
    """What a client received."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    pause: float = 0.0  # longest time without a token, in seconds
    paused: list[tuple[float, float]] = field(default_factory=list)  # beginning and end of each pause above PAUSE
    problem: str = ""


@dataclass(slots=True)
class NodeFault:
    """A node that was killed, and started again."""

    began: float
    replicas: int  # processes of replicas and of stages that it had
    stages: int
    repaired: float = 0.0  # seconds until all replicas answered again
    ended: float = 0.0


@dataclass(slots=True)
class Counts:
    streams: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    paused: list[tuple[float, float]] = field(default_factory=list)
    nodes: list[NodeFault] = field(default_factory=list)


def body(number: int) -> dict[str, Any]:
    """Return request `number`: every fifth has a grammar, others are greedy or sampled."""
    story = WORDS.split(", ")[number % 8]
    asked: dict[str, Any] = {"prompt": f"Once upon a time there was {story}", "n_predict": 100 + 37 * (number % 5)}
    asked |= {"stream": True, "return_tokens": True, "seed": 1000 + number, "ignore_eos": number % 5 != 4}
    asked |= {"temperature": 0.0} if number % 3 == 0 else {"temperature": 0.9, "repeat_penalty": 1.1}
    return asked | ({"grammar": GRAMMAR} if number % 5 == 4 else {})


async def ask(client: httpx.AsyncClient, url: str, number: int) -> Stream:
    found, last = Stream(), time.monotonic()
    try:
        async with asyncio.timeout(LONGEST), client.stream("POST", f"{url}/completion", json=body(number)) as response:
            if response.status_code != 200:
                found.problem = f"status {response.status_code}"
                return found
            ended = False
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    found.problem = line if line and not line.startswith(":") else found.problem
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    found.problem = str(event["error"])[:300]
                    return found
                found.tokens += event.get("tokens", [])
                found.text += event.get("content", "")
                ended = ended or event.get("stop", False)
                now = time.monotonic()
                found.paused += [(last, now)] if now - last > PAUSE else []
                found.pause, last = max(found.pause, now - last), now
            found.problem = found.problem or ("" if ended else "the stream was broken off")
    except TimeoutError:
        found.problem = f"no end after {LONGEST:g} s"
    except httpx.HTTPError as error:
        found.problem = f"{type(error).__name__}: {error}"
    return found


# -- processes -------------------------------------------------------------------------------------------------------


def named(run: str, start: str) -> list[int]:
    return sorted(process for process, line in processes(**{RUN: run}).items() if line.startswith(start))


def memory(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


@contextmanager
def served(
    run: str, port: int, log: Path, *arguments: str, more: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "localllm", "serve", *arguments, "--port", str(port)], cwd=ROOT, stdout=output,
            stderr=output, env={**os.environ, **(more or {}), RUN: run},
        )  # fmt: skip
        try:
            began = time.monotonic()
            while "listening on" not in log.read_text():
                if server.poll() is not None or time.monotonic() - began > STARTING:
                    raise SystemExit(f"the server does not start:\n{log.read_text()}")
                time.sleep(0.1)
            yield server
        finally:
            server.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                server.wait(30)
            server.kill()


# -- the run ---------------------------------------------------------------------------------------------------------


async def undisturbed(url: str, numbers: int) -> list[Stream]:
    async with httpx.AsyncClient(timeout=None) as client:
        found = [await ask(client, url, number) for number in range(numbers)]
    assert not any(each.problem for each in found), found
    return found


async def client_of(url: str, chance: random.Random, expected: list[Stream], until: float, counts: Counts) -> None:
    async with httpx.AsyncClient(timeout=None) as client:
        while time.monotonic() < until:
            number = chance.randrange(len(expected))
            got = await ask(client, url, number)
            counts.streams += 1
            counts.tokens += len(got.tokens)
            counts.pauses.append(got.pause)
            counts.paused += got.paused
            same = (got.tokens, got.text) == (expected[number].tokens, expected[number].text)
            if got.problem or not same:
                counts.wrong.append(f"request {number}: {got.problem or 'other tokens'} after {len(got.tokens)} tokens")


async def break_things(run: str, args: argparse.Namespace, chance: random.Random, until: float, counts: Counts) -> None:
    while time.monotonic() < until - 2 * args.every:
        await asyncio.sleep(args.every * chance.uniform(0.7, 1.3))
        kind = chance.choice([REPLICA, STAGE]) if args.stages > 1 else REPLICA
        if not (there := named(run, kind)):
            counts.faults["no process"] += 1
            continue
        how = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        with suppress(ProcessLookupError):
            os.kill(chance.choice(there), how)
        counts.faults[f"{'replica' if kind == REPLICA else 'stage'} {how.name}"] += 1


async def running(url: str) -> float:
    """Return the number of replicas that answer."""
    return sum(value for name, value in (await metrics(url)).items() if name.startswith("localllm_replicas{"))


async def break_nodes(
    url: str, nodes: Nodes, args: argparse.Namespace, chance: random.Random, until: float, counts: Counts
) -> None:
    """Kill nodes with replicas or stages, now and then another one. The next one is killed once all replicas run."""
    while time.monotonic() < until - 2 * args.every:
        await asyncio.sleep(args.every * chance.uniform(0.7, 1.3))
        lines = {number: list(nodes.processes(number).values()) for number in range(1, nodes.count)}
        used = [number for number in lines if any(line.startswith((REPLICA, STAGE)) for line in lines[number])]
        number = chance.choice(used if used and chance.random() < 0.8 else list(lines))
        has = [sum(line.startswith(kind) for line in lines[number]) for kind in (REPLICA, STAGE)]
        fault = NodeFault(time.monotonic(), *has)
        counts.nodes.append(fault)
        counts.faults[f"node with {has[0]} replicas and {has[1]} stages"] += 1
        await asyncio.to_thread(nodes.kill, number)
        await asyncio.sleep(chance.uniform(*DOWN))
        await asyncio.to_thread(nodes.start, number)
        while await running(url) < args.replicas and time.monotonic() < fault.began + LONGEST:
            await asyncio.sleep(0.1)
        fault.ended = time.monotonic()
        fault.repaired = fault.ended - fault.began


def node_pauses(counts: Counts) -> list[dict[str, Any]]:
    """Return what each fault of a node cost."""
    found = []
    for fault in counts.nodes:
        during = [end - begin for begin, end in counts.paused if end > fault.began and begin < fault.ended]
        found.append({
            "replicas": fault.replicas, "stages": fault.stages, "longest pause s": round(max(during, default=0.0), 2),
            "all replicas after s": round(fault.repaired, 1),
        })  # fmt: skip
    return found


def head_dies(nodes: Nodes, server: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """Kill the head. Return the seconds until the server ended, its exit code, and its last lines."""
    before, began = log.read_text(), time.monotonic()
    nodes.kill(0)
    with suppress(subprocess.TimeoutExpired):
        server.wait(3 * HEAD_ENDS)
    said = log.read_text()[len(before) :].strip().splitlines()
    return {
        "server ended s after its head": round(time.monotonic() - began, 1), "with code": server.returncode,
        "and said": said[-20:],
    }  # fmt: skip


async def metrics(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=10) as client:
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def disturbed(
    run: str,
    url: str,
    server: subprocess.Popen[bytes],
    args: argparse.Namespace,
    expected: list[Stream],
    nodes: Nodes | None,
) -> tuple[Counts, dict[str, Any]]:
    counts, chance, until = Counts(), random.Random(args.seed), time.monotonic() + 60 * args.minutes
    seeds = [random.Random(f"{args.seed} {number}") for number in range(args.clients)]
    work = [asyncio.create_task(client_of(url, seed, expected, until, counts)) for seed in seeds]
    if nodes is not None:
        work.append(asyncio.create_task(break_nodes(url, nodes, args, chance, until, counts)))
    else:
        work.append(asyncio.create_task(break_things(run, args, chance, until, counts)))
    await asyncio.sleep(20 * args.minutes)
    before = memory(server.pid)
    done, stuck = await asyncio.wait(work, timeout=40 * args.minutes + 2 * LONGEST)
    for task in done:
        task.result()
    began, found = time.monotonic(), dict[str, Any]()
    while time.monotonic() - began < 30:  # the last fault is repaired, and loads are reported
        await asyncio.sleep(0.5)
        values = await metrics(url)
        found = {
            "replicas running": len(named(run, REPLICA)),
            "stages running": len(named(run, STAGE)),
            "open": values["llamacpp:requests_processing"] + values["llamacpp:requests_deferred"],
            "blocks lost": sum(
                value * (1 if 'state="all"' in name else -1)
                for name, value in values.items() if name.startswith("localllm_cache_blocks")
            ),
        }  # fmt: skip
        needed = args.replicas * (args.stages - 1)  # more of them wait to replace one
        repaired = found["replicas running"] == args.replicas and found["stages running"] >= needed
        if repaired and not found["open"] and not found["blocks lost"]:
            break
    found["repaired after s"] = round(time.monotonic() - began, 1)
    found |= {"stuck": len(stuck), "front MiB before": before >> 20}
    found["front MiB after"] = memory(server.pid) >> 20
    counted = {name.partition("{")[0]: value for name, value in (await metrics(url)).items()}
    found |= {name: counted[f"localllm_{name}_total"] for name in ("replicas_lost", "requests_moved")}
    return counts, found


def problems_of(args: argparse.Namespace, counts: Counts, found: dict[str, Any], left: list[str]) -> list[str]:
    said = counts.wrong[:10]
    said += [f"{found['stuck']} clients are stuck"] if found["stuck"] else []
    said += [f"{found['open']:g} requests are open"] if found["open"] else []
    if found["replicas running"] != args.replicas or found["stages running"] < args.replicas * (args.stages - 1):
        said.append(f"{found['replicas running']} replicas and {found['stages running']} stages run")
    said += [f"{found['blocks lost']:g} cache blocks are lost"] if found["blocks lost"] else []
    if found["front MiB after"] << 20 > GROWTH * (found["front MiB before"] << 20) + MARGIN:
        said.append(f"the front grew from {found['front MiB before']} to {found['front MiB after']} MiB")
    if "with code" in found:
        errors = [line for line in found["and said"] if line.startswith("error: ")]
        foreign = [line for line in found["and said"] if line not in errors and not OWN_LINE.match(line)]
        if found["server ended s after its head"] > HEAD_ENDS or found["with code"] != 1 or len(errors) != 1 or foreign:
            said.append(f"after the death of the head: code {found['with code']}, {found['and said']}")
    said += [f"{len(left)} processes are left: {', '.join(left)[:300]}"] if left else []
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--every", type=float, default=5, help="seconds between two faults")
    parser.add_argument("--nodes", type=int, default=0, help="nodes of the cluster, which are killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=8790)
    args = parser.parse_args()
    run, log = secrets.token_hex(8), Path(f"/tmp/faults-{os.getpid()}.log")
    url = f"http://127.0.0.1:{args.port}"
    with served(run, args.port, log, args.model):
        expected = asyncio.run(undisturbed(url, 40))
    words = [args.model, "--ray", "auto", "--replicas", str(args.replicas), "--stages", str(args.stages)]
    with ExitStack() as cluster:
        nodes = cluster.enter_context(closing(Nodes(run, args.nodes))) if args.nodes else None
        more = nodes.environment if nodes is not None else None
        with served(run, args.port, log, *words, more=more) as server:
            counts, found = asyncio.run(disturbed(run, url, server, args, expected, nodes))
            if nodes is not None:
                found |= head_dies(nodes, server, log)
    until = time.monotonic() + LEFT
    while (left := [line.strip()[:60] for line in processes(**{RUN: run}).values()]) and time.monotonic() < until:
        time.sleep(0.5)
    problems = problems_of(args, counts, found, left)
    pauses = sorted(counts.pauses)
    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"), "model": Path(args.model).name,
        **{name: getattr(args, name) for name in ("minutes", "replicas", "stages", "nodes", "clients", "every")},
        "seed": args.seed,
        "streams": counts.streams, "tokens": counts.tokens, "wrong": len(counts.wrong), "faults": dict(counts.faults),
        "longest pause s": round(pauses[-1], 2), "pause s, 90 %": round(pauses[int(0.9 * len(pauses))], 2),
        **found, **({"faults of nodes": node_pauses(counts)} if args.nodes else {}), "left": len(left),
        "problems": problems,
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
