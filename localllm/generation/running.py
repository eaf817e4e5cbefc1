"""Admits and preempts requests, reuses cached prefixes, and decides which sequences the prefix cache keeps.

A request waits until it is admitted, runs until it ends, and waits again if preempted. Evaluated tokens stay in the
prefix cache until their blocks are needed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from localllm.backends.base import ExecutableLost
from localllm.base.errors import LocalLLMError
from localllm.base.notices import said
from localllm.base.printable import printable
from localllm.engine import CacheSequence, Engine, Placed, Result
from localllm.engine.media import whole
from localllm.engine.prefix import PrefixCache, same
from localllm.generation.flights import Flights
from localllm.generation.interfaces import PrefixStore, SchedulerLimits
from localllm.generation.request_state import RequestState
from localllm.generation.slots import Slots

if TYPE_CHECKING:
    from localllm.generation.speculation.drafts import Drafts

log = logging.getLogger("localllm.generation")
MOST_CLIENTS = 1000  # maximum number of clients, and of accounts, to remember
SUSPECT = 2  # steps of a request lost in sequence, after which it is evaluated alone until its next token
MOST_LOSSES = 5  # steps lost in sequence after which it fails, because it seems to break each restored stage
LOOK_SECONDS = 0.05  # interval between admission attempts while all slots are taken


class Running:
    """The waiting and running requests of a scheduler, and its prefix cache. Only the stepping thread accesses it."""

    def __init__(
        self,
        engine: Engine,
        limits: SchedulerLimits,
        drafts: Drafts | None,
        store: PrefixStore | None,
    ) -> None:
        self._engine, self._limits, self._store = engine, limits, store
        self.drafts = drafts
        self.flights = Flights(engine)
        self.suspicious = False  # whether there may be suspects
        self._windowed = engine.pool.has_windows
        self._last_prompts: dict[str, int] = {}  # client -> number of tokens of its last prompt
        self.prefixes = PrefixCache(engine.block_tokens, store.save if store is not None else None)
        self.slots = Slots(limits.parallel, engine, self.prefixes)
        self.waiting: list[RequestState] = []
        self.active: list[RequestState] = []
        self._served: dict[str, int] = {}  # account -> sequence number of its last admission, oldest first
        self._stepper = 0
        self._futile: set[int] = set()  # requests that did not fit even after a preemption; cleared when a request ends
        self._seen: tuple[int, ...] = ()  # requests at the last admission attempt with all slots taken, and its time
        self._seen_at = 0.0

    # -- the end of requests ---------------------------------------------------------------------------------------

    def drop_cancelled(self) -> None:
        for one in [*self.active, *self.waiting]:
            if one.ticket.cancelled and (not one.in_flight or self.flights.give_up(one)):
                one.finish("cancelled")
                self.leave(one)

    @property
    def busy(self) -> bool:
        """Whether a step is in flight, or any request is not paused."""
        requests = (one for each in (self.active, self.waiting) for one in each)
        return bool(self.flights) or self.flights.sliced is not None or any(not one.ticket.paused for one in requests)

    def leave(self, one: RequestState) -> None:
        """Remove a request that has ended. If it allows `reuse`, its tokens stay in the prefix cache."""
        if one in self.active:
            self.active.remove(one)
        if one in self.waiting:
            self.waiting.remove(one)
        self._futile.clear()
        for media in one.media:
            media.drop()
        if one.ticket.ended is not None:
            one.ticket.ended()
        if self.drafts is not None:
            self.drafts.end(one)
        if one.sequence is not None:
            self._keep(one)

    def end(self, error: LocalLLMError | None) -> None:
        """End all requests, with `error` or as cancelled, give up steps in flight, and clear the prefix cache."""
        self.flights.abandon()
        for one in [*self.active, *self.waiting]:
            if error is not None and not one.ticket.cancelled:
                one.fail(error)
            one.finish("cancelled")
            self.leave(one)
        self.active, self.waiting = [], []
        self.prefixes.clear()
        if self.drafts is not None:
            self.drafts.close()

    def _keep(self, one: RequestState) -> None:
        sequence, one.sequence = one.sequence, None
        assert sequence is not None
        kept = one.request.reuse and sequence.length > 0
        self.slots.remember(one.slot, sequence.tokens if kept else [], sequence.media)
        if not kept:
            sequence.free()
            return
        self.prefixes.keep_in_place(sequence)

    def take(self, one: RequestState, result: Result, prompt: bool, seconds: float, plain: float) -> None:
        """Sample a request's next tokens from the result of a step. `prompt` tells whether the step was part of the
        request's prefill. The step took `seconds`, and would have taken `plain` without drafts.
        """
        sequence = one.sequence
        assert sequence is not None
        start = sequence.length - len(result.hidden)
        if not prompt and not one.known_left:
            one.decoded(seconds, plain)
        try:
            if prompt:
                one.evaluated(result.logits)
                if one.request.states is not None:
                    one.request.states(sequence.length - len(result.normed), result.normed)
            caught_up = sequence.length >= len(one.tokens)
            if caught_up and one.tokens_left <= 0:
                one.finish("length")  # `max_tokens` is 0: prefill only
            elif caught_up:
                if result.top_k.ids.size:
                    one.take_top_k(result.top_k)
                else:
                    one.take(result.logits[-1 - one.verified :])
                if self.drafts is not None:
                    self.drafts.judge(one)
                if one.verified:
                    self._engine.truncate(sequence, one.cached_tokens)
            elif one.checkpoints and sequence.length == one.checkpoints[0]:
                self.prefixes.keep(self._engine.fork(sequence))
        except LocalLLMError as error:
            one.fail(error)
        if self.drafts is not None and not one.done:
            self.drafts.evaluated(one, result.hidden[: max(0, sequence.length - start)])
        one.drafts, one.verified = [], 0
        if not one.done and len(one.tokens) > self._engine.limits.positions:
            one.finish("context")
        if one.done:
            self.leave(one)

    # -- admission -------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Admit waiting requests.

        They are ordered by priority, then by the account's number of running requests, the time of its last admission,
        the user's number of running requests, and age. Fewer running requests and older admissions come first. If all
        slots are taken, a request of an account with too few running requests may preempt another request.
        """
        blocked: set[int] = set()
        each = self._limits.client_parallel or self._limits.parallel
        while self.waiting and not self._waited_already():
            have = Counter(one.request.client for one in self.active)
            # a paused request can be preempted for any other request, even of the same account
            accounts = Counter(one.request.account for one in self.active if not one.ticket.paused)
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
                if self.flights:  # a request to preempt may be among those in flight
                    self._seen = ()
                return
            if not self._begin(one, stopped):
                blocked.add(one.number)

    def _waited_already(self) -> bool:
        """Whether all slots are taken and the set of requests is the same as at the last, recent attempt."""
        if len(self.active) < self._limits.parallel or self._paused() is not None:
            return False
        now, who = perf_counter(), (len(self.waiting), self.waiting[-1].number, *(one.number for one in self.active))
        if who == self._seen and now - self._seen_at < min(LOOK_SECONDS, self._limits.slice_seconds):
            return True
        self._seen, self._seen_at = who, now
        return False

    def _to_stop(self, one: RequestState, accounts: Counter[str]) -> RequestState | None:
        """Return the running request to preempt for `one`; None if `one` has to wait.

        A paused request is preempted first, then the newest request of an account with at least two more running
        requests than the account of `one`. If that account has no running requests, a request whose time slice is over
        may also be preempted.
        """
        if (paused := self._paused()) is not None:
            return paused
        if one.number in self._futile:
            return None
        mine = accounts[one.request.account]
        lower = [other for other in self.active if other.request.priority <= one.request.priority]
        lower = [other for other in lower if not other.in_flight]
        more = [other for other in lower if accounts[other.request.account] > mine + 1]
        if more:
            return max(more, key=lambda other: (-other.request.priority, accounts[other.request.account], other.number))
        due = [
            other
            for other in lower
            if other.request.account != one.request.account and other.had_its_turn(self._limits.slice_seconds)
        ]
        return min(due, key=lambda other: other.decoding_since) if due and not mine else None

    def _begin(self, one: RequestState, stopped: RequestState | None) -> bool:
        """Admit a request; return False if it has to wait for blocks or for another request's prefill.

        `stopped` is the request to preempt, or None.
        """
        sequence, reused = self._engine.add(), 0
        if one.request.reuse and not one.request.whole_prompt:
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
        one.slot = self.slots.choose(one.request.slot, [other.slot for other in self.active])
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
        except LocalLLMError as error:  # for example, an invalid grammar
            one.fail(error)
            self.leave(one)
        except BaseException:  # on an interrupt or a bug: the request cannot run without its grammar
            one.fail(LocalLLMError("the answer was interrupted"))
            self.leave(one)
            raise
        return True

    def _reusable(self, one: RequestState) -> tuple[CacheSequence, int] | None:
        """Return a sequence with a prefix of the request's tokens, and the prefix length.

        The sequence shares the blocks of the cached, running or stored sequence with the longest common prefix. Return
        None if a running request is about to evaluate a longer common prefix.
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
            if other.in_flight:  # the step may fail
                common = min(common, other.flown_from)
            held, alike = other.sequence.reach(common), max(alike, common)
            if held > reused:
                source, reused = other.sequence, held
            if (
                other.prefilling
                and not other.ticket.paused
                and same(other.tokens, prompt) >= reused + self._engine.block_tokens
            ):
                return None
        reused -= reused % self._limits.aligned
        sequence = self._engine.add()
        if source is not None and reused:
            reused = source.reach(reused)
        if source is not None and reused:
            sequence = self._engine.fork(source)
            self._engine.truncate(sequence, reused)
        else:
            reused = 0
        placed = [each.placed for each in one.media]
        one.checkpoints = self._checkpoints(reused, alike, len(one.tokens), placed)
        self._tell_divergence(one, reused, alike)
        return sequence, reused

    def _has_room(self, one: RequestState, sequence: CacheSequence) -> bool:
        """Return whether the request's tokens fit into the cache alongside the running requests.

        Evict cached sequences and preempt paused requests to make room.
        """
        pool = self._engine.pool
        needed = -(-(len(one.tokens) + 1) // pool.block_size) - len(sequence.blocks)
        while pool.takeable < needed:
            if self.prefixes.evict():
                continue
            if (paused := self._paused()) is None:
                return False
            self._stop(paused, keep=False)
        return True

    def _paused(self) -> RequestState | None:
        """Return the newest running request that is paused, or None."""
        paused = (one for one in self.active if one.ticket.paused and not one.in_flight)
        return max(paused, key=lambda one: one.number, default=None)

    def _tell_divergence(self, one: RequestState, reused: int, alike: int) -> None:
        """Log the position at which a client's prompt diverges from its earlier prompt. The prompt's text is not
        logged.
        """
        client, total = one.request.client, one.prompt_tokens
        last = self._last_prompts.get(client, 0)
        self._last_prompts.pop(client, None)
        self._last_prompts[client] = total
        if len(self._last_prompts) > MOST_CLIENTS:
            del self._last_prompts[next(iter(self._last_prompts))]
        if last and alike < min(last, total - 1):
            where = f"differs from an earlier one at token {alike}"
            name = printable(client, 100) or "-"  # the user name comes from the request
            log.info("client %s: prompt of %d tokens %s; %d are reused", name, total, where, reused)

    def _checkpoints(self, reused: int, alike: int, total: int, media: Sequence[Placed] = ()) -> list[int]:
        """Return the lengths at which to copy the sequence for later prompts.

        Full-attention layers need no copies: their KV cache can be truncated to any length. Sliding-window caches and
        recurrent states cannot, so they are copied where this prompt diverges from an earlier one and where the answer
        begins, rounded down to a block, or to the start of a picture of `media` that a chunk cannot cut.
        """
        if not self._windowed:
            return []
        size = self._engine.block_tokens
        found = {whole(media, at) for at in (alike // size * size, (total - 1) // size * size)}
        return sorted(at for at in found if at > reused)

    # -- a full cache ----------------------------------------------------------------------------------------------

    def free_some(self) -> bool:
        """Evict a cached sequence, or else preempt a request; return False if neither is possible.

        While steps are in flight, no request is preempted.
        """
        return self.prefixes.evict() or (not self.flights and self._preempt())

    def make_room(self, tokens: int) -> None:
        """Free blocks for `tokens` tokens outside the scheduler, preempting all requests if necessary."""
        size = self._engine.block_tokens
        while self._engine.free_blocks * size < tokens + size and self.prefixes.evict():
            pass
        while self._engine.pool.takeable * size < tokens + size and self.active:
            self._stop(self.active[-1], keep=False)

    def use(self, drafts: Drafts | None) -> None:
        """Replace the drafter, also for running requests; None disables speculation."""
        if self.drafts is not None:
            self.drafts.close()
        self.drafts = drafts
        for one in self.active:
            one.drafter, one.drafts, one.verified, one.drafting = None, [], 0, False
            if drafts is not None:
                drafts.begin(one)

    def _preempt(self) -> bool:
        """Preempt one request, whose tokens will be evaluated again; return False if only one request runs.

        Paused requests are preempted first, then the lowest priority, then the newest.
        """
        if len(self.active) < 2:
            return False
        least = min(self.active, key=lambda one: (not one.ticket.paused, one.request.priority, -one.number))
        self._stop(least, keep=False)
        return True

    def lose(self, error: ExecutableLost) -> None:
        """Preempt all requests and forget all cached tokens, because the executable was lost.

        A request whose steps were lost MOST_LOSSES times in sequence fails.
        """
        flying = [one for one in self.active if one.in_flight]
        for flight in self.flights:
            if self.drafts is not None and flight.proposal is not None:
                self.drafts.forget(flight.proposal)
        self.flights.abandon()
        for one in list(self.active):
            one.land()
            self._stop(one, keep=False)
        for one in flying:
            one.losses += 1
            if one.losses >= MOST_LOSSES:
                again = f"{said(error)}; this happened {one.losses} times in sequence while it computed this answer"
                one.fail(LocalLLMError(f"{again}; look at the logs of the stages, then ask again"))
                self.leave(one)
        self.suspicious = any(one.losses >= SUSPECT for one in self.waiting)
        self.prefixes.forget()
        self.slots.forget()
        self._engine.lose()

    def suspects(self) -> list[RequestState]:
        """Return the running requests that may be the reason why the executable was lost, oldest first."""
        found = [one for one in [*self.active, *self.waiting] if one.losses >= SUSPECT]
        self.suspicious = bool(found)
        running = [one for one in found if one.sequence is not None and not one.ticket.paused]
        return sorted(running, key=lambda one: one.number)

    def _stop(self, one: RequestState, keep: bool) -> None:
        """Preempt a running request and queue it again. `keep`: leave its tokens in the prefix cache."""
        self.flights.give_up(one)
        sequence, one.sequence = one.sequence, None
        assert sequence is not None
        assert not one.in_flight
        if keep and one.request.reuse and sequence.length:
            self.prefixes.keep(sequence)
        else:
            self._engine.release(sequence)
        if self.drafts is not None:
            self.drafts.end(one)
        one.drafts, one.verified = [], 0
        self.active.remove(one)
        self.waiting.append(one)
