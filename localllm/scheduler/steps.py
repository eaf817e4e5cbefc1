"""A step: which rows of which requests it takes, and what they make of its results.

A step takes the newest token of every answer that is being written, its drafted tokens if verifying them pays, and then
parts of prompts as the budget allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from localllm.backends.base import BackendError
from localllm.cache import CacheFull, Sequence
from localllm.engine import Engine, Result, Rows, Wanted
from localllm.errors import LocalLLMError
from localllm.notice import said
from localllm.scheduler.answering import Answering
from localllm.scheduler.budget import Budget
from localllm.scheduler.drafts import Drafts
from localllm.scheduler.interfaces import Observer, SchedulerLimits
from localllm.scheduler.running import Running


@dataclass(slots=True)
class Part:
    """The rows of one request in a step."""

    answering: Answering
    count: int
    wanted: Wanted = "last"
    prompt: bool = False  # whether more than the newest token and drafts are pending

    @property
    def sequence(self) -> Sequence:
        sequence = self.answering.sequence
        assert sequence is not None
        return sequence


class Steps:
    """Runs the steps of a scheduler."""

    def __init__(
        self,
        engine: Engine,
        limits: SchedulerLimits,
        running: Running,
        drafts: Drafts | None,
        observer: Observer | None,
    ) -> None:
        self._engine, self._limits, self._running = engine, limits, running
        self._drafts, self._observer = drafts, observer
        self._budget = Budget(engine.limits.rows, limits.step_seconds)

    def step(self) -> None:
        """Take one step, if a running request has rows for it."""
        parts = self._fitting(self._parts())
        if parts:
            self._run(parts)

    # -- rows ------------------------------------------------------------------------------------------------------

    def _parts(self) -> list[Part]:
        """Choose the rows of the next step."""
        writing = [one for one in self._running.active if not one.reading]
        reading = [one for one in self._running.active if one.reading]
        limits = self._engine.limits
        most = min(limits.rows, limits.logit_rows)
        if len(writing) + bool(reading) > most:  # take turns, and leave a row for a prompt
            writing = sorted(writing, key=lambda one: one.answered)[: max(most - bool(reading), 1)]
        if self._drafts is not None:
            self._drafts.propose(writing, limits)
        parts = [Part(one, 1 + one.verified, "all") for one in writing]
        rows = sum(part.count for part in parts)
        if rows > most:  # too many drafted tokens: verify none
            for part in parts:
                part.answering.verified, part.count = 0, 1
            rows = len(parts)
        budget = min(self._budget.prompt_rows(rows, len(reading)), limits.rows - rows)
        return parts + self._prompt_parts(reading, budget, limits.logit_rows - rows, rows)

    def _whole(self, one: Answering) -> bool:
        """Whether all that is pending comes in one step, because an encoder reads it."""
        return self._engine.start is not None and one.sequence is not None and not one.sequence.length

    def _prompt_parts(self, reading: list[Answering], budget: int, logits_left: int, rows: int) -> list[Part]:
        """Divide the budget: half for the prompt that waits longest, the rest for the shortest first.

        The step has `rows` rows of answers.
        """
        parts: list[Part] = []
        oldest = sorted(reading, key=lambda one: (-one.request.priority, one.number))
        order = [*oldest[:1], *sorted(oldest[1:], key=lambda one: one.pending)]
        room = self._engine.limits.rows - rows
        for place, one in enumerate(order):
            if logits_left <= 0 or budget <= 0:
                break
            share = max(budget // 2, 1) if place == 0 and len(order) > 1 else budget
            count = self._chunk(one, min(share, logits_left) if one.request.prompt_logprobs else share)
            if self._whole(one):  # whatever the budget says
                count = one.pending if one.pending <= room else 0
            if not count:
                continue
            room -= count
            whole = count == one.pending
            wanted: Wanted = "all" if one.request.prompt_logprobs else "last" if whole else "none"
            parts.append(Part(one, count, wanted, prompt=True))
            budget -= count
            logits_left -= count if wanted == "all" else int(whole)
        return parts

    def _chunk(self, one: Answering, most: int) -> int:
        """Return how many pending tokens to evaluate, at most `most`: up to the next checkpoint."""
        assert one.sequence is not None
        start, count = one.sequence.length, min(most, one.pending)
        while one.checkpoints and one.checkpoints[0] <= start:
            one.checkpoints.pop(0)
        if one.checkpoints:
            count = min(count, one.checkpoints[0] - start)
        aligned = self._limits.aligned
        if aligned > 1:  # a whole chunk or nothing, so that its bits do not depend on the load
            whole = min(aligned - start % aligned, one.pending)
            most = self._engine.limits.rows - self._limits.parallel * 16
            count = min(whole, max(most, 1))
        return count

    def _fitting(self, parts: list[Part]) -> list[Part]:
        """Free blocks until the parts fit: kept sequences first, then those of other requests."""
        while parts and not self._engine.fits([(part.sequence, part.count) for part in parts]):
            if self._running.free_some():
                parts = [part for part in parts if part.answering.sequence is not None]
                continue
            [part] = parts
            room = self._engine.room(part.sequence)
            if room >= part.count:
                break
            if room and not self._whole(part.answering):
                part.count = min(room, part.count)
                part.wanted = "last" if part.count == part.answering.pending else part.wanted
                part.answering.verified = min(part.answering.verified, part.count - 1)
                if part.prompt and part.count < part.answering.pending:
                    part.wanted = "none"
                continue
            self._no_room(part.answering)
            return []
        return parts

    def _no_room(self, one: Answering) -> None:
        """End a request that fills the whole cache alone."""
        if one.answered:
            one.finish("context")
        else:
            blocks = self._engine.pool.blocks
            one.fail(CacheFull(one.pending, 0, blocks, self._engine.block_tokens))
        self._running.leave(one)

    # -- results ---------------------------------------------------------------------------------------------------

    def _run(self, parts: list[Part]) -> None:
        began = perf_counter()
        rows = [self._rows(part) for part in parts]
        try:
            results = self._engine.step(rows)
        except (BackendError, LocalLLMError) as error:
            for part in parts:
                part.answering.fail(error if isinstance(error, LocalLLMError) else LocalLLMError(said(error)))
                self._running.leave(part.answering)
            return
        self._observe(parts, perf_counter() - began)
        for part, result in zip(parts, results, strict=True):
            self._take(part, result)

    def _rows(self, part: Part) -> Rows:
        one = part.answering
        start = part.sequence.length
        pending = one.tokens[start : start + part.count]
        drafted = [guess.token for guess in one.guesses[: one.verified]] if not part.prompt else []
        picks = one.looks_at if not one.verified and not one.request.prompt_logprobs and part.wanted != "none" else 0
        return Rows(part.sequence, [*pending, *drafted], part.wanted, picks)

    def _observe(self, parts: list[Part], seconds: float) -> None:
        """Record what a step cost, for the budget, the drafts and whoever looks."""
        prompt = sum(part.count for part in parts if part.prompt)
        self._budget.observe(sum(not part.prompt for part in parts), prompt, seconds)
        if self._observer is not None:
            self._observer.step(len(parts), sum(part.answering.verified > 0 for part in parts))
        if self._drafts is not None:
            self._drafts.observe(sum(part.count for part in parts), prompt, seconds)

    def _take(self, part: Part, result: Result) -> None:
        """Let a request choose from its logits, and move on."""
        one, sequence = part.answering, part.sequence
        try:
            one.evaluated(result.logits if part.wanted == "all" else None)
            if sequence.length >= len(one.tokens) and one.left <= 0:
                one.finish("length")  # only the prompt was wanted, in the cache
            elif sequence.length >= len(one.tokens):
                if result.largest.ids.size:
                    one.take_largest(result.largest)
                else:
                    one.take(result.logits[-1 - one.verified :])
                if self._drafts is not None:
                    self._drafts.judge(one)
                if one.verified:
                    self._engine.truncate(sequence, max(min(sequence.length, len(one.tokens) - 1), 0))
            elif one.checkpoints and sequence.length == one.checkpoints[0]:
                self._running.prefixes.keep(self._engine.fork(sequence))
        except LocalLLMError as error:
            one.fail(error)
        one.guesses, one.verified = [], 0
        if not one.done and len(one.tokens) > self._engine.limits.positions:
            one.finish("context")
        if one.done:
            self._running.leave(one)
