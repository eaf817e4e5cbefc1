"""Load-test localllm serve and llama-server in alternation, with the same GGUF, threads, slots and requests.

    python benchmarks/make_model.py llama-1b Q4_K_M 1b.gguf --vocab VOCABULARY.gguf
    python benchmarks/serve.py 1b.gguf --llama-server PATH [-t 2] [--clients 1,4,8,16] [--rounds 2]
    python benchmarks/serve.py demo --traces stories --model-draft draft [-t 2] [--clients 1,4,8]
    python benchmarks/serve.py 1b.gguf --before CHECKOUT [-t 2] [--clients 4,8] [--rounds 2]
    python benchmarks/serve.py --table

`--before` also runs the server of another checkout of localllm, for example of the commit before a change.

The GGUF needs a real vocabulary: servers send nothing for a token without text, so its time would be missing.

A trace is a fixed list of requests. Every client takes the next request when its answer ends. `chat` has prompts of
about 200 tokens without a common prefix, and answers of 96 tokens. `agent` has prompts with a shared prefix of 4000
tokens and 100 different tokens, and answers of 48 tokens. Answers are greedy and ignore the end-of-text token, so both
servers generate the same number of tokens. `stories` has questions in words, and answers up to their end or 192 tokens.
It is for a trained model, and with --model-draft for a trained draft model, whose drafts would fail on random tokens.

TTFT is the time to the first token, ITL the time between two tokens, TPOT the mean ITL of an answer. Goodput counts the
tokens of answers with a TTFT under 5 s and a TPOT under 200 ms. One JSON line per server, trace and number of clients
goes to benchmarks/results/serve.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "serve.jsonl"
CONTEXT = 8192
GOOD_TTFT, GOOD_TPOT = 5.0, 0.2  # goodput limits in seconds
HEROES = (
    "a bird", "a dog", "a cat", "a little girl named Lily", "a boy", "a bear", "a fish", "a tree", "a ball", "a rabbit",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trace:
    """A list of requests: the token ids of their prompts, and the length of their answers."""

    prompts: list[list[int]] | list[str]
    answer: int
    ends: bool = False  # whether an answer may end before that length
    context: int = CONTEXT


def traces(vocabulary: int, requests: int, seed: int) -> dict[str, Trace]:
    """Return the traces.

    Prompts are random tokens, so that no server benefits from its vocabulary; stories are words.
    """
    chance = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(vocabulary // 8, vocabulary // 2) for _ in range(count)]

    shared = tokens(4000)
    return {
        "chat": Trace([tokens(chance.randrange(100, 300)) for _ in range(requests)], 96),
        "agent": Trace([[*shared, *tokens(100)] for _ in range(requests)], 48),
        "stories": Trace([_story(chance.choice(HEROES)) for _ in range(requests)], 192, ends=True, context=1024),
    }


def _story(hero: str) -> str:
    """Return a chat that asks the bundled model for a story."""
    return f"<|im_start|>user<|im_sep|>Tell me a story about {hero}.<|im_end|><|im_start|>assistant<|im_sep|>"


@dataclass(slots=True)
class Answer:
    """The arrival times of an answer's pieces, in seconds since the request."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    prompt: int = 0


@dataclass(slots=True)
class Row:
    """The measurements of one server under one load."""

    server: str
    model: str
    trace: str
    clients: int
    threads: int
    requests: int
    tokens_per_second: float
    goodput: float
    ttft: dict[str, float]
    tpot: dict[str, float]
    itl: dict[str, float]
    cached_share: float
    peak_bytes: int
    seconds: float
    device: str
    date: str


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {f"p{q}": ordered[min(len(ordered) - 1, round(q / 100 * (len(ordered) - 1)))] for q in (50, 90, 99)}
    return {name: round(value, 4) for name, value in at.items()} if ordered else {}


async def ask(client: httpx.AsyncClient, prompt: list[int] | str, count: int, ends: bool) -> Answer:
    """Stream one completion and return its arrival times."""
    body = {
        "model": "any", "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True, "ignore_eos": not ends,
        "stream_options": {"include_usage": True}, "cache_prompt": True,
    }  # fmt: skip
    answer, began = Answer(), time.perf_counter()
    # llama-server closes idle connections, so each request opens a new connection.
    async with client.stream("POST", "/v1/completions", json=body, headers={"Connection": "close"}) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
                answer.prompt = event["usage"]["prompt_tokens"]
                answer.cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if any(choice.get("text") is not None for choice in event.get("choices", ())):
                answer.times.append(time.perf_counter() - began)
    return answer


async def load(url: str, trace: Trace, clients: int) -> tuple[list[Answer], float]:
    """Let `clients` clients work through a trace. Return the answers and the total seconds."""
    waiting, answers = iter(trace.prompts), list[Answer]()
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=httpx.Limits(max_connections=64)) as client:

        async def work() -> None:
            for prompt in waiting:
                answers.append(await ask(client, prompt, trace.answer, trace.ends))

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(clients)))
        return answers, time.perf_counter() - began


@contextmanager
def server(command: Sequence[str], port: int, folder: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager around a server that runs in `folder`."""
    with Path(f"/tmp/serve-{port}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}; see {log.name}")
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def row(name: str, arguments: argparse.Namespace, trace: str, clients: int, answers: list[Answer], seconds: float,
        pid: int) -> Row:  # fmt: skip
    between = [b - a for one in answers for a, b in zip(one.times, one.times[1:], strict=False)]
    tpot = [(one.times[-1] - one.times[0]) / max(one.tokens - 1, 1) for one in answers]
    good = sum(
        one.tokens for one, each in zip(answers, tpot, strict=True) if one.times[0] < GOOD_TTFT and each < GOOD_TPOT
    )
    written = sum(one.tokens for one in answers)
    return Row(
        server=name, model=Path(arguments.model).name, trace=trace, clients=clients, threads=arguments.threads,
        requests=len(answers), tokens_per_second=round(written / seconds, 2), goodput=round(good / seconds, 2),
        ttft=percentiles([one.times[0] for one in answers]), tpot=percentiles(tpot), itl=percentiles(between),
        cached_share=round(sum(one.cached for one in answers) / max(sum(one.prompt for one in answers), 1), 3),
        peak_bytes=peak_bytes(pid), seconds=round(seconds, 2), device=arguments.device,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def stored(path: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown for docs/serve.md: by device, a line per trace, client count and server, with medians."""
    cells: dict[str, dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for one in rows:
        key = (one["model"].removesuffix(".gguf"), one["trace"], one["clients"], one["server"])
        cells.setdefault(one["device"], {}).setdefault(key, []).append(one)
    lines = []
    for device, found in cells.items():
        lines += [
            "" if lines else None,
            f"**{device}**",
            "",
            "| model | trace | clients | server | tokens/s | goodput | TTFT p50, p99, s | TPOT p50, ms | "
            "ITL p50, p99, ms | cached | GB |",
            "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for key in sorted(found):
            value = partial(_median, found[key])
            lines.append(
                f"| {' | '.join(map(str, key))} | {value('tokens_per_second'):.1f} | {value('goodput'):.1f} | "
                f"{value('ttft', 'p50'):.2f}, {value('ttft', 'p99'):.2f} | {value('tpot', 'p50') * 1e3:.0f} | "
                f"{value('itl', 'p50') * 1e3:.0f}, {value('itl', 'p99') * 1e3:.0f} | {value('cached_share'):.0%} | "
                f"{value('peak_bytes') / 1e9:.1f} |"
            )
    return "\n".join(line for line in lines if line is not None)


def _median(rows: Sequence[dict[str, Any]], *keys: str) -> float:
    """Return the median of a metric over rounds."""
    values = []
    for one in rows:
        found: Any = one
        for key in keys:
            found = found[key]
        values.append(float(found))
    return median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--before", type=Path, help="also run the server of this checkout")
    parser.add_argument("--itl-target", default="0", help="the option of localllm serve")
    parser.add_argument("--model-draft", help="also run localllm with this draft model")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--traces", default="chat,agent")
    parser.add_argument("--per-client", type=int, default=3, help="requests per client, at least 4 in all")
    parser.add_argument("--rounds", type=int, default=1, help="how often each server runs, in turn")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON lines are appended here")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(stored()))
        return
    import localllm

    with localllm.load(arguments.model, threads=arguments.threads, ctx_size=64) as model:
        vocabulary, arguments.device = model.vocabulary, model.device
    for trace in arguments.traces.split(","):
        for clients in map(int, arguments.clients.split(",")):
            port, seed = free_port(), clients
            prompts = traces(vocabulary, max(4, clients * arguments.per_client), seed)[trace]
            slots, threads = str(max(clients, 1)), str(arguments.threads)
            ours = [
                sys.executable, "-m", "localllm", "serve", arguments.model, "--port", str(port), "-t", threads,
                "--parallel", slots, "-c", str(prompts.context),
            ]  # fmt: skip
            commands = {"localllm": [*ours, "--itl-target", arguments.itl_target]}
            if arguments.before:
                commands["localllm before"] = ours
            if arguments.model_draft:
                commands["localllm -md"] = [*ours, "-md", arguments.model_draft]
            if arguments.llama_server:
                commands["llama-server"] = [
                    str(arguments.llama_server), "-m", arguments.model, "--port", str(port), "-t", threads,
                    "-np", slots, "-c", str(prompts.context * clients), "--no-webui",
                ]  # fmt: skip
            for name, command in list(commands.items()) * arguments.rounds:
                folder = arguments.before if name == "localllm before" else ROOT
                with server(command, port, folder) as process:
                    url = f"http://127.0.0.1:{port}"
                    asyncio.run(load(url, Trace([[7] * 8], 4), 1))  # warm-up request
                    answers, seconds = asyncio.run(load(url, prompts, clients))
                    found = row(name, arguments, trace, clients, answers, seconds, process.pid)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
                print(table([asdict(found)]).splitlines()[-1], mean(one.tokens for one in answers), flush=True)


if __name__ == "__main__":
    main()
