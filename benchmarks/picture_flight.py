"""Time between two tokens of text clients, with and without a picture in flight; localllm and llama-server in turn.

    python benchmarks/picture_flight.py TEXT.gguf MMPROJ.gguf --llama-server PATH [--clients 1,4] [--size 448] [-t 2]
    python benchmarks/picture_flight.py --table

The pair comes from `shapes.py` with `--vocab` (a token without text sends nothing) and from `encoders.py`. N clients
read long answers. When all of them read, they are left alone for `--seconds`; then one request with a picture is sent,
and a second one when it has ended, until as much time has passed and a picture was answered. An interval belongs to the
picture if it ends between the request and the last of its 8 tokens. Rounds alternate between the servers. One JSON line
per server and number of clients is appended to benchmarks/results/picture_flight.jsonl: percentiles of all intervals,
and the pictures' time to their first token.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.compare import machine
from benchmarks.encoders import picture
from benchmarks.serve import free_port, peak_bytes, percentiles, server

RESULTS = Path(__file__).resolve().parent / "results" / "picture_flight.jsonl"
CONTEXT, PROMPT, ANSWERED = 8192, 16, 8  # tokens of the context, words of a prompt, tokens of an answer to a picture
LONGEST = 300.0  # seconds to wait for a picture


@dataclass(slots=True)
class Seen:
    """What one round saw: intervals in seconds, and the pictures' times to their first token."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Row:
    """The intervals of one server under one load, over all rounds."""

    server: str
    model: str
    size: int
    clients: int
    threads: int
    alone: dict[str, float]
    beside: dict[str, float]
    longest: float
    first_token: list[float]
    intervals: tuple[int, int]
    peak_bytes: int
    machine: Any
    date: str


async def read(client: httpx.AsyncClient, prompt: str, times: list[float], stop: asyncio.Event) -> None:
    """Read a long answer until `stop`, and note when its tokens arrive. Sampled tokens usually have text."""
    body = {
        "model": "any", "prompt": prompt, "max_tokens": CONTEXT // 2, "temperature": 1, "top_k": 40, "seed": 1,
        "stream": True, "ignore_eos": True, "cache_prompt": False,
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body, headers={"Connection": "close"}) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if stop.is_set():
                return
            if line.startswith("data: {"):
                times.append(time.perf_counter())


async def see(client: httpx.AsyncClient, size: int, seed: int) -> tuple[float, float, float]:
    """Ask about a picture. Return when it was sent, and when its first and its last token came."""
    marker = (await client.get("/props")).json().get("media_marker", "<__media__>")
    body = {
        "prompt": {"prompt_string": f"What is in {marker} here?", "multimodal_data": [_png(size, seed)]},
        "n_predict": ANSWERED, "temperature": 0, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    sent, times = time.perf_counter(), list[float]()
    async with client.stream("POST", "/completion", json=body, headers={"Connection": "close"}) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return sent, times[0], times[-1]


def _png(size: int, seed: int) -> str:
    from PIL import Image

    pixels = picture(str(size))
    pixels[:8, :8] = seed  # another picture each time, so that it is in no cache
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG", compress_level=1)
    return base64.b64encode(data.getvalue()).decode()


async def load(url: str, clients: int, size: int, seconds: float, seed: int) -> Seen:
    """Run one round."""
    chance, seen, stop = random.Random(seed), Seen(), asyncio.Event()
    arrivals: list[list[float]] = [[] for _ in range(clients)]
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=httpx.Limits(max_connections=64)) as client:
        prompts = [" ".join(str(chance.randrange(100)) for _ in range(PROMPT)) for _ in arrivals]
        readers = [asyncio.create_task(read(client, *each, stop)) for each in zip(prompts, arrivals, strict=True)]
        while not all(len(times) > 8 for times in arrivals):
            await asyncio.sleep(0.05)
            for task in readers:
                if task.done():
                    task.result()
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        ended, flights = time.perf_counter(), list[tuple[float, float, float]]()
        while not flights or time.perf_counter() - ended < seconds:
            flights.append(await asyncio.wait_for(see(client, size, seed * 16 + len(flights)), LONGEST))
        stop.set()
        await asyncio.gather(*readers)
    for times in arrivals:
        for before, after in pairwise(times):
            if began < after <= ended:
                seen.alone.append(after - before)
            elif any(sent < after <= last for sent, _, last in flights):
                seen.beside.append(after - before)
    seen.first = [first - sent for sent, first, _ in flights]
    return seen


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown for docs/media.md: the newest row of each model, size, number of clients and server."""
    newest = {(row["model"], row["size"], row["clients"], row["server"]): row for row in rows}
    lines = [
        "| model | picture | text clients | server | ITL p50, p99 alone (ms) | with a picture (ms) | p99 ratio | "
        "longest (ms) | first token of the picture (s) |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for (model, size, clients, name), row in sorted(newest.items()):
        alone, beside = row["alone"], row["beside"]
        first = sorted(row["first_token"])[len(row["first_token"]) // 2]
        lines.append(
            f"| {model} | {size} x {size} | {clients} | {name} | {alone['p50'] * 1e3:.0f}, {alone['p99'] * 1e3:.0f} "
            f"| {beside['p50'] * 1e3:.0f}, {beside['p99'] * 1e3:.0f} | {beside['p99'] / alone['p99']:.2f} "
            f"| {row['longest'] * 1e3:.0f} | {first:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("mmproj", nargs="?")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--clients", default="1,4")
    parser.add_argument("--size", type=int, default=448)
    parser.add_argument("--seconds", type=float, default=8.0, help="time without pictures, and least time with them")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print(table([json.loads(line) for line in arguments.out.read_text().splitlines()]))
        return
    for clients in map(int, arguments.clients.split(",")):
        port, slots = free_port(), clients + 1
        both = ["--mmproj", arguments.mmproj, "--port", str(port), "-t", str(arguments.threads)]
        ours = [sys.executable, "-m", "localllm", "serve", arguments.model, *both, "--parallel", str(slots)]
        commands = {"localllm": [*ours, "-c", str(CONTEXT), "--spec", "off"]}
        if arguments.llama_server:
            commands["llama-server"] = [
                str(arguments.llama_server), "-m", arguments.model, *both, "-np", str(slots), "-c",
                str(CONTEXT * slots), "--no-webui",
            ]  # fmt: skip
        found: dict[str, tuple[Seen, int]] = {}
        for number in range(arguments.rounds):
            for name, command in commands.items():
                with server(command, port) as process:
                    url = f"http://127.0.0.1:{port}"
                    seen = asyncio.run(load(url, clients, arguments.size, arguments.seconds, number + 1))
                    peak = peak_bytes(process.pid)
                whole, most = found.get(name, (Seen(), 0))
                whole.alone += seen.alone
                whole.beside += seen.beside
                whole.first += seen.first
                found[name] = whole, max(most, peak)
        for name, (seen, peak) in found.items():
            row = asdict(Row(
                name, Path(arguments.model).name.removesuffix(".gguf"), arguments.size, clients, arguments.threads,
                percentiles(seen.alone), percentiles(seen.beside), round(max(seen.beside), 4),
                [round(each, 3) for each in seen.first], (len(seen.alone), len(seen.beside)), peak, machine(),
                datetime.now(UTC).isoformat(timespec="seconds"),
            ))  # fmt: skip
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(table([row]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
