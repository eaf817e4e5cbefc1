"""Helpers for tests of the engine: random steps of many sequences, compared with a separate evaluation of
each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from localllm.backends.base import Backend, CacheTypes, Limits, TopK
from localllm.engine import SLACK, BlockPool, CacheFull, CacheSequence, Engine, SequenceRows
from localllm.plan import BLOCK, Plan
from tests.backends import support
from tests.models.kit import KIT
from tests.models.support import plan_of
from tests.models.tiny_families import FAMILIES

WINDOW = 24
LIMITS = Limits(rows=128, logit_rows=64, blocks=22, positions=5 * BLOCK, window_blocks=20)
ALONE = replace(LIMITS, logit_rows=128)
FEW = 16  # a GPU sums in a fixed order for up to this many tokens of a sequence


def windowed(family: str) -> Plan:
    metadata, tensors = FAMILIES[family]()
    return plan_of(metadata | {f"{family}.attention.sliding_window": WINDOW}, tensors)


ATTENDING: dict[str, Callable[[], Plan]] = {
    "llama": lambda: support.plan("Q4_0"),
    "experts and windows": lambda: windowed("gpt-oss"),
    "windows and caps": lambda: windowed("gemma2"),
}
RECURRENT: dict[str, Callable[[], Plan]] = {
    "convolutions": lambda: plan_of(*KIT["lfm2-dense"].loaded()),
    "delta net": lambda: plan_of(*KIT["qwen35-mtp"].loaded()),
    "decays by channel": lambda: plan_of(*KIT["kimi-linear-moe"].loaded()),
    "lightning attention": lambda: plan_of(*KIT["minimax-01-moe"].loaded()),
    "blends of earlier sums": lambda: plan_of(*KIT["kimi-k3-moe"].loaded()),
    "pools of positions": lambda: plan_of(*KIT["glm5-next-8of40"].loaded()),
    "n-grams": lambda: plan_of(*KIT["qwen4exp-8of40"].loaded()),
    "selective scan": lambda: plan_of(*KIT["jamba-dense"].loaded()),
    "RWKV-6": lambda: plan_of(*KIT["rwkv6"].loaded()),
    "RWKV-7": lambda: plan_of(*KIT["rwkv7"].loaded()),
    "Mamba-2": lambda: plan_of(*KIT["granitehybrid-dense"].loaded()),
}
PLANS = {**ATTENDING, **RECURRENT}


def engine_of(backend: Backend, plan: Plan, limits: Limits, cache: str = "f16") -> Engine:
    if not plan.window:
        limits = replace(limits, window_blocks=0)
    windows = BlockPool(limits.window_blocks, BLOCK, plan.window) if plan.window else None
    bound = backend.bind(plan, limits, CacheTypes(cache, cache))
    return Engine(bound, BlockPool(limits.blocks, BLOCK, windowed=windows), limits)


@dataclass(eq=False)
class Live:
    """A sequence, the part of its prompt that is not evaluated yet, and its results so far."""

    sequence: CacheSequence
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    compared: bool = True
    logits: dict[int, np.ndarray] = field(default_factory=dict)  # logits by position
    largest: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def note(self, part: SequenceRows, logits: np.ndarray, largest: TopK) -> None:
        count = {"none": 0, "last": 1, "all": len(part.tokens)}[part.wanted]
        assert len(largest.ids if part.top_k else logits) == count
        for row, at in enumerate(range(len(self.tokens) - count, len(self.tokens))):
            if part.top_k:
                self.largest[at] = largest.ids[row].copy(), largest.logits[row].copy()
            else:
                self.logits[at] = logits[row].copy()

    def forget(self, length: int) -> None:
        del self.tokens[length:]
        self.prompt = []
        for found in (self.logits, self.largest):
            for at in [at for at in found if at >= length]:
                del found[at]  # type: ignore[attr-defined]


class Schedule:
    """Random steps of up to `most` sequences. For comparison, the engine `alone` repeats each sequence
    without the others.

    `long` is the maximum chunk size of prompts whose results are compared, and `longest` the maximum for other prompts.
    """

    def __init__(self, engine: Engine, alone: Engine, vocabulary: int, seed: int, long: int, longest: int) -> None:
        self.engine, self.alone, self.vocabulary = engine, alone, vocabulary
        self.long, self.longest = long, longest
        self.random = np.random.RandomState(seed)
        self.live: list[Live] = []
        self.counts = dict.fromkeys(("rows", "mixed", "forks", "refused", "compared", "truncated", "together"), 0)

    def run(self, steps: int, most: int) -> None:
        for _ in range(steps):
            while len(self.live) < most:
                self.begin()
            self.edit(most)
            self.step()
        for one in self.live.copy():
            self.end(one)
        assert [pool.free_blocks for pool in self.engine.pool.pools] == [p.blocks for p in self.engine.pool.pools]

    def tokens(self, count: int) -> list[int]:
        return self.random.randint(0, self.vocabulary, count).tolist()  # type: ignore[no-any-return]

    def begin(self) -> None:
        compared = self.longest == self.long or bool(self.random.rand() < 0.75)
        prompt = self.tokens(self.random.choice([1, 3, 20, BLOCK, 150]))
        self.live.append(Live(self.engine.add(), [], prompt, compared))

    def edit(self, most: int) -> None:
        """Fork, truncate or release a sequence."""
        one, dice = self.live[self.random.randint(len(self.live))], self.random.rand()
        if dice < 0.25 and one.tokens:
            others = [other for other in self.live if other is not one]
            if len(self.live) == most:
                if not others:
                    return
                self.end(others[self.random.randint(len(others))])
            fork = Live(self.engine.fork(one.sequence), one.tokens.copy(), [], one.compared)
            self.live.append(fork)
            self.counts["forks"] += 1
        elif dice < 0.45 and one.tokens:
            self.check(one)
            length = max(0, len(one.tokens) - self.random.randint(1, min(SLACK, len(one.tokens)) + 1))
            assert self.engine.truncate(one.sequence, length) == length
            one.forget(length)
            self.counts["truncated"] += 1
        elif dice < 0.5:
            self.end(one)

    def step(self) -> None:
        parts: list[tuple[Live, SequenceRows]] = []
        rows = wanted = 0
        for number in self.random.permutation(len(self.live)).tolist():
            one = self.live[number]
            if self.random.rand() < 0.2:
                continue
            part = self.part(one)
            logits = {"none": 0, "last": 1, "all": len(part.tokens)}[part.wanted]
            if rows + len(part.tokens) > LIMITS.rows or wanted + logits > LIMITS.logit_rows:
                continue
            if len(one.tokens) + len(part.tokens) > LIMITS.positions:
                self.end(one)
                return
            rows, wanted = rows + len(part.tokens), wanted + logits
            parts.append((one, part))
        if not parts:
            return
        given = [part for _, part in parts]
        if not self.engine.fits([(part.sequence, len(part.tokens)) for part in given]):
            before = state(self.engine, self.live)
            with pytest.raises(CacheFull):
                self.engine.step(given)
            assert state(self.engine, self.live) == before
            self.counts["refused"] += 1
            longest = max(self.live, key=lambda one: len(one.tokens))
            self.end(longest)
            return
        results = self.engine.step(given)
        for (one, part), result in zip(parts, results, strict=True):
            one.tokens += part.tokens
            one.note(part, result.logits, result.top_k)
        lengths = [len(part.tokens) for part in given]
        self.counts["rows"] += rows
        self.counts["mixed"] += 1 in lengths and max(lengths) > 1
        self.counts["together"] = max(self.counts["together"], len(parts))

    def part(self, one: Live) -> SequenceRows:
        """Return the sequence's next tokens: a chunk of the prompt, a decoded token, or a few tokens to verify."""
        if one.prompt:
            count = min(len(one.prompt), self.random.randint(1, (self.long if one.compared else self.longest) + 1))
            tokens, one.prompt = one.prompt[:count], one.prompt[count:]
        else:
            tokens = self.tokens(self.random.choice([1, 1, 1, 1, 2, 5]))
        wanted = self.random.choice(["none", "last", "last", "all"])
        return SequenceRows(one.sequence, tokens, wanted, int(self.random.choice([0, 0, 4])))

    def end(self, one: Live) -> None:
        self.live.remove(one)
        self.check(one)
        self.engine.release(one.sequence)

    def check(self, one: Live) -> None:
        """Compare a sequence's results with an evaluation without other sequences, in other chunks."""
        assert one.sequence.tokens == one.tokens
        if not one.compared or not (one.logits or one.largest):
            return
        truth = alone(self.alone, one.tokens, min(self.long, ALONE.rows))
        for at, logits in one.logits.items():
            np.testing.assert_array_equal(logits.view(np.uint32), truth[at].view(np.uint32))
        for at, (ids, logits) in one.largest.items():
            order = np.argsort(-truth[at], kind="stable")[: len(ids)]
            np.testing.assert_array_equal(ids, order)
            np.testing.assert_array_equal(logits, truth[at][order])
        self.counts["compared"] += len(one.logits) + len(one.largest)


def alone(engine: Engine, tokens: list[int], size: int) -> np.ndarray:
    """Return the logits (T, vocabulary) of one sequence in a separate engine, evaluated `size` tokens at a time."""
    sequence = engine.add()
    parts = [
        engine.step([SequenceRows(sequence, tokens[at : at + size], "all")])[0].logits.copy()
        for at in range(0, len(tokens), size)
    ]
    engine.release(sequence)
    return np.concatenate(parts)


def state(engine: Engine, live: list[Live]) -> object:
    """Return the state of the engine that a refused step must not change."""
    pools = engine.pool.pools
    return (
        [(one.sequence.tokens.copy(), [t.tolist() for t in one.sequence.tables()]) for one in live],
        [(pool._users.copy(), pool._free.copy(), pool._copies.copy()) for pool in pools],
    )
