"""The scheduler: runs many requests on one engine, a step at a time, in a thread of its own.

Every step takes the newest token of each answer that is being written, then parts of prompts as the budget allows. The
tokens of a request do not depend on its company: the engine's rows do not, drafted tokens are accepted only if they
would have been chosen anyway, and each request has its own random numbers.

    scheduler = Scheduler(engine, tokenizer, model.sampler, SchedulerLimits())
    ticket = scheduler.submit(Request(prompt, sampling), listener)
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from localllm.backends.base import BackendError
from localllm.cache import CacheFull, Sequence
from localllm.cache.prefix import PrefixCache, same
from localllm.closing import Closing
from localllm.engine import ContextFull, Engine, Result, Rows, Wanted
from localllm.errors import LocalLLMError
from localllm.notice import Notice, Setting, said
from localllm.options import SamplingOptions
from localllm.sampling.sampler import Sampler
from localllm.scheduler.answering import Answering
from localllm.scheduler.budget import Budget
from localllm.scheduler.drafts import Drafts
from localllm.scheduler.errors import QueueFull, Stopped
from localllm.scheduler.interfaces import Load, Observer, SchedulerLimits, Slot, Store
from localllm.scheduler.request import Event, Request, Ticket
from localllm.tokenizer import Tokenizer

log = logging.getLogger("localllm.scheduler")
MOST_CLIENTS = 1000  # whose last prompt is remembered


@dataclass(slots=True)
class _Part:
    """The rows of one request in a step."""

    answering: Answering
    count: int
    wanted: Wanted = "last"


class Scheduler(Closing):
    """Runs requests until it is closed."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        sampler: Callable[[SamplingOptions], Sampler],
        limits: SchedulerLimits | None = None,
        drafts: Drafts | None = None,
        observer: Observer | None = None,
        store: Store | None = None,
    ) -> None:
        self.engine, self.limits = engine, limits or SchedulerLimits()
        self._tokenizer, self._sampler = tokenizer, sampler
        self._drafts, self._observer = drafts, observer
        self._windowed = engine.pool.windowed is not None or bool(engine.pool.window)
        self._store = store
        self._prefixes = PrefixCache(engine.block_tokens, store.save if store is not None else None)
        self._budget = Budget(engine.limits.rows, self.limits.step_seconds)
        self._last_prompts: dict[str, int] = {}  # client -> tokens of its last prompt
        self._inbox: queue.SimpleQueue[Answering | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: list[Answering] = []
        self._running: list[Answering] = []
        self._number = 0
        self._lock = threading.Lock()
        self._open = 0  # requests that have not ended
        self._stopped: LocalLLMError | None = None
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)
        self._thread.start()

    # -- for any thread --------------------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Callable[[Event], None]) -> Ticket:
        """Queue a request. Its events go to `listener`, in the scheduler's thread.

        ContextFull for a prompt that does not fit, QueueFull if too many wait, Stopped after the end.
        """
        context = self.engine.limits.positions
        if not request.prompt:
            raise LocalLLMError("the prompt has no tokens; give some text")
        if len(request.prompt) > context:
            counts = f"the prompt has {len(request.prompt)} tokens, the context holds {context}"
            raise ContextFull(Notice(counts, "; shorten it or raise ", Setting("ctx_size")))
        sampler = self._sampler(request.sampling)
        ticket = Ticket(request, listener)
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            if self._open >= self.limits.parallel + self.limits.waiting:
                raise QueueFull(f"{self._open} requests are running or waiting; try again later")
            self._open += 1
            self._number += 1
            self._inbox.put(Answering(ticket, self._number, sampler, self._tokenizer))
        return ticket

    def load(self) -> Load:
        """Return what runs now. Numbers of a step that runs may be older or newer."""
        running = tuple(
            Slot(
                number=one.number,
                client=one.request.client,
                prompt_tokens=one.prompt_tokens,
                evaluated=one.sequence.length if one.sequence is not None else 0,
                answered=one.answered,
            )
            for one in list(self._running)
        )
        kept = sum(sequence.length for sequence in list(self._prefixes))
        waiting = max(0, self._open - len(running))
        return Load(running, waiting, kept, self.engine.free_blocks, self.engine.pool.blocks)

    def forget(self) -> None:
        """Empty the prefix cache at the next step."""
        self._inbox.put(self._prefixes.clear)

    def close(self) -> None:
        """End all requests as cancelled, and the thread."""
        with self._lock:
            self._stopped = self._stopped or Stopped("the server is shutting down")
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._collect():
                self._drop_cancelled()
                self._admit()
                parts = self._parts()
                if parts:
                    self._step(parts)
        except BaseException as error:  # a bug: nobody may wait for ever
            traceback.print_exc()
            with self._lock:
                self._stopped = Stopped(f"the scheduler ended by an error: {error}")
        finally:
            self._end()

    def _collect(self) -> bool:
        """Take new requests; wait for one if nothing runs. Return whether to go on."""
        while True:
            idle = not self._running and not self._waiting
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Answering):
                self._waiting.append(item)
            else:
                item()

    def _end(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Answering):
                self._waiting.append(item)
        for one in [*self._running, *self._waiting]:
            if self._stopped is not None and not one.ticket.cancelled.is_set():
                one.fail(self._stopped)
            self._leave(one)
        self._running, self._waiting = [], []
        self._prefixes.clear()

    def _drop_cancelled(self) -> None:
        for one in [*self._running, *self._waiting]:
            if one.ticket.cancelled.is_set():
                one.finish("cancelled")
                self._leave(one)

    def _leave(self, one: Answering) -> None:
        """Take a request that has ended from the lists, and keep its tokens for later prompts if it wants that."""
        if one in self._running:
            self._running.remove(one)
        if one in self._waiting:
            self._waiting.remove(one)
        with self._lock:
            self._open -= 1
        if one.sequence is not None:
            self._keep(one)

    def _keep(self, one: Answering) -> None:
        sequence, one.sequence = one.sequence, None
        assert sequence is not None
        if not one.request.reuse or not sequence.length:
            sequence.free()
            return
        if not self._windowed:  # what a longer text holds need not be kept twice
            found = self._prefixes.find(sequence.tokens)
            if found.sequence is not None and found.length == found.sequence.length:
                self._prefixes.drop(found.sequence)
        self._prefixes.keep(sequence)

    # -- who runs --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting requests: by priority, then clients that have the fewest running, then age."""
        blocked: set[int] = set()
        while len(self._running) < self.limits.parallel:
            have = Counter(one.request.client for one in self._running)
            ready = [one for one in self._waiting if one.number not in blocked]
            if not ready:
                return
            one = min(ready, key=lambda one: (-one.request.priority, have[one.request.client], one.number))
            if not self._begin(one):
                blocked.add(one.number)

    def _begin(self, one: Answering) -> bool:
        """Give a request its part of the cache; return False if it is better to wait for another's prompt."""
        sequence, reused = self.engine.add(), 0
        if one.request.reuse and not one.request.prompt_logprobs:
            prompt = one.tokens[:-1]
            found = self._prefixes.find(prompt)
            if self._store is not None and self._store.best(prompt) > found.length:
                stored = self._store.load(prompt)
                if stored is not None:
                    self._prefixes.keep(stored)
                    found = self._prefixes.find(prompt)
            source, reused, alike = found.sequence, found.length, found.alike
            for other in self._running:
                assert other.sequence is not None
                held = other.sequence.reach(same(other.sequence.tokens, prompt))
                if held > reused:
                    source, reused = other.sequence, held
                if other.reading and same(other.tokens, prompt) >= reused + self.engine.block_tokens:
                    return False  # it is about to evaluate what this one needs
                alike = max(alike, held)
            reused -= reused % self.limits.aligned
            if source is not None and source.reach(reused) == reused and reused:
                sequence = self.engine.fork(source)
                self.engine.truncate(sequence, reused)
            else:
                reused = 0
            one.checkpoints = self._checkpoints(reused, alike, len(one.tokens))
            self._tell_divergence(one, reused, alike)
        if self._running and not self._has_room(one, sequence):
            self.engine.release(sequence)
            return False
        self._waiting.remove(one)
        self._running.append(one)
        one.admitted(sequence, reused)
        if self._drafts is not None:
            self._drafts.begin(one)
        return True

    def _has_room(self, one: Answering, sequence: Sequence) -> bool:
        """Return whether all known tokens fit beside the running requests; free kept sequences for them."""
        pool = self.engine.pool
        needed = -(-(len(one.tokens) + 1) // pool.block_size) - len(sequence.blocks)
        while pool.takeable < needed:
            if not self._prefixes.evict():
                return False
        return True

    def _tell_divergence(self, one: Answering, reused: int, alike: int) -> None:
        """Log where a client's prompt differs from one that it sent before. No text of the prompt is logged."""
        client, total = one.request.client, one.prompt_tokens
        last = self._last_prompts.get(client, 0)
        self._last_prompts.pop(client, None)
        self._last_prompts[client] = total
        if len(self._last_prompts) > MOST_CLIENTS:
            del self._last_prompts[next(iter(self._last_prompts))]
        if last and alike < min(last, total - 1):
            where = f"differs from an earlier one at token {alike}"
            log.info("client %s: prompt of %d tokens %s; %d are reused", client or "-", total, where, reused)

    def _checkpoints(self, reused: int, alike: int, total: int) -> list[int]:
        """Return where to keep a copy of a sequence for later prompts.

        Layers that see everything keep all that a later prompt may share. Windows and states move on, so a copy stays
        where this prompt parted from an earlier one, and where the answer begins.
        """
        if not self._windowed:
            return []
        size = self.engine.block_tokens
        return sorted({at for at in (alike // size * size, (total - 1) // size * size) if at > reused})

    def _preempt(self, parts: list[_Part]) -> bool:
        """Take the blocks of the request that matters least; it will be evaluated again. False if only one runs."""
        if len(self._running) < 2:
            return False
        victim = min(self._running, key=lambda one: (one.request.priority, -one.number))
        assert victim.sequence is not None
        self.engine.release(victim.sequence)
        victim.sequence = None
        victim.guesses, victim.verified = [], 0
        self._running.remove(victim)
        self._waiting.insert(0, victim)
        parts[:] = [part for part in parts if part.answering is not victim]
        return True

    # -- a step ----------------------------------------------------------------------------------------------------

    def _parts(self) -> list[_Part]:
        """Choose the rows of the next step, and make room for them."""
        writing = [one for one in self._running if not one.reading]
        reading = [one for one in self._running if one.reading]
        if self._drafts is not None:
            self._drafts.propose(writing, self.engine.limits)
        limits = self.engine.limits
        parts = [_Part(one, 1 + one.verified, "all") for one in writing][: limits.logit_rows]
        rows = sum(part.count for part in parts)
        while rows > min(limits.rows, limits.logit_rows):  # too many drafted tokens: verify none
            for part in parts:
                part.answering.verified, part.count = 0, 1
            rows = len(parts)
        budget = min(self._budget.prompt_rows(rows, len(reading)), limits.rows - rows)
        logits_left = limits.logit_rows - rows
        parts += self._prompt_parts(reading, budget, logits_left)
        return self._fitting(parts)

    def _prompt_parts(self, reading: list[Answering], budget: int, logits_left: int) -> list[_Part]:
        """Divide the budget: half for the prompt that waits longest, the rest for the shortest first."""
        parts: list[_Part] = []
        oldest = sorted(reading, key=lambda one: (-one.request.priority, one.number))
        order = [*oldest[:1], *sorted(oldest[1:], key=lambda one: one.pending)]
        for place, one in enumerate(order):
            if logits_left <= 0 or budget <= 0:
                break
            share = max(budget // 2, 1) if place == 0 and len(order) > 1 else budget
            count = self._chunk(one, min(share, logits_left) if one.request.prompt_logprobs else share)
            if not count:
                continue
            whole = count == one.pending
            wanted: Wanted = "all" if one.request.prompt_logprobs else "last" if whole else "none"
            parts.append(_Part(one, count, wanted))
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
        aligned = self.limits.aligned
        if aligned > 1:  # a whole chunk or nothing, so that its bits do not depend on the load
            whole = min(aligned - start % aligned, one.pending)
            most = self.engine.limits.rows - self.limits.parallel * 16
            count = min(whole, max(most, 1))
        return count

    def _fitting(self, parts: list[_Part]) -> list[_Part]:
        """Free blocks until the parts fit: kept sequences first, then those of other requests."""
        while parts and not self.engine.fits([(_sequence(part), part.count) for part in parts]):
            if self._prefixes.evict() or self._preempt(parts):
                continue
            [part] = parts
            room = self.engine.room(_sequence(part))
            if room >= part.count:
                break
            if room:
                part.count = min(room, part.count)
                part.wanted = "last" if part.count == part.answering.pending else part.wanted
                part.answering.verified = min(part.answering.verified, part.count - 1)
                if part.answering.reading and part.count < part.answering.pending:
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
            blocks = self.engine.pool.blocks
            one.fail(CacheFull(one.pending, 0, blocks, self.engine.block_tokens))
        self._leave(one)

    def _step(self, parts: list[_Part]) -> None:
        began = perf_counter()
        rows = [self._rows(part) for part in parts]
        try:
            results = self.engine.step(rows)
        except (BackendError, LocalLLMError) as error:
            for part in parts:
                part.answering.fail(error if isinstance(error, LocalLLMError) else LocalLLMError(said(error)))
                self._leave(part.answering)
            return
        seconds = perf_counter() - began
        answers = sum(part.wanted == "all" and not part.answering.request.prompt_logprobs for part in parts)
        prompt = sum(part.count for part in parts if part.answering.reading or part.wanted == "none")
        self._budget.observe(answers, prompt, seconds)
        if self._observer is not None:
            self._observer.step(len(parts), sum(part.answering.verified > 0 for part in parts))
        if self._drafts is not None:
            self._drafts.observe(sum(part.count for part in parts), prompt, seconds)
        for part, result in zip(parts, results, strict=True):
            self._take(part, result)

    def _rows(self, part: _Part) -> Rows:
        one = part.answering
        start = _sequence(part).length
        pending = one.tokens[start : start + part.count]
        drafted = [guess.token for guess in one.guesses[: one.verified]] if not one.reading else []
        picks = one.looks_at if not one.verified and not one.request.prompt_logprobs and part.wanted != "none" else 0
        return Rows(_sequence(part), [*pending, *drafted], part.wanted, picks)

    def _take(self, part: _Part, result: Result) -> None:
        """Let a request choose from its logits, and move on."""
        one, sequence = part.answering, _sequence(part)
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
                    self.engine.truncate(sequence, max(min(sequence.length, len(one.tokens) - 1), 0))
            elif one.checkpoints and sequence.length == one.checkpoints[0]:
                self._prefixes.keep(self.engine.fork(sequence))
        except LocalLLMError as error:
            one.fail(error)
        one.guesses, one.verified = [], 0
        if not one.done and len(one.tokens) > self.engine.limits.positions:
            one.finish("context")
        if one.done:
            self._leave(one)


def _sequence(part: _Part) -> Sequence:
    sequence = part.answering.sequence
    assert sequence is not None
    return sequence
