"""Record the generation of an answer. All times exclude the time spent recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localllm import engine as cache
from localllm.backends.base import Clocked
from localllm.engine import Engine, SequenceRows
from localllm.explain.choices import chain_of, seen
from localllm.explain.record import Record, StepRecord, TokenChoice, Who
from localllm.generation.request import Choosing
from localllm.model import Model
from localllm.sampling.sampler import Sampler


class AnswerRecorder:
    """Records the next answer of `model`, with at most `top` candidates per token."""

    def __init__(self, model: Model, top: int) -> None:
        self.record, self._top = Record(), top
        self._engines: dict[Who, Engine] = {"model": model.engine}
        if model.draft is not None:
            self._engines["draft"] = model.draft.engine
        self._zero = perf_counter()
        self._row = 0  # next row of the last pass's logits
        self._began = 0.0  # start time of the current choice

    @contextmanager
    def watching(self) -> Iterator[Record]:
        """Record the answer generated inside the block, starting now. The request must have this object as its
        `observer`."""
        for who, engine in self._engines.items():
            engine.watch = _Steps(self, who, engine)
        self._zero = perf_counter()
        try:
            yield self.record
        finally:
            for engine in self._engines.values():
                engine.watch = None

    def now(self) -> float:
        """Return the seconds since the start of the answer, without the time spent recording."""
        return perf_counter() - self._zero - self.record.watching

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Count the time of the block as recording time."""
        began = perf_counter()
        try:
            yield
        finally:
            self.record.watching += perf_counter() - began

    # -- observer callbacks ----------------------------------------------------------------------------------------

    def started(self, prompt: Sequence[int], sequence: cache.CacheSequence, sampler: Sampler) -> None:
        record = self.record
        assert not record.prompt, "one answer at a time"
        record.prompt, record.reused = list(prompt), sequence.length
        record.reused_blocks = len(sequence.blocks)
        record.seed, record.chain = sampler.seed, chain_of(sampler.options)
        record.prepared = self.now()

    def choosing(self) -> None:
        self._began = self.now()

    def chose(self, token: int, by: Choosing, sampler: Sampler) -> None:
        ended = self.now()
        with self.aside():
            self._chose(token, by, sampler, self._began, ended)

    def ended(self, length: int) -> None:
        self.record.held = length

    def stepped(self, step: StepRecord) -> None:
        """Add a forward pass."""
        self.record.steps.append(step)
        if step.who == "model":
            self._row = 0

    def _chose(self, token: int, deciding: Choosing, sampler: Sampler, began: float, ended: float) -> None:
        """Record how a token was chosen."""
        also = [token] if deciding.draft is None else [token, deciding.draft]
        found = seen(sampler.stages(deciding.logits), self._top, also)
        steps = self.record.steps
        last = max(number for number, step in enumerate(steps) if step.who == "model")
        self.record.choices.append(
            TokenChoice(
                token, began, ended, last, self._row, *found,
                draft=deciding.draft, verified=deciding.verified, drafter=deciding.drafter,
            )
        )  # fmt: skip
        self._row += 1


@dataclass(frozen=True, slots=True)
class _Steps:
    """Observes the steps of one engine."""

    recorder: AnswerRecorder
    who: Who
    engine: Engine

    @contextmanager
    def step(self, rows: Sequence[SequenceRows]) -> Iterator[None]:
        recorder = self.recorder
        [part] = rows  # the answer is generated alone, without other sequences
        with recorder.aside():
            first, before = part.sequence.length, self._clock()
        began = recorder.now()
        yield
        ended = recorder.now()
        with recorder.aside():
            after, tokens = self._clock(), tuple(part.tokens)
            cycles = None if before is None or after is None else after - before
            assert not isinstance(part.wanted, tuple), "an answer needs the last rows"
            logit_rows = {"none": 0, "last": 1, "all": len(tokens)}[part.wanted]
            recorder.stepped(StepRecord(self.who, began, ended, first, tokens, logit_rows, cycles))

    def _clock(self) -> NDArray[np.int64] | None:
        """Return the cycles of each kernel call so far, (calls, 2): total and waiting."""
        executable = self.engine.executable
        return executable.clocks() if isinstance(executable, Clocked) else None
