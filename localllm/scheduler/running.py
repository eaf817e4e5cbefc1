"""Who runs: which requests are admitted, what they reuse of earlier ones, whom a full cache stops, and what is kept.

A request waits until it is admitted, runs until it ends, and waits again if it is preempted. What it evaluated stays
for later prompts until its blocks are needed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from localllm.cache import Sequence
from localllm.cache.prefix import PrefixCache, same
from localllm.engine import Engine
from localllm.errors import LocalLLMError
from localllm.scheduler.answering import Answering
from localllm.scheduler.drafts import Drafts
from localllm.scheduler.interfaces import SchedulerLimits, Store
from localllm.scheduler.places import Places

log = logging.getLogger("localllm.scheduler")
MOST_CLIENTS = 1000  # whose last prompt is remembered


class Running:
    """The requests of a scheduler that have not ended, and the kept sequences. Only the scheduler's thread uses it."""

    def __init__(
        self,
        engine: Engine,
        limits: SchedulerLimits,
        drafts: Drafts | None,
        store: Store | None,
        ended: Callable[[], None],
    ) -> None:
        """`ended` is called whenever a request has ended."""
        self._engine, self._limits, self._drafts, self._store, self._ended = engine, limits, drafts, store, ended
        self._windowed = engine.pool.windowed is not None or bool(engine.pool.window)
        self._last_prompts: dict[str, int] = {}  # client -> tokens of its last prompt
        self.prefixes = PrefixCache(engine.block_tokens, store.save if store is not None else None)
        self.places = Places(limits.parallel, engine, self.prefixes)
        self.waiting: list[Answering] = []
        self.active: list[Answering] = []

    # -- the end of requests ---------------------------------------------------------------------------------------

    def drop_cancelled(self) -> None:
        for one in [*self.active, *self.waiting]:
            if one.ticket.cancelled.is_set():
                one.finish("cancelled")
                self.leave(one)

    def leave(self, one: Answering) -> None:
        """Take a request that has ended from the lists, and keep its tokens for later prompts if it wants that."""
        if one in self.active:
            self.active.remove(one)
        if one in self.waiting:
            self.waiting.remove(one)
        self._ended()
        if self._drafts is not None:
            self._drafts.end(one)
        if one.sequence is not None:
            self._keep(one)

    def end(self, error: LocalLLMError | None) -> None:
        """End all requests with `error`, or as cancelled, and forget what is kept."""
        for one in [*self.active, *self.waiting]:
            if error is not None and not one.ticket.cancelled.is_set():
                one.fail(error)
            one.finish("cancelled")
            self.leave(one)
        self.active, self.waiting = [], []
        self.prefixes.clear()

    def _keep(self, one: Answering) -> None:
        sequence, one.sequence = one.sequence, None
        assert sequence is not None
        kept = one.request.reuse and sequence.length > 0
        self.places.remember(one.place, sequence.tokens if kept else [])
        if not kept:
            sequence.free()
            return
        if not self._windowed:  # what a longer text holds need not be kept twice
            found = self.prefixes.find(sequence.tokens)
            if found.sequence is not None and found.length == found.sequence.length:
                self.prefixes.drop(found.sequence)
        self.prefixes.keep(sequence)

    # -- admission -------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Start waiting requests: by priority, then clients that have the fewest running, then age."""
        blocked: set[int] = set()
        each = self._limits.client_parallel or self._limits.parallel
        while len(self.active) < self._limits.parallel:
            have = Counter(one.request.client for one in self.active)
            accounts = Counter(one.request.account for one in self.active)
            ready = [one for one in self.waiting if one.number not in blocked and accounts[one.request.account] < each]
            if not ready:
                return
            one = min(ready, key=lambda one: (-one.request.priority, have[one.request.client], one.number))
            if not self._begin(one):
                blocked.add(one.number)

    def _begin(self, one: Answering) -> bool:
        """Give a request its part of the cache; return False if it has to wait for blocks or another's prompt."""
        sequence, reused = self._engine.add(), 0
        if one.request.reuse and not one.request.prompt_logprobs:
            found = self._reusable(one)
            if found is None:
                return False
            sequence, reused = found
        if self.active and not self._has_room(one, sequence):
            self._engine.release(sequence)
            return False
        self.waiting.remove(one)
        one.place = self.places.choose(one.request.place, [other.place for other in self.active])
        self.active.append(one)
        one.admitted(sequence, reused)
        if self._drafts is not None:
            self._drafts.begin(one)
        return True

    def _reusable(self, one: Answering) -> tuple[Sequence, int] | None:
        """Return a sequence that begins a request's tokens, and its length; None if another is about to evaluate more.

        It shares the blocks of a kept sequence, of a running one or of one on disk, whichever has the most.
        """
        prompt = one.tokens[:-1]
        found = self.prefixes.find(prompt)
        if self._store is not None and self._store.best(prompt) > found.length:
            stored = self._store.load(prompt)
            if stored is not None:
                self.prefixes.keep(stored)
                found = self.prefixes.find(prompt)
        source, reused, alike = found.sequence, found.length, found.alike
        for other in self.active:
            assert other.sequence is not None
            common = same(other.sequence.tokens, prompt)
            held, alike = other.sequence.reach(common), max(alike, common)
            if held > reused:
                source, reused = other.sequence, held
            if other.reading and same(other.tokens, prompt) >= reused + self._engine.block_tokens:
                return None
        reused -= reused % self._limits.aligned
        sequence = self._engine.add()
        if source is not None and source.reach(reused) == reused and reused:
            sequence = self._engine.fork(source)
            self._engine.truncate(sequence, reused)
        else:
            reused = 0
        one.checkpoints = self._checkpoints(reused, alike, len(one.tokens))
        self._tell_divergence(one, reused, alike)
        return sequence, reused

    def _has_room(self, one: Answering, sequence: Sequence) -> bool:
        """Return whether all known tokens fit beside the running requests; free kept sequences for them."""
        pool = self._engine.pool
        needed = -(-(len(one.tokens) + 1) // pool.block_size) - len(sequence.blocks)
        while pool.takeable < needed:
            if not self.prefixes.evict():
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
        size = self._engine.block_tokens
        return sorted({at for at in (alike // size * size, (total - 1) // size * size) if at > reused})

    # -- a full cache ----------------------------------------------------------------------------------------------

    def free_some(self) -> bool:
        """Free blocks of a kept sequence, or of the request that matters least; False if only one request is left."""
        return self.prefixes.evict() or self._preempt()

    def _preempt(self) -> bool:
        """Take the blocks of the request that matters least; it will be evaluated again. False if only one runs."""
        if len(self.active) < 2:
            return False
        victim = min(self.active, key=lambda one: (one.request.priority, -one.number))
        assert victim.sequence is not None
        self._engine.release(victim.sequence)
        victim.sequence = None
        if self._drafts is not None:
            self._drafts.end(victim)
        victim.guesses, victim.verified = [], 0
        self.active.remove(victim)
        self.waiting.append(victim)
        return True
