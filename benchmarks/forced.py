"""Speculation at forced acceptance: its speedup over plain decoding, and the ceiling that the measured costs allow.

    python benchmarks/make_model.py llama-1b Q4_0 /tmp/llama-1b-q4_0.gguf
    python benchmarks/make_model.py llama-100m Q4_0 /tmp/draft.gguf
    python benchmarks/forced.py /tmp/llama-1b-q4_0.gguf --draft /tmp/draft.gguf --sources repeats draft
    python benchmarks/shapes.py qwen35-1b /tmp/qwen35-1b.gguf
    python benchmarks/forced.py /tmp/qwen35-1b.gguf --sources repeats head
    python benchmarks/forced.py demo
    python benchmarks/forced.py --table

The model's plain greedy answer is known. A source does all of its real work (the suffix automaton, or the forward
passes of a draft model or head), and then its token is replaced: by the right one with probability `a`, else by a
wrong one. So `a` is the conditional acceptance rate of each drafted token. Every answer starts with nothing learned, or
with `--learned` with the costs of passes that earlier answers have shown, as in every answer after a model's first.

In a round, one plain answer and one answer per source and rate advance in turns of a few tokens on one engine, so the
machine's load is the same for all of them. Forward passes of 1 to 16 rows and of the drafter are timed between turns.
The ceiling is max over k of (1 + a + ... + a^k) / (cost of k + 1 rows + k x cost of a draft), with costs relative to
one row: medians over all rounds. With one thread, all times are processor times of that thread, so that other programs
on the computer do not count; the policy itself sees elapsed times. Results are appended to
benchmarks/results/forced.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import sqrt
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter, thread_time
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import localllm
from localllm.engine import DraftRows, SequenceRows
from localllm.generation.core import Core
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Request, Token
from localllm.generation.request_state import RequestState
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.speculation.model_drafter import ModelDrafter
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.speculation.setup import Speculation
from localllm.generation.speculation.suffixes import PRIORS, SuffixDrafter
from localllm.generation.stream import Stepper, Stream
from localllm.model import Model
from localllm.options import SamplingOptions, SpeculationOptions
from localllm.plan import BLOCK
from localllm.sampling.sampler import Sampler

from compare import RESULTS, machine  # isort: skip

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
KINDS = {"repeats": None, "draft": "draft", "head": "mtp"}  # source -> value of --spec; None: the default
PROMPT = 32
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 10: 2.262}  # 95 %, by rounds
SURE = min(range(len(PRIORS)), key=lambda trust: abs(PRIORS[trust] - 0.5))  # a class of drafts that may be wrong
SURE_MODEL = 4  # a draft that a model gives a probability of 0.5 to 0.65


@dataclass(slots=True)
class Row:
    """One source at one acceptance rate."""

    model: str
    source: str
    acceptance: float
    threads: int
    tokens: int
    speedups: list[float] = field(default_factory=list)  # of each round
    ceiling: float = 0.0
    best: int = 0  # the k of the ceiling
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    costs: dict[int, float] = field(default_factory=dict)  # rows -> cost relative to one row
    step: float = 0.0  # cost of a draft, relative to one row
    learned: bool = False  # whether the costs of passes were known from earlier answers

    @property
    def lowest(self) -> float:
        """The lower end of the 95 % confidence interval of the mean speedup."""
        count = len(self.speedups)
        return mean(self.speedups) - STUDENT.get(count, 2.0) * stdev(self.speedups) / sqrt(count) if count > 1 else 0.0

    @property
    def reached(self) -> float:
        return mean(self.speedups) / self.ceiling


class Oracle:
    """Knows the plain answer, and which of its positions a source gets right."""

    def __init__(self, text: Sequence[int], acceptance: float, seed: int, vocabulary: int) -> None:
        self._text, self._vocabulary = text, vocabulary
        self._right = np.random.default_rng(seed).random(len(text)) < acceptance

    def token(self, position: int) -> int:
        if position >= len(self._text):
            return 0
        return self._text[position] if self._right[position] else (self._text[position] + 1) % self._vocabulary


class ForcedSuffixes(SuffixDrafter):
    """Does the work of the suffix automaton, then drafts the oracle's tokens."""

    oracle: Oracle

    def propose(self, sampler: Sampler, most: int = 0) -> Iterator[DraftToken]:
        real, position = super().propose(sampler, most), len(self.text)
        while True:
            next(real, None)
            yield DraftToken(self.oracle.token(position), SURE)
            position += 1


def forced(speculation: Speculation, oracle: Oracle) -> Drafts:
    """Return the drafter that the program uses, with the oracle's tokens."""
    drafts = speculation.drafts()
    assert drafts is not None

    def repeats(text: Sequence[int], earlier: Any) -> SuffixDrafter:
        found = ForcedSuffixes(text, earlier)
        found.oracle = oracle
        return found

    drafts.new_repeats = repeats
    model: ModelDrafter[Any] | None = drafts._model
    if model is not None:
        real = model.guess

        def guess(one: RequestState, logits: Any) -> DraftToken | None:
            real(one, logits)
            return DraftToken(oracle.token(len(one.tokens) + len(one.drafts)), SURE_MODEL)

        model.guess = guess  # type: ignore[method-assign]
    return drafts


Clock = Callable[[], float]


class Answer:
    """An answer that is read in turns, and the seconds that its tokens took after the first."""

    def __init__(self, model: Model, drafts: Drafts | None, prompt: list[int], tokens: int, clock: Clock) -> None:
        self._clock = clock
        engine, limits = model.engine, SchedulerLimits()
        self._stepper = Stepper(Core(engine, model.maybe_tokenizer, model.sampler, limits, drafts))
        request = Request(prompt, SamplingOptions(temperature=0), tokens, ignore_eos=True, reuse=False)
        self._stream: Stream = self._stepper.stream(request)
        self.tokens: list[int] = []
        self.seconds = 0.0
        self.read(1)
        self.seconds = 0.0
        self.usage: Any = None

    def read(self, count: int) -> None:
        began = self._clock()
        for event in self._stream:
            if isinstance(event, Token):
                self.tokens.append(event.token)
                count -= 1
                if not count:
                    break
        self.seconds += self._clock() - began

    def finish(self) -> None:
        for event in self._stream:
            self.usage = getattr(event, "usage", self.usage)
        self._stepper.core.running.end(None)


class Costs:
    """Times forward passes of the target, and of the drafter, after a text of typical length."""

    def __init__(
        self, model: Model, draft: Model | None, head: bool, prompt: list[int], length: int, clock: Clock
    ) -> None:
        self._clock = clock
        self._model, self._draft, self._head = model, draft, head
        text = (prompt * (length // len(prompt) + 1))[:length]
        self._length, self._tokens = length, np.linspace(0, model.vocabulary - 1, max(ROWS)).astype(int).tolist()
        self._sequence = model.engine.add()
        model.engine.step([SequenceRows(self._sequence, text)])
        self._drafting = draft.engine.add() if draft is not None else None
        if draft is not None and self._drafting is not None:
            draft.engine.step([SequenceRows(self._drafting, text)])
        self.rows: dict[int, list[float]] = {rows: [] for rows in ROWS}
        self.steps: list[float] = []

    def sweep(self) -> None:
        engine = self._model.engine
        for rows in ROWS:
            began = self._clock()
            engine.step([SequenceRows(self._sequence, self._tokens[:rows], "all")])
            self.rows[rows].append(self._clock() - began)
            assert engine.truncate(self._sequence, self._length) == self._length
        if self._draft is not None and self._drafting is not None:
            began = self._clock()
            [found] = self._draft.engine.step([SequenceRows(self._drafting, self._tokens[:1])])
            found.logits[-1].argmax()
            self.steps.append(self._clock() - began)
            self._draft.engine.truncate(self._drafting, self._length)
        if self._head and engine.draft_head is not None:
            hidden = np.ones((1, engine.draft_head.hidden.width), np.float32)
            with engine.drafting([(self._sequence, 1)]):
                began = self._clock()
                logits, _ = engine.draft([DraftRows(self._sequence, self._length - 1, self._tokens[:1], hidden, 1)])
                logits[0].argmax()
                self.steps.append(self._clock() - began)

    def relative(self) -> tuple[dict[int, float], float]:
        """Return the cost of each number of rows and of a draft, relative to one row of the same sweep."""
        one = self.rows[1]
        found = {rows: median(a / b for a, b in zip(seen, one, strict=True)) for rows, seen in self.rows.items()}
        return found, median(a / b for a, b in zip(self.steps, one, strict=True)) if self.steps else 0.0


def typical(length: int) -> int:
    """Return a length near `length`, in the middle of a cache block.

    In recurrent layers, the first token of a block also computes the state of the block before it. At such a length,
    every pass of a sweep would do so, though only one pass of 64 does in an answer.
    """
    return length // BLOCK * BLOCK + BLOCK // 2


def ceiling(acceptance: float, costs: dict[int, float], step: float) -> tuple[float, int]:
    """Return the speedup of the best fixed number of drafts, and that number."""
    cost = np.interp(range(max(costs) + 1), list(costs), list(costs.values()))
    return max((sum(acceptance**i for i in range(k + 1)) / (cost[k + 1] + k * step), k) for k in range(max(costs)))


def measure(arguments: argparse.Namespace) -> list[Row]:
    name, threads, tokens = Path(arguments.model).stem, arguments.threads, arguments.tokens
    rows = [
        Row(name, s, a, threads, tokens, learned=arguments.learned)
        for s in arguments.sources for a in arguments.acceptance
    ]  # fmt: skip
    clock = thread_time if threads == 1 else perf_counter
    spec = "mtp" if "head" in arguments.sources else "off"
    given = {"ctx_size": PROMPT + tokens + 64, "sequences": len(rows) + 4, "threads": threads, "any_cache": True}
    with localllm.load(arguments.model, spec=spec, **given) as model:
        draft = None
        if "draft" in arguments.sources:
            draft = localllm.load(arguments.draft, **given)
        prompt = np.random.default_rng(3).integers(3, model.vocabulary, PROMPT).tolist()
        plain = Answer(model, None, prompt, tokens + 16, clock)
        plain.read(tokens + 15)
        plain.finish()
        truth = prompt + plain.tokens
        costs = {
            source: Costs(
                model,
                draft if source == "draft" else None,
                source == "head",
                prompt,
                typical(PROMPT + tokens // 2),
                clock,
            )
            for source in arguments.sources
        }
        began = perf_counter()
        speculations: dict[int, Speculation] = {}
        for number in range(arguments.rounds + arguments.learned):
            if number > 1 and perf_counter() - began > 60 * arguments.minutes:
                break
            if not arguments.learned:
                speculations.clear()
            round_(model, draft, rows, costs, truth, prompt, number, arguments, speculations)
            if arguments.learned and not number:  # this round was for learning
                for row in rows:
                    row.speedups, row.drafted, row.accepted, row.passes = [], 0, 0, 0
        if draft is not None:
            draft.close()
    for row in rows:
        row.costs, row.step = costs[row.source].relative()
        row.ceiling, row.best = ceiling(row.acceptance, row.costs, row.step)
    return rows


def round_(
    model: Model, draft: Model | None, rows: list[Row], costs: dict[str, Costs], truth: list[int], prompt: list[int],
    number: int, arguments: argparse.Namespace, speculations: dict[int, Speculation],
) -> None:  # fmt: skip
    """Answer once in plain decoding and once per row, in turns. `speculations` keeps what rows have learned."""
    clock = thread_time if arguments.threads == 1 else perf_counter
    plain, drafting = Answer(model, None, prompt, arguments.tokens, clock), []
    for place, row in enumerate(rows):
        name = str(draft.file.path) if draft is not None and row.source == "draft" else ""
        if place not in speculations:
            speculations[place] = Speculation(
                model.speculation_target(), SpeculationOptions(name, KINDS[row.source]),
                draft.speculation_target() if draft is not None and name else None,
            )  # fmt: skip
        seed = 1000 * number + int(100 * row.acceptance)
        oracle = Oracle(truth, row.acceptance, seed, model.vocabulary)
        drafting.append(Answer(model, forced(speculations[place], oracle), prompt, arguments.tokens, clock))
    gc.collect()
    turns = [plain, *drafting]
    left, turn = arguments.tokens - 1, 0
    while left:
        count = min(arguments.turn, left)
        start = (turn + number) % len(turns)
        for answer in [*turns[start:], *turns[:start]]:
            answer.read(count)
        left, turn = left - count, turn + 1
        if turn % arguments.sweep == 0:
            for each in costs.values():
                each.sweep()
    for answer in turns:
        answer.finish()
    for row, answer in zip(rows, drafting, strict=True):
        assert answer.tokens == plain.tokens, f"{row.source} at {row.acceptance}: the answer differs from the plain one"
        row.speedups.append(plain.seconds / answer.seconds)
        row.drafted, row.accepted = row.drafted + answer.usage.drafted, row.accepted + answer.usage.accepted
        row.passes += answer.usage.decode_passes
    seconds = ", ".join(f"{row.source} {row.acceptance}: x{row.speedups[-1]:.3f}" for row in rows)
    print(f"round {number}: plain {1e3 * plain.seconds / arguments.tokens:.2f} ms/token, {seconds}", file=sys.stderr)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | tokens | costs | source | acceptance | speedup | 95 % at least | ceiling (k) | reached | accepted |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.model} | {row.tokens} | {'known' if row.learned else 'new'} | {row.source} | {row.acceptance:g} "
            f"| x{mean(row.speedups):.2f} "
            f"| {row.lowest:.3f} | x{row.ceiling:.2f} ({row.best}) | {row.reached:.2f} "
            f"| {row.accepted} of {row.drafted} |"
        )
    return "\n".join(lines)


def stored(path: Path) -> list[Row]:
    """Return the newest row of every combination of model, source, acceptance rate and conditions."""
    found: dict[tuple[Any, ...], Row] = {}
    for line in path.read_text().splitlines():
        row = Row(**{key: value for key, value in json.loads(line).items() if key in Row.__dataclass_fields__})
        found[row.model, row.source, row.threads, row.tokens, row.learned, row.acceptance] = row
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--draft")
    parser.add_argument("--sources", nargs="+", default=["repeats"], choices=KINDS)
    parser.add_argument("-a", "--acceptance", type=float, nargs="+", default=[0.0, 0.3, 0.6, 0.8, 0.95])
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60, help="begin no round after this time")
    parser.add_argument("--learned", action="store_true", help="costs are known from earlier answers")
    parser.add_argument("--turn", type=int, default=8, help="tokens of an answer before the next one's turn")
    parser.add_argument("--sweep", type=int, default=5, help="turns between two measurements of the costs")
    parser.add_argument("--out", type=Path, default=RESULTS / "forced.jsonl")
    parser.add_argument("--table", action="store_true", help="print the stored results and measure nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(stored(arguments.out)))
        return
    rows = measure(arguments)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    with arguments.out.open("a") as file:
        for row in rows:
            figures = {"lowest": round(row.lowest, 4), "reached": round(row.reached, 4)}
            file.write(json.dumps({**asdict(row), **figures, "when": when, "machine": machine()}) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
