"""Who runs: which requests are admitted, what they reuse of earlier ones, whom a full cache stops, and what is kept.

A request waits until it is admitted, runs until it ends, and waits again if it is preempted. What it evaluated stays
for later prompts until its blocks are needed.
"""

from __future__ import annotations

import logging
from collections import Counter
from time import perf_counter
from typing import TYPE_CHECKING

from localllm.cache import Sequence
from localllm.cache.prefix import PrefixCache, same
from localllm.engine import Engine, Result
from localllm.errors import LocalLLMError
from localllm.printable import printable
from localllm.scheduler.answering import Answering
from localllm.scheduler.interfaces import SchedulerLimits, Store
from localllm.scheduler.places import Places

if TYPE_CHECKING:
    from localllm.scheduler.drafts import Drafts

log = logging.getLogger("localllm.scheduler")
MOST_CLIENTS = 1000  # whose last prompt is remembered
LOOK_SECONDS = 0.05  # between looks at who waits, while all places are taken


class Running:
    """The requests of a scheduler that have not ended, and the kept sequences. Only the thread that steps uses it."""

    def __init__(
        self,
        engine: Engine,
        limits: SchedulerLimits,
        drafts: Drafts | None,
        store: Store | None,
    ) -> None:
        self._engine, self._limits, self._store = engine, limits, store
        self.drafts = drafts
        self._windowed = engine.pool.windowed is not None or bool(engine.pool.window)
        self._last_prompts: dict[str, int] = {}  # client -> tokens of its last prompt
        self.prefixes = PrefixCache(engine.block_tokens, store.save if store is not None else None)
        self.places = Places(limits.parallel, engine, self.prefixes)
        self.waiting: list[Answering] = []
        self.active: list[Answering] = []
        self._served: dict[str, int] = {}  # account -> its last turn, the longest ago first
        self._stepper = 0
        self._futile: set[int] = set()  # requests for which another stopped in vain; until one ends
        self._seen: tuple[int, ...] = ()  # who ran and waited when all places were taken, and when that was
        self._seen_at = 0.0

    # -- the end of requests ---------------------------------------------------------------------------------------

    def drop_cancelled(self) -> None:
        for one in [*self.active, *self.waiting]:
            if one.ticket.cancelled:
                one.finish("cancelled")
                self.leave(one)

    @property
    def busy(self) -> bool:
        """Whether somebody waits for more of an answer."""
        return any(not one.ticket.paused for each in (self.active, self.waiting) for one in each)

    def leave(self, one: Answering) -> None:
        """Take a request that has ended from the lists, and keep its tokens for later prompts if it wants that."""
        if one in self.active:
            self.active.remove(one)
        if one in self.waiting:
            self.waiting.remove(one)
        self._futile.clear()
        if one.ticket.ended is not None:
            one.ticket.ended()
        if self.drafts is not None:
            self.drafts.end(one)
        if one.sequence is not None:
            self._keep(one)

    def end(self, error: LocalLLMError | None) -> None:
        """End all requests with `error`, or as cancelled, and forget what is kept."""
        for one in [*self.active, *self.waiting]:
            if error is not None and not one.ticket.cancelled:
                one.fail(error)
            one.finish("cancelled")
            self.leave(one)
        self.active, self.waiting = [], []
        self.prefixes.clear()
        if self.drafts is not None:
            self.drafts.close()

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

    def take(self, one: Answering, result: Result, prompt: bool, seconds: float) -> None:
        """Let a request choose from the logits of a step, and move on. `prompt`: the step read more than an answer."""
        sequence = one.sequence
        assert sequence is not None
        if not prompt:
            one.decoded(seconds, self.drafts.plain_seconds(len(self.active)) if self.drafts is not None else seconds)
        try:
            if prompt:
                one.evaluated(result.logits)
            caught_up = sequence.length >= len(one.tokens)
            if caught_up and one.left <= 0:
                one.finish("length")  # only the prompt was wanted, in the cache
            elif caught_up:
                if result.largest.ids.size:
                    one.take_largest(result.largest)
                else:
                    one.take(result.logits[-1 - one.verified :])
                if self.drafts is not None:
                    self.drafts.judge(one)
                if one.verified:
                    self._engine.truncate(sequence, one.held)
            elif one.checkpoints and sequence.length == one.checkpoints[0]:
                self.prefixes.keep(self._engine.fork(sequence))
        except LocalLLMError as error:
            one.fail(error)
        one.guesses, one.verified = [], 0
        if not one.done and len(one.tokens) > self._engine.limits.positions:
            one.finish("context")
        if one.done:
            self.leave(one)

    # -- admission -------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Start waiting requests, ordered by priority, running requests of the account, its last turn, running requests
        of the user, and age. Fewer running requests and older turns come first.

        If all places are taken, a request of an account that has too few makes another's stop for a while.
        """
        blocked: set[int] = set()
        each = self._limits.client_parallel or self._limits.parallel
        while self.waiting and not self._waited_already():
            have = Counter(one.request.client for one in self.active)
            accounts = Counter(one.request.account for one in self.active)
            ready = [
                one
                for one in self.waiting
                if one.number not in blocked and accounts[one.request.account] < each and not one.ticket.paused
            ]
            if not ready:
                return
            one = min(
                ready,
                key=lambda one: (
                    -one.request.priority, accounts[one.request.account], self._served.get(one.request.account, 0),
                    have[one.request.client], one.number,
                ),
            )  # fmt: skip
            stopped = self._to_stop(one, accounts) if len(self.active) >= self._limits.parallel else None
            if stopped is None and len(self.active) >= self._limits.parallel:
                return
            if not self._begin(one, stopped):
                blocked.add(one.number)

    def _waited_already(self) -> bool:
        """Whether all places are taken and nothing has changed since the last look, a moment ago."""
        if len(self.active) < self._limits.parallel or self._paused() is not None:
            return False
        now, who = perf_counter(), (len(self.waiting), self.waiting[-1].number, *(one.number for one in self.active))
        if who == self._seen and now - self._seen_at < min(LOOK_SECONDS, self._limits.slice_seconds):
            return True
        self._seen, self._seen_at = who, now
        return False

    def _to_stop(self, one: Answering, accounts: Counter[str]) -> Answering | None:
        """Return the running request that makes room for one of an account that has too few; None if it has to wait.

        It is one whose reader has enough for now, or the newest request of an account with at least two more. For an
        account without running requests, it may also be an answer that had its turn.
        """
        if (paused := self._paused()) is not None:
            return paused
        if one.number in self._futile:
            return None
        mine = accounts[one.request.account]
        lower = [other for other in self.active if other.request.priority <= one.request.priority]
        more = [other for other in lower if accounts[other.request.account] > mine + 1]
        if more:
            return max(more, key=lambda other: (-other.request.priority, accounts[other.request.account], other.number))
        due = [
            other
            for other in lower
            if other.request.account != one.request.account and other.had_its_turn(self._limits.slice_seconds)
        ]
        return min(due, key=lambda other: other.writes_since) if due and not mine else None

    def _begin(self, one: Answering, stopped: Answering | None) -> bool:
        """Give a request its part of the cache; return False if it has to wait for blocks or another's prompt.

        `stopped` makes room for it.
        """
        sequence, reused = self._engine.add(), 0
        if one.request.reuse and not one.request.prompt_logprobs:
            found = self._reusable(one)
            if found is None:
                return False
            sequence, reused = found
        if stopped is not None:
            self._stop(stopped, keep=True)
        if self.active and not self._has_room(one, sequence):
            self._engine.release(sequence)
            if stopped is not None:
                self._futile.add(one.number)
            return False
        self.waiting.remove(one)
        one.place = self.places.choose(one.request.place, [other.place for other in self.active])
        self.active.append(one)
        account = one.request.account
        self._stepper += 1
        self._served.pop(account, None)
        self._served[account] = self._stepper
        if len(self._served) > MOST_CLIENTS:
            del self._served[next(iter(self._served))]
        try:
            one.admitted(sequence, reused)
            if self.drafts is not None:
                self.drafts.begin(one)
        except LocalLLMError as error:  # such as that of its grammar
            one.fail(error)
            self.leave(one)
        except BaseException:  # an interrupt, or a bug: it cannot run without its grammar
            one.fail(LocalLLMError("the answer was interrupted"))
            self.leave(one)
            raise
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
            if (
                other.reading
                and not other.ticket.paused
                and same(other.tokens, prompt) >= reused + self._engine.block_tokens
            ):
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
            if self.prefixes.evict():
                continue
            if (paused := self._paused()) is None:
                return False
            self._stop(paused, keep=False)
        return True

    def _paused(self) -> Answering | None:
        """Return a running request whose reader has enough for now: the newest."""
        return max((one for one in self.active if one.ticket.paused), key=lambda one: one.number, default=None)

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
            name = printable(client, 100) or "-"  # a request may name any user
            log.info("client %s: prompt of %d tokens %s; %d are reused", name, total, where, reused)

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

    def make_room(self, tokens: int) -> None:
        """Free blocks for so many tokens of somebody else, if need be those of all requests."""
        size = self._engine.block_tokens
        while self._engine.free_blocks * size < tokens + size and self.prefixes.evict():
            pass
        while self._engine.pool.takeable * size < tokens + size and self.active:
            self._stop(self.active[-1], keep=False)

    def use(self, drafts: Drafts | None) -> None:
        """Draft by other means from now on. Running requests begin anew with them."""
        if self.drafts is not None:
            self.drafts.close()
        self.drafts = drafts
        for one in self.active:
            one.drafter, one.guesses, one.verified = None, [], 0
            if drafts is not None:
                drafts.begin(one)

    def _preempt(self) -> bool:
        """Take the blocks of the request that matters least; it will be evaluated again. False if only one runs."""
        if len(self.active) < 2:
            return False
        least = min(self.active, key=lambda one: (not one.ticket.paused, one.request.priority, -one.number))
        self._stop(least, keep=False)
        return True

    def _stop(self, one: Answering, keep: bool) -> None:
        """Make a running request wait again. `keep` its tokens in the cache, until blocks run out."""
        sequence, one.sequence = one.sequence, None
        assert sequence is not None
        if keep and one.request.reuse and sequence.length:
            self.prefixes.keep(sequence)
        else:
            self._engine.release(sequence)
        if self.drafts is not None:
            self.drafts.end(one)
        one.guesses, one.verified = [], 0
        self.active.remove(one)
        self.waiting.append(one)
