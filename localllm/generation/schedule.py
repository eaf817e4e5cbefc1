"""Chooses the tokens evaluated in each step; a row is one token in the batch.

A step contains the newest token of every decoding request, the drafts worth verifying, and the prefill chunks that the
budget allows.
"""

from __future__ import annotations

from localllm.engine import CacheFull, Engine, SequenceRows, Wanted
from localllm.generation.budget import Budget
from localllm.generation.flights import Flight
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.prompt_media import rows_of
from localllm.generation.request_state import RequestState
from localllm.generation.running import Running
from localllm.generation.step_part import StepPart


class Schedule:
    """Chooses the tokens of each step."""

    def __init__(self, engine: Engine, limits: SchedulerLimits, running: Running) -> None:
        self._engine, self._limits, self._running = engine, limits, running
        self._budget = Budget(engine.limits.rows, limits.itl_target)
        self._most_largest = engine.max_top_k
        self.spent = 0.0  # seconds of the encoder before the next step
        self._crowded = False  # whether the next step may leave out decoding requests for a picture

    def encoder_seconds(self) -> float:
        """Return the time that the encoder of pictures may run before the next step."""
        return self._budget.encoder_seconds(any(not one.prefilling for one in self._ready()))

    def _ready(self) -> list[RequestState]:
        """Return the running requests, without paused ones and without the one whose step runs in slices."""
        slices = self._running.flights.slices
        return [one for one in self._running.active if not (one.ticket.paused or slices(one))]

    def sliced(self) -> StepPart | None:
        """Return the next step to run in slices: of a picture whose tokens see each other, once it is encoded."""
        if not self._engine.slices:
            return None
        limits = self._engine.limits
        for one in self._order([one for one in self._ready() if one.prefilling and self._sliced(one)]):
            if parts := self._fitting(self._prompt_parts([one], limits.rows, limits.logit_rows, 0)):
                return parts[0]
        return None

    def _sliced(self, one: RequestState) -> bool:
        """Whether the next tokens of a request are evaluated in slices, and not by the steps."""
        return self._engine.slices and one.sequence is not None and one.span_at(one.sequence.length) > 0

    def parts(self) -> list[StepPart]:
        """Return the parts of the next step; empty if no running request has work."""
        if self._running.flights:
            if all(one.in_flight or one.ticket.paused for one in self._running.active):
                return []
        elif self._running.drafts is not None and self._running.drafts.pointless:
            self._running.use(None)
        active, drafts = self._running.active, self._running.drafts
        if self._running.flights.sliced is not None:
            active = self._ready()
        if self._running.suspicious and (suspects := self._running.suspects()):
            return self._alone(suspects[0])
        if len(active) == 1:  # fast path for a single request
            [one] = active
            sequence = one.sequence
            fits = sequence is not None and sequence.length < self._engine.limits.positions and sequence.fits(1)
            decodes = fits and not (one.prefilling or one.known_left or one.ticket.paused)
            if decodes and (drafts is None or drafts.skip_step()):
                return [StepPart(one, 1, "all")]
        return self._fitting(self._parts())

    # -- rows ------------------------------------------------------------------------------------------------------

    def _parts(self) -> list[StepPart]:
        """Choose the parts of the next step without checking for free blocks."""
        active = self._ready()
        decoding = [one for one in active if not one.prefilling]
        prefilling = [one for one in active if one.prefilling and not self._sliced(one)]
        requests = len(decoding) + len(prefilling)
        others = any(one.in_flight for one in decoding)
        if self._running.flights.depth > 1:
            decoding, prefilling = self._group(decoding, prefilling)
        limits = self._engine.limits
        most = min(limits.rows, limits.logit_rows)
        if len(decoding) + bool(prefilling) > most:  # fewest answer tokens first; reserve a row for a prompt
            decoding = sorted(decoding, key=lambda one: one.answer_tokens)[: max(most - bool(prefilling), 1)]
        if self._running.drafts is not None:
            self._running.drafts.propose([one for one in decoding if not one.known_left], limits)
        parts = [StepPart(one, 1 + one.verified, "all") for one in decoding]
        rows = sum(part.count for part in parts)
        if rows > most:  # too many rows with drafts: verify none
            for part in parts:
                part.state.verified, part.count = 0, 1
            rows = len(parts)
        if self._engine.media.spans and (picture := self._picture_alone(prefilling, limits.rows - rows)):
            return picture
        known = [part for part in parts if part.state.known_left]
        if not (prefilling or known):
            return parts
        media = bool(prefilling) and all(one.media_ahead for one in prefilling)
        allowed = self._budget.prompt_rows(rows - len(known) or int(others), requests, media, self.spent)
        budget = min(allowed, limits.rows - rows)
        added = self._add_known(known, min(budget, most - rows - bool(prefilling)), len(prefilling))
        rows, budget = rows + added, budget - added
        return parts + self._prompt_parts(prefilling, budget, limits.logit_rows - rows, rows)

    def _picture_alone(self, prefilling: list[RequestState], room: int) -> list[StepPart]:
        """Return a step of the next prompt alone, if its next tokens see each other and are more than `room`. Every
        second step decodes.
        """
        self._crowded = not self._crowded
        if self._crowded:
            for one in self._order(prefilling)[:1]:
                if self._together(one) > room:
                    for other in self._running.active:
                        other.drafts, other.verified = [], 0
                    return self._prompt_parts([one], self._engine.limits.rows, self._engine.limits.logit_rows, 0)
        return []

    def _add_known(self, parts: list[StepPart], budget: int, others: int) -> int:
        """Add known tokens of answers to their parts: equal shares of the budget, which `others` prompts share. Return
        the number of tokens added.
        """
        added = 0
        for place, part in enumerate(parts):
            one = part.state
            share = (budget - added) // (len(parts) - place + min(others, 1))
            one.draft_known(min(share, one.tokens_left - 1, self._engine.limits.positions - len(one.tokens) - 1))
            part.count, part.known = 1 + one.verified, True
            added += one.verified
        return added

    def _alone(self, one: RequestState) -> list[StepPart]:
        """Return a step of one request, with no other step in flight: if it fails again, this request is the reason."""
        if self._running.flights:
            return []
        one.drafts, one.verified = [], 0
        limits = self._engine.limits
        if one.prefilling:
            return self._fitting(self._prompt_parts([one], limits.rows, limits.logit_rows, 0))
        return self._fitting([StepPart(one, 1, "all")])

    def _group(
        self, decoding: list[RequestState], prefilling: list[RequestState]
    ) -> tuple[list[RequestState], list[RequestState]]:
        """Return the requests of the next step, so that all steps in flight have about equally many.

        Decoding requests come first, in the order of their last steps.
        """
        share = -(-(len(decoding) + len(prefilling)) // self._running.flights.depth)
        free = sorted((one for one in decoding if not one.in_flight), key=lambda one: one.flown)[:share]
        return free, self._order([one for one in prefilling if not one.in_flight])[: share - len(free)]

    def _order(self, prefilling: list[RequestState]) -> list[RequestState]:
        """Return prompts in the order of their turn: the oldest of the highest priority, then the shortest ones."""
        oldest = sorted(prefilling, key=lambda one: (-one.request.priority, one.number))
        return [*oldest[:1], *sorted(oldest[1:], key=lambda one: one.pending)]

    def _together(self, one: RequestState) -> int:
        """Return the number of pending tokens that one step must evaluate, because they see each other; 0: no such."""
        assert one.sequence is not None
        if self._engine.start is not None and not one.sequence.length:
            return one.pending  # an encoder processes them
        return one.span_at(one.sequence.length) if self._engine.media.spans else 0

    def _prompt_parts(self, prefilling: list[RequestState], budget: int, logits_left: int, rows: int) -> list[StepPart]:
        """Divide the budget: half to the oldest request of the highest priority, the rest to the shortest prompts
        first.

        `rows` is the number of decode tokens already in the step.
        """
        parts: list[StepPart] = []
        order = self._order(prefilling)
        room = self._engine.limits.rows - rows
        for place, one in enumerate(order):
            if logits_left <= 0 or budget <= 0:
                break
            share = max(budget // 2, 1) if place == 0 and len(order) > 1 else budget
            count = self._chunk(one, min(share, logits_left) if one.request.whole_prompt else share)
            if together := self._together(one):  # even beyond the budget
                count = together if count and together <= room else 0
            if not count:
                continue
            room -= count
            whole = count == one.pending
            wanted: Wanted = "all" if one.request.whole_prompt else "last" if whole else "none"
            parts.append(StepPart(one, count, wanted, prompt=True))
            budget -= count
            logits_left -= count if wanted == "all" else int(whole)
        return parts

    def _chunk(self, one: RequestState, most: int) -> int:
        """Return the size of the next prefill chunk: at most `most` tokens, up to the next checkpoint."""
        assert one.sequence is not None
        start, count = one.sequence.length, min(most, one.pending)
        while one.checkpoints and one.checkpoints[0] <= start:
            one.checkpoints.pop(0)
        if one.checkpoints:
            count = min(count, one.checkpoints[0] - start)
        aligned = self._limits.aligned
        if aligned > 1:  # a full aligned chunk even beyond `most`, so that the result does not depend on the load
            whole = min(aligned - start % aligned, one.pending)
            most = self._engine.limits.rows - self._limits.parallel * 16
            count = min(whole, max(most, 1))
        return self._before_media(one, start, count) if one.media else count

    def _before_media(self, one: RequestState, start: int, count: int) -> int:
        """Return how many of `count` tokens from `start` on may be evaluated. They end before a picture that is not
        encoded yet, and before a picture whose tokens see each other, which gets a separate step.

        Aligned chunks do not end at a picture only because its encoder is not done: the result would depend on that.
        """
        for each in one.media:
            if each.start < start + count and each.stop > start:
                if each.start > start and not each.span.causal and self._engine.media.spans:
                    return each.start - start
                if each.embeddings is None:
                    return max(each.start - start, 0) if self._limits.aligned == 1 else 0
        return count

    def _fitting(self, parts: list[StepPart]) -> list[StepPart]:
        """Free blocks until the parts fit: evict cached sequences, then preempt requests.

        Before requests are preempted, the steps in flight are collected. If a single request still does not fit,
        evaluate fewer of its tokens or end it.
        """
        while parts and not self._engine.fits([(part.sequence, part.count) for part in parts]):
            if self._running.free_some():
                parts = [part for part in parts if part.state.sequence is not None]
                continue
            if self._running.flights:  # their requests may end, or be preempted
                for part in parts:
                    part.state.drafts, part.state.verified = [], 0
                return []
            [part] = parts
            room = self._engine.room(part.sequence)
            if room >= part.count:
                break
            if room and not self._together(part.state):
                part.count = min(room, part.count)
                part.wanted = "last" if part.count == part.state.pending else part.wanted
                part.state.verified = min(part.state.verified, part.count - 1)
                if part.prompt and part.count < part.state.pending and not part.state.request.whole_prompt:
                    part.wanted = "none"
                continue
            self._no_room(part.state)
            return []
        return parts

    def _no_room(self, one: RequestState) -> None:
        """End a request that alone fills the whole KV cache."""
        if one.answer_tokens:
            one.finish("context")
        else:
            blocks = self._engine.pool.blocks
            one.fail(CacheFull(one.pending, 0, blocks, self._engine.block_tokens))
        self._running.leave(one)

    # -- the step --------------------------------------------------------------------------------------------------

    def rows(self, part: StepPart) -> SequenceRows:
        """Return the engine's input for a part."""
        one, sequence = part.state, part.sequence
        tokens = one.tokens[sequence.length :][: part.count]
        if one.verified and not part.prompt:
            tokens += [draft.token for draft in one.drafts[: one.verified]]
        media = rows_of(one.media, sequence.length, sequence.length + len(tokens)) if one.media else None
        if part.wanted == "none" or one.verified or one.request.whole_prompt or not self._most_largest:
            return SequenceRows(sequence, tokens, part.wanted, normed=one.request.states is not None, media=media)
        largest = one.required_top_k
        return SequenceRows(sequence, tokens, part.wanted, largest if largest <= self._most_largest else 0, media=media)

    def observe(self, flight: Flight, seconds: float, cost: float) -> None:
        """Record the duration of a step, for the prefill budget, and its cost, for speculation.

        With several steps in flight, `seconds` includes the time in which the step waited for the others: after it, the
        requests get their next tokens. `cost` begins when the step before was collected. If all stages are busy, it is
        the time of the slowest stage.
        """
        prompt, rows = flight.prompt_rows, flight.decode_rows
        if prompt or not flight.other_prompts:  # prompts in flight delay decoding steps
            self._budget.observe(rows or min(flight.other_decodes, 1), prompt, seconds)
        if self._running.drafts is not None:
            prompt += flight.other_prompts  # they take time of this step too
            self._running.drafts.observe(rows + prompt, prompt, cost, flight.proposal)
