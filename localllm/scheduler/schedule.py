"""Which rows of which requests a step takes.

It takes the newest token of every answer that is being written, its drafted tokens if verifying them pays, and then
parts of prompts as the budget allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.cache import CacheFull, Sequence
from localllm.engine import Engine, Rows, Wanted
from localllm.scheduler.answering import Answering
from localllm.scheduler.budget import Budget
from localllm.scheduler.interfaces import SchedulerLimits
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


class Schedule:
    """Chooses the rows of steps."""

    def __init__(self, engine: Engine, limits: SchedulerLimits, running: Running) -> None:
        self._engine, self._limits, self._running = engine, limits, running
        self._budget = Budget(engine.limits.rows, limits.step_seconds)
        self._most_largest = engine.most_largest

    def parts(self) -> list[Part]:
        """Return the rows of the next step; none if no running request needs a step."""
        active = self._running.active
        if len(active) == 1 and self._running.drafts is None:  # an answer alone: microseconds count
            [one] = active
            sequence = one.sequence
            if sequence is not None and not one.reading and self._engine.room(sequence) and not one.ticket.paused:
                return [Part(one, 1, "all")]
        return self._fitting(self._parts())

    # -- rows ------------------------------------------------------------------------------------------------------

    def _parts(self) -> list[Part]:
        """Choose the rows of the next step."""
        active = [one for one in self._running.active if not one.ticket.paused]
        writing = [one for one in active if not one.reading]
        reading = [one for one in active if one.reading]
        limits = self._engine.limits
        most = min(limits.rows, limits.logit_rows)
        if len(writing) + bool(reading) > most:  # take turns, and leave a row for a prompt
            writing = sorted(writing, key=lambda one: one.answered)[: max(most - bool(reading), 1)]
        if self._running.drafts is not None:
            self._running.drafts.propose(writing, limits)
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

    # -- the step --------------------------------------------------------------------------------------------------

    def rows(self, part: Part) -> Rows:
        """Return what the engine evaluates of a part."""
        one, start = part.answering, part.sequence.length
        tokens = one.tokens[start : start + part.count]
        if one.verified and not part.prompt:
            tokens += [guess.token for guess in one.guesses[: one.verified]]
        if part.wanted == "none" or one.verified or one.request.prompt_logprobs or not self._most_largest:
            return Rows(part.sequence, tokens, part.wanted)
        largest = one.looks_at
        return Rows(part.sequence, tokens, part.wanted, largest if largest <= self._most_largest else 0)

    def observe(self, parts: list[Part], seconds: float) -> None:
        """Record what a step cost, for the budget and the drafts."""
        prompt = sum(part.count for part in parts if part.prompt)
        self._budget.observe(sum(not part.prompt for part in parts), prompt, seconds)
        if self._running.drafts is not None:
            self._running.drafts.observe(sum(part.count for part in parts), prompt, seconds)
