"""A model opened for use: the file, its tokenizer, its plan on a backend, its cache. `load` makes one."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends import open_backend
from localllm.backends.base import CacheTypes, Card, Executable, Limits, Progress
from localllm.backends.hybrid.offload import AUTOMATIC, Offload, Planner, arrange
from localllm.cache import SLACK, BlockPool, Choice, choose
from localllm.closing import Closing
from localllm.engine import ContextFull, Engine
from localllm.errors import LocalLLMError
from localllm.generation.statistics import Piece
from localllm.gguf import GGUFFile, open_gguf
from localllm.models import Config, architecture_of, read_config, record
from localllm.plan import BLOCK, CacheLayer, Experts, Plan, Tensor, Value
from localllm.sampling.defaults import file_defaults
from localllm.sampling.options import SamplerOptions
from localllm.sampling.repetition import find_breakers
from localllm.sampling.sampler import Sampler
from localllm.session import Session
from localllm.speculation.options import MOST_DRAFTED, SpeculationOptions
from localllm.tokenizer import Tokenizer, has_tokenizer

if TYPE_CHECKING:
    from localllm.confined import Confined
    from localllm.speculation.setup import Reader, Speculation
    from localllm.template import ChatTemplate

BATCH_ROWS = 512  # rows of one forward pass; longer prompts go in pieces
DEFAULT_CONTEXT = 4096  # tokens, where the model was trained on at least as many and nothing else is asked for
WINDOW_PAST = 1024  # tokens that layers with a window keep beyond it: how far an answer can be taken back
LOGIT_BYTES = 64 << 20  # logits of one batch at most

BOX = {"demo": "demo.gguf", "draft": "draft.gguf"}  # models that come with the program


class NoTokenizer(LocalLLMError):
    """Text was given to a model whose file has no tokenizer."""


class NoWeights(LocalLLMError):
    """A computation was asked of a file that holds a vocabulary only."""


def resolve(name: str | os.PathLike[str]) -> Path:
    """The file a MODEL argument means: a path, or the name of a model in the box."""
    path = Path(name)
    if path.exists() or str(name) not in BOX:
        return path
    from localllm import models

    return Path(models.__file__).parent / "demo" / BOX[str(name)]


class Model(Closing):
    """An open model: `load` makes one, `with` closes it.

    `chat` answers messages, `generate` continues a text, `tokenize` and `detokenize` turn text into token ids and back,
    `logits` gives the numbers behind an answer.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.tokenizer = Tokenizer.from_metadata(file.metadata) if has_tokenizer(file.metadata) else None
        self.sampling_defaults = file_defaults(file.metadata)
        self.context = 0
        self.batch_rows = BATCH_ROWS
        self.pool = BlockPool(0, BLOCK)
        self.config: Config | None = None
        self.plan: Plan | None = None
        self.device = ""
        self.placed = ""  # what runs where, where a card takes part or was asked for
        self.cache = Choice(CacheTypes(), "")
        self.speculation: Speculation | None = None
        self.draft: Model | None = None  # drafts tokens; closed with this model
        self._executable: Executable | None = None
        self._engine: Engine | None = None
        self._confined: Confined | None = None
        self._close = file.close

    def bind(
        self,
        backend: str,
        threads: int | None,
        ctx: int | None,
        cache: CacheTypes,
        progress: Progress | None,
        observe: bool = False,
        weights: Mapping[str, Tensor] | None = None,
        force: bool = False,
        offload: Offload = AUTOMATIC,
    ) -> None:
        """Put the weights on a backend and allocate the cache. `weights` stand in for the tensors of the file."""
        architecture = architecture_of(self.file.metadata)
        self.config = config = read_config(self.file.metadata, architecture.name)
        self.context = context_of(ctx, config)
        self.plan = plan = record(config, architecture, weights or self.file.tensors, self.context)
        held = sum(tensor.nbytes for tensor in self.file.tensors.values())
        offload.check(backend)

        def limits_at(context: int) -> Limits:
            return limits_of(context, plan.logits.width, plan.window)

        limits = limits_at(self.context)
        self.cache = choose(cache, plan, limits, held, force)

        def planner(card: Card, name: str) -> Planner:
            return Planner(card, name, plan, limits_at, self.context, self.cache.types)

        arranged = arrange(open_backend(backend, threads, offload.device), offload, planner, threads)
        opened = arranged.backend
        try:
            self._executable = opened.bind(plan, limits, self.cache.types, progress, observed(plan) if observe else ())
        except BaseException:
            opened.close()
            raise
        self.placed = arranged.line(self._executable)
        windowed = BlockPool(limits.window_blocks, BLOCK, plan.window) if limits.window_blocks else None
        self.pool = BlockPool(limits.blocks, BLOCK, windowed=windowed)
        self._engine = Engine(self._executable, self.pool, replace(limits, positions=self.context))
        self.device = opened.describe()
        self._close = lambda: (self.executable.close(), opened.close(), self.file.close())  # type: ignore[assignment, func-returns-value]

    def speculate(
        self,
        options: SpeculationOptions,
        backend: str,
        threads: int | None,
        progress: Progress | None,
        offload: Offload = AUTOMATIC,
    ) -> None:
        """Let sessions made from now on guess ahead: load the draft model if there is to be one, and time passes.

        Of a draft model as many layers go to the card as still fit, or none where none of this one are to.
        """
        from localllm.speculation.setup import Speculation

        draft = None
        if options.draft:
            layers, device = 0 if offload.layers == 0 else "auto", offload.device
            draft = load(options.draft, backend, threads, self.context, progress=progress, layers=layers, device=device)
        try:
            self.speculation = Speculation(self.reader(), options, draft.reader() if draft is not None else None)
        except BaseException:
            if draft is not None:
                draft.close()
            raise
        self.draft = draft

    def reader(self) -> Reader:
        """This model as speculation sees it."""
        from localllm.speculation.setup import Reader
        from localllm.speculation.vocabulary import Vocabulary

        return Reader(self.engine, Vocabulary(self.file.path, self.vocabulary, self.tokenizer))

    @property
    def layers(self) -> tuple[CacheLayer, ...]:
        """What the attention layers keep."""
        return self.plan.layers if self.plan is not None else ()

    @property
    def executable(self) -> Executable:
        if self._executable is None:
            raise NoWeights(f"{self.file.path}: holds a vocabulary but no weights; it can only tokenize")
        return self._executable

    @property
    def engine(self) -> Engine:
        """Runs many sequences of this model."""
        _ = self.executable
        assert self._engine is not None
        return self._engine

    @property
    def vocabulary(self) -> int:
        """Logits of a row."""
        _ = self.executable
        assert self.plan is not None
        return self.plan.logits.width

    def _words(self) -> Tokenizer:
        if self.tokenizer is None:
            raise NoTokenizer(f"{self.file.path}: the file has no tokenizer; give token ids instead of text")
        return self.tokenizer

    # -- text ------------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text; `add_special` adds BOS/EOS as the file asks, `parse_special` reads control tokens."""
        return self._words().encode(text, add_special, parse_special)

    def prompt_ids(self, text: str, parse_special: bool = False) -> list[int]:
        """`tokenize` for a prompt. ContextFull, without the work, for a text that no context of this size can hold."""
        self.check_length(text)
        return self.tokenize(text, parse_special=parse_special)

    def check_length(self, text: str) -> None:
        """ContextFull for a text of more characters than the context has room for, whatever its tokens are."""
        most = self.context * self._words().longest
        if self.context and len(text) > most:
            raise ContextFull(
                f"the prompt has {len(text)} characters, the context of {self.context} tokens holds at most {most}; "
                "shorten it or raise -c"
            )

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self._words().decode(ids)

    # -- numbers ---------------------------------------------------------------------------------------------------

    def session(self) -> Session:
        """A new, empty conversation."""
        speculator = self.speculation.speculator() if self.speculation is not None else None
        return Session(self.engine, self.tokenizer, speculator)

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """float32 (T, vocabulary): the logits after every token of one fresh pass."""
        session = self.session()
        step = min(self.batch_rows, self.executable.limits.logit_rows)
        try:
            parts = [session.evaluate(ids[i : i + step], logits=True).copy() for i in range(0, len(ids), step)]
        finally:
            session.close()
        if not parts:
            raise LocalLLMError("logits of no tokens were asked for; give at least one id")
        return np.concatenate(parts)

    def sampler(self, options: SamplerOptions) -> Sampler:
        """A sampler for this vocabulary."""
        breakers = None
        if options.dry_multiplier and self.tokenizer is not None:
            words = self.tokenizer
            pieces = (words.piece(token) for token in range(words.vocab_size))
            breakers = find_breakers(
                options.dry_sequence_breakers, pieces, lambda text: words.encode(text, add_special=False)
            )
        return Sampler(options, breakers)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = -1,
        stop: str | Sequence[str] = (),
        sampling: SamplerOptions | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Piece]:
        """Stream the continuation of a text or of token ids.

            for piece in model.generate("Once upon a time", max_tokens=100, stop="The end"):
                print(piece.text, end="", flush=True)

        Yields pieces with `.text` and `.token`, then one with `.statistics`. `stop` is a text that ends the answer, or
        several. Options left out are as the file recommends, or else the program's defaults. `sampling` replaces
        temperature, top_k, top_p, min_p and seed with a full set. Setting `cancel` from another thread ends the
        answer. LocalLLMError for wrong values, ContextFull for a prompt that does not fit.
        """
        if not isinstance(prompt, str) and not all(isinstance(token, Integral) for token in prompt):
            raise LocalLLMError("generate continues a text or token ids; to answer messages, use model.chat(messages)")
        asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
        sampler = self._sampler(sampling, asked)
        limit, stops = _most(max_tokens), _stops(stop)
        ids = self.prompt_ids(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        return self._stream(ids, sampler, limit, stops, cancel)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = -1,
        stop: str | Sequence[str] = (),
        sampling: SamplerOptions | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Piece]:
        """Stream the answer to a conversation, written as the file's chat template wants it.

            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
            answer = "".join(piece.text for piece in model.chat(messages, max_tokens=100))

        A plain text is one message of the user. `tools` are functions as JSON schemas, `template_options` further
        variables of the template, such as {"enable_thinking": False}. The rest is as for `generate`. Control tokens
        written in messages and tools are text. What has to be changed for the template comes as a warning.
        """
        from localllm.template import ChatEncoder

        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            example = '[{"role": "user", "content": "Hello!"}]'
            raise LocalLLMError(f"chat answers messages such as {example}; to continue a text, use generate")
        asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
        sampler = self._sampler(sampling, asked)
        template, note = self.template
        for message in messages:
            self.check_length(str(message.get("content") or ""))
        rendered = template.render(messages, tools=tools, extra=template_options)
        for told in (*([note] if note else []), *rendered.notes):
            warnings.warn(told, stacklevel=2)
        self.check_length(rendered.text)
        ids = ChatEncoder(self._words(), template.source).encode(rendered.text)
        return self._stream(ids, sampler, _most(max_tokens), (*_stops(stop), *template.stops), cancel)

    @cached_property
    def template(self) -> tuple[ChatTemplate, str | None]:
        """The chat template, and a note where it is not the file's own. It is rendered in a child process."""
        from localllm.template import choose_template, renderer

        words = self._words()
        self._confined = renderer()
        return choose_template(self.file.metadata, words, self._confined)

    def _sampler(self, sampling: SamplerOptions | None, asked: Mapping[str, Any]) -> Sampler:
        given = {name: value for name, value in asked.items() if value is not None}
        return self.sampler(sampling or self.sampling_defaults.options(given))

    def _stream(
        self,
        ids: Sequence[int],
        sampler: Sampler,
        max_tokens: int | None,
        stop: tuple[str, ...],
        cancel: threading.Event | None,
    ) -> Iterator[Piece]:
        session = self.session()
        try:
            yield from session.generate(ids, sampler, max_tokens, stop, cancel)
        finally:
            session.close()

    def close(self) -> None:
        """Free the weights and the cache, and end the child process of the chat template."""
        if self._confined is not None:
            self._confined.close()
        if self.draft is not None:
            self.draft.close()
        self._close()


def _most(max_tokens: int | None) -> int | None:
    if max_tokens is None:
        return None
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, Integral) or max_tokens < 0:
        raise LocalLLMError(f"max_tokens is {max_tokens!r}: it must be a whole number from 0 up, or None for no limit")
    return int(max_tokens)


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise LocalLLMError(f"stop is {stop!r}: it must be a text, or several, none of them empty")
    return stops


def load(
    path: str | os.PathLike[str],
    backend: str = "auto",
    threads: int | None = None,
    ctx: int | None = None,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    progress: Progress | None = None,
    observe: bool = False,
    draft: str | os.PathLike[str] = "",
    speculate: str | None = None,
    draft_max: int = MOST_DRAFTED,
    force: bool = False,
    layers: int | str = "auto",
    host_experts: int = 0,
    device: str = "",
) -> Model:
    """Open a GGUF file (or "demo", the model in the box) for use.

    `threads` defaults to the processors this process may use, `ctx` to the trained context but at most 4096 tokens.
    `progress(what, done, total)` hears of kernels compiled and weights read. A file without tensors loads for
    tokenizing only. With `observe` the inputs of every matrix can be read after a step (`localllm.calibration`).
    `draft` is a second model that guesses up to `draft_max` tokens ahead; `speculate` says who may guess: "off",
    "ngram" (the text so far), "draft", or "auto", whichever pays; None: auto with a draft model, else off. Guesses
    change the speed, not the distribution of the answers. `cache_type_k` and `cache_type_v` are formats of the keys
    and values in the cache: f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, fp8, or auto; what is known to harm the model is
    refused without `force`. On a backend of graphics cards `layers` of the model (the last ones, the output counting as
    one; "all", or "auto": as many as fit) go to the card, but for the experts of the first `host_experts`; `device` is
    its number or part of its name, and `Model.placed` says what runs where. Raises GGUFError, TokenizerError,
    ModelError, BackendError or SpeculationError, each with one line that says what is wrong.
    """
    options = SpeculationOptions.of(speculate, os.fspath(draft), draft_max)
    offload = Offload(layers, host_experts, device)
    file, model = open_gguf(resolve(path)), None
    try:
        model = Model(file)
        if file.tensors:
            types = CacheTypes(cache_type_k, cache_type_v)
            model.bind(backend, threads, ctx, types, progress, observe, force=force, offload=offload)
            if options.kind != "off":
                model.speculate(options, backend, threads, progress, offload)
    except BaseException:
        model.close() if model is not None else file.close()
        raise
    return model


def observed(plan: Plan) -> list[Value]:
    """What goes into matrices, and what comes out of experts, whose routing then can be read too."""
    found = {value.index: value for op in plan.operations for value, _ in op.products}
    found |= {op.out.index: op.out for op in plan.operations if isinstance(op, Experts)}
    return list(found.values())


def limits_of(context: int, vocabulary: int, window: int) -> Limits:
    """What a model is bound for, whose layers see everything or up to `window` tokens."""
    blocks = -(-context // BLOCK) + 1  # one more than the context, so that a full one can be forked
    logit_rows = max(16, min(BATCH_ROWS, LOGIT_BYTES // (4 * vocabulary)))
    own = -(-(window + SLACK + BATCH_ROWS + WINDOW_PAST) // BLOCK) + 2 if window else blocks
    return Limits(BATCH_ROWS, logit_rows, blocks, blocks * BLOCK, own if own < blocks else 0)


def context_of(asked: int | None, config: Config) -> int:
    """Tokens of context: as asked for, or as trained but at most DEFAULT_CONTEXT."""
    if asked is None or asked == 0:
        return min(config.context_length, DEFAULT_CONTEXT)
    if asked < 1:
        raise LocalLLMError(f"the context is {asked} tokens; give at least 1, or leave it out")
    return asked
