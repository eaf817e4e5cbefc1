"""Compare speculative decoding: plain, draft model, n-grams, auto, and llama.cpp's draft mode, on the same prompts.

    python benchmarks/speculation_pair.py FOLDER
    python benchmarks/speculation.py FOLDER/target-80.gguf --draft FOLDER/draft.gguf [--peer llama-speculative-simple]
    python benchmarks/speculation.py demo --draft draft
    python benchmarks/speculation.py --table

A round answers every prompt once in every mode, in alternation. Each answer starts without learned state. Decode speed
is in tokens/s from the first token of an answer to its last, all work included. Ratios are medians over rounds of the
speed of a mode / plain in the same round. One JSON line per prompt and temperature goes to
benchmarks/results/speculation.jsonl. Further lines with the same keys are further rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import localllm
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.speculation.setup import Speculation
from localllm.model import Model
from localllm.options import SpeculationOptions

from compare import RESULTS, machine  # isort: skip
from speculation_pair import PROMPTS  # isort: skip

MODES = ("plain", "draft", "ngram", "auto")
PEER = "llama.cpp"
WARM, SMALL = 300, 50 << 20  # number of warm-up steps before an answer, for models smaller than SMALL bytes
SPEED = re.compile(r"decoded\s+\d+ tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+)")
ACCEPTED = re.compile(r"n_drafted\s*=\s*(\d+)\s+.*?n_accept\s*=\s*(\d+)", re.DOTALL)


@dataclass(slots=True)
class Row:
    """Samples of one prompt and temperature: tokens/s of each round by mode, and drafts of the last round."""

    model: str
    prompt: str
    temperature: float
    tokens: int
    threads: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    guessed: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # drafted, accepted, rounds
    estimated: dict[str, float] = field(default_factory=dict)  # speedup over plain that the statistics estimate
    same_text: bool = True  # whether all modes generated the same tokens

    def ratio(self, mode: str, to: str = "plain") -> float:
        return median(a / b for a, b in zip(self.rates[mode], self.rates[to], strict=True))


def answer(model: Model, draft: Model | None, row: Row, mode: str, seed: int) -> list[int]:
    """Generate one answer in one mode, and add its decode speed to the row."""
    if mode == "plain":
        model.draft_with(None)
    else:
        name = str(draft.file.path) if draft is not None and mode != "ngram" else ""
        reader = draft.speculation_target() if draft is not None and name else None
        model.draft_with(Speculation(model.speculation_target(), SpeculationOptions(name, mode), reader))
    model.new_core(SchedulerLimits())  # with an empty cache and without learned state
    ids = model.tokenize(PROMPTS[row.prompt], parse_special=True)
    warm = model.session()  # loading and earlier timing have evicted the processor's caches
    for _ in range(WARM if model.executable.memory.weights < SMALL else 0):
        warm.rewind(0)
        warm.evaluate(ids[:1], logits=False)
    warm.close()
    reply = model.generate(ids, max_tokens=row.tokens, ignore_eos=True, temperature=row.temperature, seed=seed)
    next(reply)
    began = perf_counter()
    reply.wait()
    row.rates.setdefault(mode, []).append((row.tokens - 1) / (perf_counter() - began))
    if (usage := reply.usage).drafting:
        row.guessed[mode] = (usage.drafted, usage.accepted, usage.rounds)
        row.estimated[mode] = usage.speedup
    return reply.tokens


def peer_answer(binary: Path, target: Path, draft: Path, row: Row, seed: int, threads: int, most: int) -> None:
    command = [
        str(binary), "-m", str(target), "-md", str(draft), "-p", PROMPTS[row.prompt], "-n", str(row.tokens),
        "--temp", str(row.temperature), "--seed", str(seed), "-t", str(threads), "-c", "1024", "--ignore-eos",
        "--spec-type", "draft-simple", "--spec-draft-n-max", str(most), "-td", str(threads),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    found, counts = SPEED.search(done.stdout + done.stderr), ACCEPTED.search(done.stdout + done.stderr)
    if found is None or counts is None:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-1500:]}")
    row.rates.setdefault(f"{PEER} {most}", []).append(float(found[1]))
    row.guessed[f"{PEER} {most}"] = (int(counts[1]), int(counts[2]), 0)


def measure(arguments: argparse.Namespace) -> list[Row]:
    threads = arguments.threads
    name = Path(arguments.model).stem
    rows = [Row(name, p, t, arguments.tokens, threads) for t in arguments.temperatures for p in arguments.prompts]
    with localllm.load(arguments.model, ctx_size=1024, threads=threads) as model:
        draft = localllm.load(arguments.draft, ctx_size=1024, threads=threads)
        for number in range(arguments.rounds):
            for row in rows:
                said = []
                for mode in MODES if number % 2 else MODES[::-1]:  # the first mode may profit from an idle machine
                    said.append(answer(model, draft, row, mode, seed=number + 1))
                row.same_text &= all(tokens == said[0] for tokens in said)
                for most in arguments.peer_max if arguments.peer else ():
                    peer_answer(
                        arguments.peer, Path(arguments.model), Path(arguments.draft), row, number + 1, threads, most
                    )
                print(f"{name} {row.prompt} {row.temperature}: {row.rates}", file=sys.stderr)
        model.draft_with(None)
        draft.close()
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | prompt | temperature | threads | plain t/s | draft | n-grams | auto | draft accepts "
        "| llama.cpp draft t/s | auto / llama.cpp |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        drafted, accepted, _ = row.guessed["draft"]
        peers = [mode for mode in row.rates if mode.startswith(PEER)]
        peer = max(peers, key=lambda mode: median(row.rates[mode]), default="")
        beside = (f"{median(row.rates[peer]):.1f}", f"{row.ratio('auto', peer):.2f}") if peer else ("", "")
        ratios = " | ".join(f"x{row.ratio(mode):.2f}" for mode in MODES[1:])
        lines.append(
            f"| {row.model} | {row.prompt} | {row.temperature:g} | {row.threads} | {median(row.rates['plain']):.1f} "
            f"| {ratios} | {accepted} of {drafted} | {beside[0]} | {beside[1]} |"
        )
    return "\n".join(lines)


def stored(path: Path) -> list[Row]:
    """Return a row for every model, prompt, temperature and number of threads, with the rounds of all its lines."""
    rows: dict[tuple[str, str, float, int], Row] = {}
    for line in path.read_text().splitlines():
        found = {key: value for key, value in json.loads(line).items() if key in Row.__dataclass_fields__}
        row = Row(**found)
        before = rows.setdefault((row.model, row.prompt, row.temperature, row.threads), row)
        if before is not row:
            before.guessed, before.estimated = row.guessed, row.estimated
            before.same_text &= row.same_text
            for mode, rates in row.rates.items():
                before.rates[mode] += rates
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--draft")
    parser.add_argument("--peer", type=Path, help="llama-speculative-simple")
    parser.add_argument(
        "--peer-max", type=int, nargs="+", default=[3], help="maximum number of tokens that the peer drafts"
    )
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), choices=PROMPTS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("-n", "--tokens", type=int, default=96)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "speculation.jsonl")
    parser.add_argument("--table", action="store_true", help="print the stored results and measure nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(stored(arguments.out)))
        return
    rows = measure(arguments)
    with arguments.out.open("a") as file:
        for row in rows:
            extra = {"when": datetime.now(UTC).isoformat(timespec="seconds")}
            ratios = {mode: row.ratio(mode) for mode in MODES[1:]}
            file.write(json.dumps({**asdict(row), "ratios": ratios, **extra, "machine": machine()}) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
