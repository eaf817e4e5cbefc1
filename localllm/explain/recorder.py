"""Records an answer while a session makes it. Every time is taken without the time that recording takes itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localllm import cache
from localllm.backends.base import Clocked
from localllm.engine import Engine, Rows
from localllm.explain.choices import chain_of, seen
from localllm.explain.record import Choice, Record, Step, Who
from localllm.generation.decoding import Deciding, Decoding
from localllm.generation.statistics import Speculated
from localllm.model import Model
from localllm.sampling.sampler import Sampler
from localllm.session import Session


class Recorder:
    """Records the next answer of a session of `model`, with at most `top` candidates of every choice."""

    def __init__(self, model: Model, top: int) -> None:
        self.record, self._top = Record(), top
        self._engines: dict[Who, Engine] = {"model": model.engine}
        if model.draft is not None:
            self._engines["draft"] = model.draft.engine
        self._zero = perf_counter()
        self._row = 0  # of the last pass

    @contextmanager
    def watching(self, session: Session) -> Iterator[Record]:
        """Record what is generated inside the block; the answer begins with it."""
        session.watch = self
        for who, engine in self._engines.items():
            engine.watch = _Steps(self, who, engine)
        self._zero = perf_counter()
        try:
            yield self.record
        finally:
            self.record.held = session.length
            session.watch = None
            for engine in self._engines.values():
                engine.watch = None

    def now(self) -> float:
        """Return the seconds since the answer began, without those of recording."""
        return perf_counter() - self._zero - self.record.watching

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Count the time of the block as recording."""
        began = perf_counter()
        try:
            yield
        finally:
            self.record.watching += perf_counter() - began

    def answer(self, prompt: Sequence[int], sequence: cache.Sequence, decoding: Decoding, sampler: Sampler) -> Decoding:
        record = self.record
        assert not record.prompt, "one answer at a time"
        record.prompt, record.reused = list(prompt), sequence.length
        record.reused_blocks = len(sequence.blocks)
        record.seed, record.chain = sampler.seed, chain_of(sampler.options)
        record.prepared = self.now()
        return _Watched(decoding, sampler, self)

    def stepped(self, step: Step) -> None:
        """Add a pass."""
        self.record.steps.append(step)
        if step.who == "model":
            self._row = 0

    def chose(self, token: int, deciding: Deciding, sampler: Sampler, began: float, ended: float) -> None:
        """Add the choice of a token."""
        also = [token] if deciding.draft is None else [token, deciding.draft]
        found = seen(sampler.stages(deciding.logits), self._top, also)
        steps = self.record.steps
        last = max(number for number, step in enumerate(steps) if step.who == "model")
        self.record.choices.append(
            Choice(
                token, began, ended, last, self._row, *found,
                draft=deciding.draft, verified=deciding.verified, drafter=deciding.drafter,
            )
        )  # fmt: skip
        self._row += 1


@dataclass(frozen=True, slots=True)
class _Steps:
    """Watches the steps of one engine."""

    recorder: Recorder
    who: Who
    engine: Engine

    @contextmanager
    def step(self, rows: Sequence[Rows]) -> Iterator[None]:
        recorder = self.recorder
        [part] = rows  # a session steps alone
        with recorder.aside():
            first, before = part.sequence.length, self._clock()
        began = recorder.now()
        yield
        ended = recorder.now()
        with recorder.aside():
            after, tokens = self._clock(), tuple(part.tokens)
            cycles = None if before is None or after is None else after - before
            assert not isinstance(part.wanted, tuple), "answers want the last rows"
            logit_rows = {"none": 0, "last": 1, "all": len(tokens)}[part.wanted]
            recorder.stepped(Step(self.who, began, ended, first, tokens, logit_rows, cycles))

    def _clock(self) -> NDArray[np.int64] | None:
        """Return the cycles of each kernel call so far (calls, 2)."""
        executable = self.engine.executable
        return executable.clocks() if isinstance(executable, Clocked) else None


class _Watched:
    """A decoding whose choices are recorded."""

    def __init__(self, inner: Decoding, sampler: Sampler, recorder: Recorder) -> None:
        self._inner, self._sampler, self._recorder = inner, sampler, recorder

    @property
    def passes(self) -> int:
        return self._inner.passes

    @property
    def held(self) -> int:
        return self._inner.held

    def start(self, logits: NDArray[np.float32]) -> None:
        self._inner.start(logits)

    def sample(self) -> int:
        recorder = self._recorder
        began = recorder.now()
        token = self._inner.sample()
        ended = recorder.now()
        with recorder.aside():
            recorder.chose(token, self._inner.deciding(), self._sampler, began, ended)
        return token

    def deciding(self) -> Deciding:
        return self._inner.deciding()

    def feed(self, token: int, wanted: int) -> None:
        self._inner.feed(token, wanted)

    def close(self) -> None:
        self._inner.close()

    def speculated(self) -> Speculated | None:
        return self._inner.speculated()
