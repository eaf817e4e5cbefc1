"""A model that generates tokens: its sampler, speculative decoding, and the core that runs its requests."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from localllm.backends.base import Progress
from localllm.base.errors import LocalLLMError
from localllm.base.notices import NotUsed
from localllm.generation.interfaces import Observer, PrefixStore, SchedulerLimits
from localllm.gguf import GGUFFile
from localllm.loading.facts import ModelFacts
from localllm.loading.loaded_model import LoadedModel
from localllm.options import LoadOptions, SamplingOptions, SpeculationOptions
from localllm.sampling.infill import Spellings
from localllm.sampling.repetition import Breakers, DryBreakers
from localllm.sampling.sampler import Sampler

if TYPE_CHECKING:
    from localllm.constrained.constraint import GrammarVocabulary
    from localllm.generation.speculation.drafts import Drafts
    from localllm.generation.speculation.setup import Speculation
    from localllm.generation.stream import Stepper

T = TypeVar("T")
PARALLEL = 16  # maximum running requests of a model; others wait


class Predictor(LoadedModel):
    """An open model with a core, which is created on first use."""

    def __init__(self, file: GGUFFile, nearest_rule: bool = False) -> None:
        """`nearest_rule`: use the most similar known pre-tokenizer if the GGUF's is unknown."""
        super().__init__(file, nearest_rule)
        self.draft: Predictor | None = None  # the draft model; closed with this model
        self._stepper: Stepper | None = None
        self._opening = threading.RLock()

    @property
    def facts(self) -> ModelFacts:
        """The context, memory and devices of the model, in this process or another (`attach`)."""
        found = super().facts
        return found if self.draft is None else replace(found, draft=self.draft.facts.bytes)

    # -- the core --------------------------------------------------------------------------------------------------

    @property
    def stepper(self) -> Stepper:
        """Steps the core that runs this model's requests. Created on first use."""
        with self._opening:
            return self._stepper or self.new_core(SchedulerLimits(parallel=PARALLEL))

    def new_core(
        self, limits: SchedulerLimits, observer: Observer | None = None, store: PrefixStore | None = None
    ) -> Stepper:
        """Replace the core and return its stepper. Running answers of the old core end with an error."""
        from localllm.generation.core import Core
        from localllm.generation.stream import Stepper

        self._check_open()
        with self._opening:
            if self._stepper is not None:
                self._stepper.close(LocalLLMError("the model has begun to answer in another way"))
                self._stepper.settle()
            core = Core(self._predicting(), self.maybe_tokenizer, self.sampler, limits, self.drafts(), observer, store)
            self._stepper = Stepper(core)
            return self._stepper

    def exclusively(self, tokens: int, job: Callable[[], T]) -> T:
        """Run a job between two steps, with space in the KV cache for a sequence of `tokens` tokens."""
        if (stepper := self._stepper) is None:
            return super().exclusively(tokens, job)
        running = stepper.core.running

        def alone() -> T:
            running.make_room(tokens)
            return job()

        return stepper.run(alone)

    def close(self) -> None:
        """Free the weights and the KV cache when no step uses them. Running answers end with an error."""
        self._closed = True
        if self._stepper is not None:
            self._stepper.close(self.closed_error(), self._release)
        else:
            self._release()

    def _release(self) -> None:
        if self.draft is not None:
            self.draft.close()
        super().close()

    # -- drafts ----------------------------------------------------------------------------------------------------

    def speculate(
        self,
        options: LoadOptions,
        load: Callable[..., Predictor],
        progress: Progress | None = None,
        sequences: int = 0,
    ) -> None:
        """Enable speculative decoding: load the draft model if given, and measure forward passes.

        `load` is `localllm.load`. `sequences` is for servers, as in `bind`. The draft model gets the GPU memory that
        the target leaves free. It uses no GPU if the target uses no GPU.
        """
        from localllm.generation.speculation.setup import Speculation

        speculation, draft = options.speculation, None
        if speculation.model_draft and self.drafter is None:
            draft = load(
                speculation.model_draft,
                progress=progress,
                sequences=sequences,
                ctx_size=self.context,
                threads=options.threads,
                backend=options.backend,
                gpu_layers=0 if options.gpu_layers == 0 else "auto",
                device=options.device,
                force=options.force,
                mmproj="off",  # it drafts from the text alone
                any_cache=True,  # no warnings: wrong drafts only cost time
            )
        try:
            self.draft_with(
                Speculation(
                    self.speculation_target(), speculation, draft.speculation_target() if draft is not None else None
                )
            )
        except BaseException:
            if draft is not None:
                draft.close()
            raise
        assert self.speculation is not None
        for note in self.speculation.notes:
            warnings.warn(note, NotUsed, stacklevel=2)
        if self.drafter is not None and not self.engine.draft_heads:
            problem = f"{self.drafter.path}: not used, because only a part of the model is on a graphics card"
            warnings.warn(problem, NotUsed, stacklevel=2)
        if self.speculation.refused and draft is not None:
            draft.close()
            draft = None
        self.draft = draft

    def use_speculation(self, options: SpeculationOptions) -> None:
        """Switch to other speculation options, with the draft model that is already loaded.

        Raise SpeculationError if the draft model cannot draft for this model.
        """
        from localllm.generation.speculation.setup import Speculation

        if options.kind == "off":
            self.draft_with(None)
            return
        drafts = self.draft is not None and bool(options.model_draft)
        speculation = Speculation(
            self.speculation_target(), options, self.draft.speculation_target() if drafts and self.draft else None
        )
        self.draft_with(speculation)
        for note in speculation.notes:
            warnings.warn(note, NotUsed, stacklevel=2)

    def draft_with(self, speculation: Speculation | None) -> None:
        """Switch to `speculation`; None disables speculative decoding."""
        self.speculation = speculation
        if (stepper := self._stepper) is not None:
            stepper.run(lambda: stepper.core.running.use(self.drafts()))

    def drafts(self) -> Drafts | None:
        """Return the drafter for a new core; None without speculation."""
        return self.speculation.drafts() if self.speculation is not None else None

    # -- sampling --------------------------------------------------------------------------------------------------

    def sampler(self, options: SamplingOptions, dry_breakers: Breakers | None = None) -> Sampler:
        """Return a sampler for this vocabulary. `dry_breakers`: DRY sequence breakers, if already known."""
        if dry_breakers is None and options.dry_multiplier and self.dry_breakers is not None:
            dry_breakers = self.dry_breakers.find(options.dry_sequence_breaker)
        tokenizer = self.maybe_tokenizer
        if tokenizer is None:
            return Sampler(options, dry_breakers)
        spellings = Spellings(partial(tokenizer.piece, special=False), tokenizer.eog, tokenizer.end)
        return Sampler(options, dry_breakers, tokenizer.suppressed, spellings)

    @cached_property
    def dry_breakers(self) -> DryBreakers | None:
        """Finds DRY sequence breakers in the vocabulary; None without a tokenizer."""
        tokenizer = self.maybe_tokenizer
        if tokenizer is None:
            return None
        return DryBreakers(
            lambda: [tokenizer.piece(token) for token in range(tokenizer.vocab_size)],
            lambda text: tokenizer.encode(text, add_special=False),
        )

    @cached_property
    def grammars(self) -> GrammarVocabulary:
        """The vocabulary in llguidance's form, created for the first constrained answer."""
        from localllm.constrained.constraint import GrammarVocabulary

        return GrammarVocabulary(self.tokenizer, self.vocabulary)
