"""A model bound to a backend: its GGUF, tokenizer, plan with weights, and KV cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError, CacheTypes, Executable, Progress
from localllm.base.closing import Closing
from localllm.base.errors import LocalLLMError
from localllm.base.notices import FILE, BeyondTraining, Notice, Setting, Written
from localllm.engine import BlockPool, CacheChoice, ContextFull, Engine, MediaSpan
from localllm.engine.session import Session
from localllm.gguf import GGUFFile
from localllm.gguf.identity import identity
from localllm.loading.facts import ModelFacts
from localllm.loading.loader import BATCH_ROWS, BoundModel, bind
from localllm.loading.media_logits import logits_of
from localllm.loading.recording import Recording
from localllm.loading.splitting import Splitter
from localllm.models import Config, MediaInput, PoolingHead, architecture_of, read_config, record_mtp_heads
from localllm.options import LoadOptions
from localllm.plan import CacheLayer, Plan, Store, Tensor
from localllm.sampling.defaults import file_defaults
from localllm.tokenizer import Tokenizer, has_tokenizer

if TYPE_CHECKING:
    from localllm.generation.speculation.setup import Speculation, SpeculationTarget
    from localllm.loading.multimodal import Multimodal


T = TypeVar("T")
ALIGNED = 256  # tokens; prompt chunks on a GPU are multiples of this


class NoTokenizer(LocalLLMError):
    """The GGUF has no tokenizer, so the model cannot process text."""


class NoWeights(LocalLLMError):
    """The GGUF contains only a vocabulary, so the model cannot be evaluated."""


def refuse_serving(file: GGUFFile) -> None:
    """Raise LocalLLMError, before loading weights, for a model that cannot serve concurrent requests."""
    if architecture_of(file.metadata).diffusion:
        problem = "a diffusion model, which fills in a text and cannot be served"
        raise LocalLLMError(f"{file.path}: {problem}; use `localllm run`")


def token_ids(ids: Any) -> list[int]:
    """Return token ids as a list; raise LocalLLMError for a string or anything but integers."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise LocalLLMError(f"expected token ids, got {ids!r:.60}; use model.tokenize(text) for text")
    found = list(ids)
    wrong = next((each for each in found if not isinstance(each, Integral)), None)
    if wrong is not None:
        raise LocalLLMError(f"{wrong!r:.60} is not a token id; expected whole numbers")
    return [int(each) for each in found]


class LoadedModel(Closing):
    """An open GGUF with weights and KV cache on a backend. It converts text to token ids and computes logits."""

    def __init__(self, file: GGUFFile, nearest_rule: bool = False) -> None:
        """`nearest_rule`: use the most similar known pre-tokenizer if the GGUF's is unknown."""
        self.file = file
        self.drafter: GGUFFile | None = None  # another file, whose prediction heads draft for this model
        self.maybe_tokenizer = (
            Tokenizer.from_metadata(file.metadata, nearest_rule) if has_tokenizer(file.metadata) else None
        )
        self.sampling_defaults = file_defaults(file.metadata)
        self.context = 0
        self.batch_rows = BATCH_ROWS
        self.config: Config | None = None
        self.plan: Plan | None = None
        self.device = ""
        self.placed = ""  # which layers run on which device, if a GPU is used or was requested
        self.cache = CacheChoice(CacheTypes(), "")
        self.speculation: Speculation | None = None
        self.multimodal: Multimodal | None = None  # the encoders of pictures and sound
        self._bound: BoundModel | None = None
        self._facts: ModelFacts | None = None  # set if another process has the weights
        self._closed = False

    def bind(
        self,
        options: LoadOptions,
        progress: Progress | None = None,
        observe: bool = False,
        weights: Mapping[str, Tensor] | None = None,
        embeddings: bool = False,
        sequences: int = 0,
        memory: int = 0,
        split: Splitter | None = None,
        media: MediaInput | None = None,
        most_cache: int = 0,
    ) -> None:
        """Load the weights to a backend and allocate the KV cache. `weights` replaces tensors of the GGUF."""
        self._bound = bound = bind(
            self.file, options, progress, observe, weights, embeddings, sequences, memory, self.drafter, split, media,
            most_cache,
        )  # fmt: skip
        self.config, self.plan, self.context = bound.config, bound.plan, bound.context
        self.device, self.placed, self.cache = bound.device, bound.placed, bound.cache
        self.batch_rows = bound.engine.limits.rows
        if self.multimodal is not None:
            self.multimodal.bind(bound.backend, options.threads, lambda job: self.exclusively(0, job))
            self.multimodal.context = self.context
        asked = options.ctx_size and not options.any_cache  # measurements (`any_cache`) may use any context size
        if asked and self.context > bound.config.context_length > 0:
            trained = (
                f"the model was trained on {bound.config.context_length} tokens; beyond that, answers may be nonsense"
            )
            warnings.warn(Notice(f"{trained} (", Setting("ctx_size", self.context), ")"), BeyondTraining, stacklevel=2)

    def attach(self, facts: ModelFacts) -> None:
        """Take the facts of the same model in another process, which has its weights. This one makes prompts and texts
        for it.
        """
        recording = Recording(facts.context)
        self.plan, self._facts = recording.plan(self.file), facts
        self.config = read_config(self.file.metadata, architecture_of(self.file.metadata).name)
        self.context, self.device, self.placed = facts.context, facts.device, facts.placed

    @property
    def facts(self) -> ModelFacts:
        """The context, memory and devices of the model, in this process or another (`attach`)."""
        if self._facts is not None:
            return self._facts
        memory = self.executable.memory
        return ModelFacts(
            self.context, self.pool.blocks, memory.weights, memory.cache, memory.scratch, 0, self.device, self.placed,
            self.pooling_head is not None, self.multimodal.bytes if self.multimodal is not None else 0,
        )  # fmt: skip

    @property
    def pooling_head(self) -> PoolingHead | None:
        """How hidden states are pooled, if the model predicts tokens and its engine returns them; else None."""
        if self._facts is None:
            return self._bound.head if self._bound is not None else None
        if not self._facts.pools or self.config is None:
            return None
        return PoolingHead.of(self.config, architecture_of(self.file.metadata), self.file.tensors)

    def speculation_target(self) -> SpeculationTarget:
        """Return the parts of this model that speculative decoding uses."""
        from localllm.generation.speculation.setup import SpeculationTarget
        from localllm.generation.speculation.vocabulary import Vocabulary

        return SpeculationTarget(self.engine, Vocabulary(self.file.path, self.vocabulary, self.maybe_tokenizer))

    @property
    def layers(self) -> tuple[Store, ...]:
        """The KV cache layers of the plan."""
        return self.plan.layers if self.plan is not None else ()

    @property
    def prompt_alignment(self) -> int:
        """The number of tokens that a server's prompt chunks are multiples of, so that results on a GPU repeat."""
        return 1 if self._bound is not None and self._bound.exact else ALIGNED

    @property
    def recurrent(self) -> bool:
        """Whether layers keep a recurrent state: a pass of two tokens then costs about 1.5 of one."""
        return any(not isinstance(layer, CacheLayer) for layer in self.layers)

    @cached_property
    def identity(self) -> str:
        """What tells this model from others (`localllm.gguf.identity`)."""
        return identity(self.file)

    @cached_property
    def mtp_heads(self) -> tuple[Plan, ...]:
        """The plans of the multi-token-prediction heads (`localllm.models.next_token`), each by itself."""
        return record_mtp_heads(
            self.file.metadata, architecture_of(self.file.metadata), self.file.tensors, self.context
        )

    @property
    def engine(self) -> Engine:
        """The engine that runs sequences of this model."""
        if self._bound is None:
            raise self._no_weights()
        return self._bound.engine

    def _no_weights(self) -> NoWeights:
        return NoWeights(f"{self.file.path}: has a vocabulary but no weights; it can only tokenize")

    @property
    def executable(self) -> Executable:
        return self.engine.executable

    @property
    def pool(self) -> BlockPool:
        """The pool of cache blocks."""
        return self.engine.pool

    @property
    def vocabulary(self) -> int:
        """Number of logits per position."""
        self._check_predicts()
        assert self.plan is not None
        return self.plan.logits.width

    def _predicting(self) -> Engine:
        """Return the engine; raise LocalLLMError if the model does not predict tokens."""
        self._check_predicts()
        return self.engine

    def _check_predicts(self) -> None:
        """Raise LocalLLMError if the model does not predict tokens."""
        assembled = self._bound
        if assembled is None and self._facts is None:
            raise self._no_weights()
        if assembled is not None and assembled.pooler is not None:
            raise LocalLLMError(f"{self.file.path}: gives embeddings, not tokens; use `localllm embed` or model.embed")
        if self.diffuses:
            problem = (
                f"{self.file.path}: a diffusion model, which fills in a text and cannot continue, score or chat; use "
            )
            raise LocalLLMError(Notice(problem, Written("model.diffuse", "`localllm run`")))
        if self.plan is not None and not self.plan.causal and not self.encodes:
            problem = "its attention is bidirectional, so it cannot continue a text"
            raise LocalLLMError(f"{self.file.path}: {problem}; use `localllm embed`")

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises NoTokenizer if the GGUF lacks a tokenizer."""
        if self.maybe_tokenizer is None:
            raise NoTokenizer(f"{self.file.path}: the file has no tokenizer; give token ids instead of text")
        return self.maybe_tokenizer

    # -- text ------------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return token ids; `add_special` adds BOS/EOS as the GGUF specifies, `parse_special` parses control tokens."""
        if not isinstance(text, str):
            raise LocalLLMError(f"tokenize expects a text, got {text!r:.60}")
        return self.tokenizer.encode(text, add_special, parse_special)

    def prompt_ids(self, text: str, parse_special: bool = False) -> list[int]:
        """Tokenize a prompt; raise ContextFull early for a text that cannot fit in the context."""
        self.check_length(text)
        return self.tokenize(text, parse_special=parse_special)

    @property
    def reads(self) -> tuple[str, ...]:
        """What the model reads besides text: "image", "audio"."""
        return self.multimodal.kinds if self.multimodal is not None else ()

    @property
    def encoders(self) -> Multimodal:
        """The encoders of pictures and sound. Raises LocalLLMError if the model was loaded without them."""
        self._check_open()
        if self.multimodal is None:
            problem = (
                "this model was loaded without encoders of pictures and sound; if it has an mmproj file, give it ("
            )
            raise LocalLLMError(Notice(problem, Setting("mmproj", FILE), ")"))
        return self.multimodal

    def prompt_part(self, text: str, first: bool) -> list[int]:
        """Return the tokens of a part of a plain prompt, whose special tokens count; the first one begins with BOS."""
        return self.tokenizer.encode(text, add_special=first, parse_special=True)

    def media_marks(self, text: str) -> list[int]:
        """Return the tokens of a projector's text around a picture, whose special tokens count."""
        return self.tokenizer.encode(text, add_special=False, parse_special=True)

    def least_tokens(self, *texts: str) -> int:
        """Return a lower bound on the total number of tokens of the texts, without tokenizing."""
        return -(-sum(map(self.tokenizer.length, texts)) // self.tokenizer.longest)

    def check_length(self, text: str) -> None:
        """Raise ContextFull for a text that would exceed the context even in tokens of maximum length."""
        if self.context and self.least_tokens(text) > self.context:
            most, length = self.context * self.tokenizer.longest, self.tokenizer.length(text)
            counts = f"the prompt has {length} characters, the context of {self.context} tokens holds at most {most}"
            raise ContextFull(Notice(counts, "; shorten it or raise ", Setting("ctx_size")))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(token_ids(ids))

    # -- logits ----------------------------------------------------------------------------------------------------

    def closed_error(self) -> LocalLLMError:
        """Return the error to raise once the model is closed."""
        return LocalLLMError(f"{self.file.path}: this model is closed; load it again")

    def _check_open(self) -> None:
        if self._closed:
            raise self.closed_error()

    def session(self) -> Session:
        """Return a new, empty session; raise LocalLLMError if the model is closed."""
        self._check_open()
        return Session(self._predicting())

    def logits(self, prompt: str | Sequence[int | MediaSpan]) -> NDArray[np.float32]:
        """Return the logits after every token of a text or of given token ids, float32 (T, vocabulary).

        A picture or a sound among the ids has one row, after its last token.
        """
        step = min(self.batch_rows, self.executable.limits.logit_rows)
        if isinstance(prompt, list | tuple) and any(isinstance(each, MediaSpan) for each in prompt):
            self._check_open()
            given, size = list(prompt), sum(each.tokens if isinstance(each, MediaSpan) else 1 for each in prompt)
            return self.exclusively(size, lambda: logits_of(self.engine, given, step))
        ids = self.prompt_ids(prompt) if isinstance(prompt, str) else token_ids(prompt)
        if not ids:
            raise LocalLLMError("logits need at least one token id, got none")
        self._check_open()
        if min(ids) < 0:  # ids of pictures, which only spans have
            raise BackendError(f"tokens must be from 0 to {self.vocabulary - 1}, found {min(ids)}")

        def evaluate() -> NDArray[np.float32]:
            session = self.session()
            try:
                parts = [session.evaluate(ids[i : i + step], logits=True).copy() for i in range(0, len(ids), step)]
            finally:
                session.close()
            return np.concatenate(parts)

        return self.exclusively(len(ids), evaluate)

    def exclusively(self, tokens: int, job: Callable[[], T]) -> T:
        """Run a job that needs cache space for a sequence of `tokens` tokens while holding the engine's lock."""
        with self.engine.alone:
            return job()

    @property
    def diffuses(self) -> bool:
        """Whether the model is a diffusion model, for `Model.diffuse`."""
        return bool(self.file.tensors) and architecture_of(self.file.metadata).diffusion and not self.embeds

    @property
    def encodes(self) -> bool:
        """Whether the model is an encoder-decoder model."""
        return self.plan is not None and self.plan.encodes

    def refuse_chat(self) -> None:
        """Raise LocalLLMError for an encoder-decoder model, which does not support chats."""
        if self.encodes:
            problem = "has an encoder, which reads a single text and cannot chat; use "
            instead = Written("model.generate", "`localllm run`")
            raise LocalLLMError(Notice(f"{self.file.path}: {problem}", instead))

    @property
    def embeds(self) -> bool:
        """Whether the model returns embeddings instead of tokens."""
        return self._bound is not None and self._bound.pooler is not None

    def close(self) -> None:
        """Free the weights and the KV cache: now, or when the thread in the engine has finished its step."""
        self._closed = True
        if self._bound is None:
            if self.multimodal is not None:
                self.multimodal.close()
            self._close_files()
        else:
            self._bound.engine.alone.afterwards(self._free)

    def _free(self) -> None:
        assert self._bound is not None
        self._bound.engine.closed = True
        if self.multimodal is not None:
            self.multimodal.close()
        self._bound.close()
        self._close_files()

    def _close_files(self) -> None:
        self.file.close()
        if self.drafter is not None:
            self.drafter.close()
