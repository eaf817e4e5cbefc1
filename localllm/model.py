"""An open model: the file, its tokenizer, its plan on a backend, and its cache. `load` opens one."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import CacheTypes, Executable, Progress
from localllm.box import resolve
from localllm.cache import BlockPool, CacheChoice
from localllm.closing import Closing
from localllm.embedding import Embedder, normalized, pair
from localllm.engine import ContextFull, Engine
from localllm.errors import LocalLLMError
from localllm.generation.statistics import Piece
from localllm.gguf import GGUFFile, open_gguf
from localllm.held import end_of, held, held_text, without_thought
from localllm.models import Config, architecture_of, record_heads
from localllm.notice import BeyondTraining, Notice, NotUsed, Setting
from localllm.opening import BATCH_ROWS, Bound, bind
from localllm.options import AnswerOptions, LoadOptions, SamplingOptions, SpeculationOptions
from localllm.options.declare import divided
from localllm.options.keywords import CHAT_ONLY, ChatKeywords, GenerateKeywords, LoadKeywords
from localllm.options.signature import takes
from localllm.plan import Plan, Store, Tensor
from localllm.sampling.defaults import file_defaults
from localllm.sampling.repetition import find_breakers
from localllm.sampling.sampler import Sampler
from localllm.session import Session
from localllm.tokenizer import Tokenizer, has_tokenizer

if TYPE_CHECKING:
    from localllm.answer.constraint import GrammarVocabulary
    from localllm.confined import Confined
    from localllm.scheduler.request import Constraint
    from localllm.speculation.setup import Reader, Speculation
    from localllm.template import ChatTemplate, Family


class NoTokenizer(LocalLLMError):
    """The file has no tokenizer, so the model cannot take text."""


class NoWeights(LocalLLMError):
    """The file holds only a vocabulary, so the model cannot compute."""


class Model(Closing):
    """An open model: `load` opens it, `with` closes it.

    `chat` answers messages, `generate` continues a text, `tokenize` and `detokenize` convert between text and token
    ids, `logits` returns the logits of every token. A model loaded with `embeddings` has `embed`, `token_embeddings`
    and `rank`.
    """

    def __init__(self, file: GGUFFile, force: bool = False) -> None:
        """`force`: if the file's tokenizer rule is unknown, take the nearest."""
        self.file = file
        self.tokenizer = Tokenizer.from_metadata(file.metadata, force) if has_tokenizer(file.metadata) else None
        self.sampling_defaults = file_defaults(file.metadata)
        self.context = 0
        self.batch_rows = BATCH_ROWS
        self.config: Config | None = None
        self.plan: Plan | None = None
        self.device = ""
        self.placed = ""  # what runs where, if a GPU is used or was requested
        self.cache = CacheChoice(CacheTypes(), "")
        self.speculation: Speculation | None = None
        self.draft: Model | None = None  # drafts tokens; closed with this model
        self._bound: Bound | None = None
        self._confined: Confined | None = None
        self._given: Family | None = None  # the format that replaces the file's chat template

    def bind(
        self,
        options: LoadOptions,
        progress: Progress | None = None,
        observe: bool = False,
        weights: Mapping[str, Tensor] | None = None,
        embeddings: bool = False,
        sequences: int = 0,
    ) -> None:
        """Load the weights to a backend and allocate the cache. `weights` replace the tensors of the file."""
        self._bound = bound = bind(self.file, options, progress, observe, weights, embeddings, sequences)
        self.config, self.plan, self.context = bound.config, bound.plan, bound.context
        self.device, self.placed, self.cache = bound.device, bound.placed, bound.cache
        self.batch_rows = bound.engine.limits.rows
        asked = options.ctx_size and not options.any_cache  # measurements go where they like
        if asked and self.context > bound.config.context_length > 0:
            trained = f"the model was trained on {bound.config.context_length} tokens; answers may make no sense beyond"
            warnings.warn(Notice(f"{trained} (", Setting("ctx_size", self.context), ")"), BeyondTraining, stacklevel=2)

    def speculate(self, options: LoadOptions, progress: Progress | None = None) -> None:
        """Enable drafting for new sessions: load the draft model if there is one, and time passes.

        As many draft layers go to the GPU as still fit; none if the target has none there.
        """
        from localllm.speculation.setup import Speculation

        speculation, draft = options.speculation, None
        if speculation.model_draft:
            draft = load(
                speculation.model_draft,
                progress=progress,
                ctx_size=self.context,
                threads=options.threads,
                backend=options.backend,
                gpu_layers=0 if options.gpu_layers == 0 else "auto",
                device=options.device,
                force=options.force,
                any_cache=True,  # no warnings: what a draft gets wrong costs only time
            )
        try:
            self.speculation = Speculation(self.reader(), speculation, draft.reader() if draft is not None else None)
        except BaseException:
            if draft is not None:
                draft.close()
            raise
        if self.speculation.unused:
            warnings.warn(self.speculation.unused, NotUsed, stacklevel=2)
        if self.speculation.refused and draft is not None:
            draft.close()
            draft = None
        self.draft = draft

    def use_speculation(self, options: SpeculationOptions) -> None:
        """Draft for new sessions by other options, with the draft model that is loaded. SpeculationError if it cannot.

        OptionError if they need one and none is loaded.
        """
        from localllm.speculation.setup import Speculation

        if options.kind == "off":
            self.speculation = None
            return
        drafts = self.draft is not None and bool(options.model_draft)
        self.speculation = Speculation(self.reader(), options, self.draft.reader() if drafts and self.draft else None)
        if self.speculation.unused:
            warnings.warn(self.speculation.unused, NotUsed, stacklevel=2)

    def reader(self) -> Reader:
        """Return this model in the form that speculation needs."""
        from localllm.speculation.setup import Reader
        from localllm.speculation.vocabulary import Vocabulary

        return Reader(self.engine, Vocabulary(self.file.path, self.vocabulary, self.tokenizer))

    @property
    def layers(self) -> tuple[Store, ...]:
        """The cache layers of the plan."""
        return self.plan.layers if self.plan is not None else ()

    @cached_property
    def heads(self) -> tuple[Plan, ...]:
        """The plans of the file's next-token heads (`localllm.models.next_token`), which answers do not use yet."""
        return record_heads(self.file.metadata, architecture_of(self.file.metadata), self.file.tensors, self.context)

    @property
    def engine(self) -> Engine:
        """The engine that runs sequences of this model."""
        if self._bound is None:
            raise NoWeights(f"{self.file.path}: holds a vocabulary but no weights; it can only tokenize")
        return self._bound.engine

    @property
    def executable(self) -> Executable:
        return self.engine.executable

    @property
    def pool(self) -> BlockPool:
        """The pool of cache blocks."""
        return self.engine.pool

    @property
    def vocabulary(self) -> int:
        """Number of logits in a row."""
        self._predicting()
        assert self.plan is not None
        return self.plan.logits.width

    def _predicting(self) -> Engine:
        """The engine; LocalLLMError if the model does not predict tokens."""
        engine, assembled = self.engine, self._bound
        if assembled is not None and assembled.pooler is not None:
            raise LocalLLMError(f"{self.file.path}: gives embeddings, not tokens; use `localllm embed` or model.embed")
        if self.plan is not None and not self.plan.causal:
            problem = "its tokens see later ones, so it cannot continue a text"
            raise LocalLLMError(f"{self.file.path}: {problem}; use `localllm embed`")
        return engine

    @property
    def words(self) -> Tokenizer:
        """The tokenizer; NoTokenizer if the file has none."""
        if self.tokenizer is None:
            raise NoTokenizer(f"{self.file.path}: the file has no tokenizer; give token ids instead of text")
        return self.tokenizer

    # -- text ------------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return token ids; `add_special` adds BOS/EOS if the file says so, `parse_special` reads control tokens."""
        return self.words.encode(text, add_special, parse_special)

    def prompt_ids(self, text: str, parse_special: bool = False) -> list[int]:
        """Tokenize a prompt. ContextFull, before any work, for a text that no context of this size can hold."""
        self.check_length(text)
        return self.tokenize(text, parse_special=parse_special)

    def check_length(self, text: str) -> None:
        """Raise ContextFull for a text with more characters than the context can hold in the longest tokens."""
        most = self.context * self.words.longest
        if self.context and len(text) > most:
            counts = f"the prompt has {len(text)} characters, the context of {self.context} tokens holds at most {most}"
            raise ContextFull(Notice(counts, "; shorten it or raise ", Setting("ctx_size")))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self.words.decode(ids)

    # -- numbers ---------------------------------------------------------------------------------------------------

    def session(self) -> Session:
        """Return a new, empty session."""
        speculator = self.speculation.speculator() if self.speculation is not None else None
        return Session(self._predicting(), self.tokenizer, speculator)

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after every token of one fresh pass, float32 (T, vocabulary)."""
        session = self.session()
        step = min(self.batch_rows, self.executable.limits.logit_rows)
        try:
            parts = [session.evaluate(ids[i : i + step], logits=True).copy() for i in range(0, len(ids), step)]
        finally:
            session.close()
        if not parts:
            raise LocalLLMError("logits need at least one token id, got none")
        return np.concatenate(parts)

    @property
    def embeds(self) -> bool:
        """Whether the model gives embeddings instead of tokens."""
        return self._bound is not None and self._bound.pooler is not None

    # -- embeddings ------------------------------------------------------------------------------------------------

    @property
    def embedder(self) -> Embedder:
        """What embeds token ids; LocalLLMError if the model was loaded to predict tokens."""
        engine, bound = self.engine, self._bound
        if bound is None or bound.pooler is None:
            raise LocalLLMError("this model was loaded to predict tokens; use localllm.load(path, embeddings=True)")
        return Embedder(engine, bound.config, bound.pooler)

    def embed(
        self, texts: str | Sequence[str], *, pooling: str = "auto", normalize: bool = True
    ) -> NDArray[np.float32]:
        """Return the embedding of every text, float32 (texts, width); of a single text (width,).

        `pooling` is "mean", "cls" (the first token), "last", "rank" (the scores of a classifier), or "auto": as the
        file says. Vectors have length 1 unless `normalize` is false; scores stay as they are.
        """
        many, embedder = [texts] if isinstance(texts, str) else list(texts), self.embedder
        way = embedder.pooling(pooling)
        if way == "none":
            raise LocalLLMError('pooling "none" gives a vector for every token; use token_embeddings')
        if not many:
            raise LocalLLMError("embed needs at least one text, got none")
        vectors = list(embedder.vectors([self.prompt_ids(text) for text in many], way))
        found = np.stack(vectors) if way == "rank" or not normalize else normalized(vectors)
        return found[0] if isinstance(texts, str) else found

    def token_embeddings(self, text: str) -> NDArray[np.float32]:
        """Return the embedding of every token of a text, float32 (tokens, width), not normalized."""
        [rows] = self.embedder.vectors([self.prompt_ids(text)], "none")
        return rows

    def rank(self, query: str, documents: Sequence[str]) -> NDArray[np.float32]:
        """Return how well each document answers the query, float32 (documents,): the score of a reranker."""
        embedder, words = self.embedder, self.words
        way = embedder.pooling("rank")
        if not documents:
            raise LocalLLMError("rank needs at least one document, got none")
        for text in (query, *documents):
            self.check_length(text)
        pairs = [pair(words, self.file.metadata, query, document) for document in documents]
        return np.array([scores[0] for scores in embedder.vectors(pairs, way)], np.float32)

    # -- answers ---------------------------------------------------------------------------------------------------

    def sampler(self, options: SamplingOptions) -> Sampler:
        """Return a sampler for this vocabulary."""
        breakers = None
        if options.dry_multiplier and self.tokenizer is not None:
            words = self.tokenizer
            pieces = (words.piece(token) for token in range(words.vocab_size))
            breakers = find_breakers(
                tuple(options.dry_sequence_breaker), pieces, lambda text: words.encode(text, add_special=False)
            )
        return Sampler(options, breakers)

    @takes(AnswerOptions, SamplingOptions, without=CHAT_ONLY)
    def generate(
        self,
        prompt: str | Sequence[int],
        options: AnswerOptions | None = None,
        sampling: SamplingOptions | None = None,
        *,
        cancel: threading.Event | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Iterator[Piece]:
        """Stream the continuation of a text or of token ids.

            for piece in model.generate("Once upon a time", max_tokens=100, stop="The end"):
                print(piece.text, end="", flush=True)

        Yields pieces with `.text` and `.token`, then one with `.statistics`. Omitted sampling options take the values
        that the file recommends, or else the program's defaults; a full set given as `sampling` replaces both. Keywords
        change `options` and `sampling`. Setting `cancel` from another thread ends the answer. LocalLLMError for wrong
        values, ContextFull for a prompt that does not fit.
        """
        if not isinstance(prompt, str) and not all(isinstance(token, Integral) for token in prompt):
            raise LocalLLMError("generate continues a text or token ids; to answer messages, use model.chat(messages)")
        asked, given = divided(keywords, AnswerOptions, SamplingOptions, without=CHAT_ONLY)
        answer, sampler = AnswerOptions.given(options, asked), self._sampler(sampling, given)
        if answer.system_prompt:
            raise LocalLLMError("generate takes no system_prompt; put the text into the prompt, or use model.chat")
        ids = self.prompt_ids(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        return self._stream(ids, sampler, answer, answer.stops, cancel, held_text(self, answer.structure))

    @takes(AnswerOptions, SamplingOptions)
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        options: AnswerOptions | None = None,
        sampling: SamplingOptions | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cancel: threading.Event | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> Iterator[Piece]:
        """Stream the answer to a conversation, rendered with the file's chat template.

            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
            answer = "".join(piece.text for piece in model.chat(messages, max_tokens=100))

        A plain text is one user message. `tools` are functions as JSON schemas. Everything else is as in `generate`. A
        warning reports each change that the template required.
        """
        from localllm.template import ChatEncoder

        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            example = '[{"role": "user", "content": "Hello!"}]'
            raise LocalLLMError(f"chat answers messages such as {example}; to continue a text, use generate")
        asked, given = divided(keywords, AnswerOptions, SamplingOptions)
        answer, sampler = AnswerOptions.given(options, asked), self._sampler(sampling, given)
        if answer.system_prompt:
            messages = [{"role": "system", "content": answer.system_prompt}, *messages]
        template, note = self.template
        for message in messages:
            self.check_length(str(message.get("content") or ""))
        rendered = template.render(messages, tools=tools, extra=answer.template_variables)
        for told in (*([note] if note else []), *rendered.notes):
            warnings.warn(told, stacklevel=2)
        self.check_length(rendered.text)
        encoder = ChatEncoder(self.words, template.source, answer.parse_special_in_content)
        ids, stops, tail = encoder.encode(rendered.text), (*answer.stops, *template.stops), end_of(rendered.text)
        asked_of = answer.asked
        pieces = self._stream(ids, sampler, answer, stops, cancel, held(self, asked_of, template, tail))
        return pieces if asked_of.structure is None else without_thought(pieces, self, template, tail, stops)

    @cached_property
    def template(self) -> tuple[ChatTemplate, str | None]:
        """The chat template, and a note if it is not from the file. It is rendered in a child process."""
        from localllm.template import choose_template, renderer

        words = self.words
        self._confined = renderer()
        return choose_template(self.file.metadata, words, self._confined, self._given)

    def use_template(self, given: Family) -> None:
        """Render conversations with this format, not the file's. TemplateError if it is broken.

        Call it before `template` is first used.
        """
        assert "template" not in self.__dict__, "the file's template is in use"
        self._given = given
        assert self.template[0].source == given.source

    @property
    def template_source(self) -> str:
        """The chat template that was given, or the file's; "" if there is none."""
        source = self._given.source if self._given is not None else self.file.metadata.get("tokenizer.chat_template")
        return source if isinstance(source, str) else ""

    @cached_property
    def grammars(self) -> GrammarVocabulary:
        """The vocabulary as grammars see it, made when the first answer is held to one."""
        from localllm.answer.constraint import GrammarVocabulary

        return GrammarVocabulary(self.words, self.vocabulary)

    def _sampler(self, sampling: SamplingOptions | None, given: Mapping[str, Any]) -> Sampler:
        if sampling is not None:
            return self.sampler(SamplingOptions.given(sampling, given))
        return self.sampler(self.sampling_defaults.options(given))

    def _stream(
        self,
        ids: Sequence[int],
        sampler: Sampler,
        answer: AnswerOptions,
        stops: tuple[str, ...],
        cancel: threading.Event | None,
        held_to: Callable[[], Constraint] | None,
    ) -> Iterator[Piece]:
        constraint, session = held_to() if held_to is not None else None, self.session()
        try:
            yield from session.generate(
                ids, sampler, answer.max_tokens, stops, cancel, answer.ignore_eos, constraint=constraint
            )
        finally:
            session.close()

    def close(self) -> None:
        """Free the weights and the cache, and end the child process of the chat template."""
        if self._confined is not None:
            self._confined.close()
        if self.draft is not None:
            self.draft.close()
        if self._bound is not None:
            self._bound.close()
        self.file.close()


@takes(LoadOptions)
def load(
    path: str | os.PathLike[str],
    options: LoadOptions | None = None,
    *,
    progress: Progress | None = None,
    observe: bool = False,
    embeddings: bool = False,
    sequences: int = 0,
    **keywords: Unpack[LoadKeywords],
) -> Model:
    """Open a GGUF file for use: a path, the name of a model on this computer, or "demo", the bundled model.

        with localllm.load("model.gguf", ctx_size=8192, gpu_layers=20) as model:
            ...

    Keywords change `options`. `progress(what, done, total)` reports kernels compiled and weights read. A file without
    tensors loads for tokenizing only. With `observe` the inputs of every matrix can be read after a step
    (`localllm.calibration`). With `embeddings` the model embeds texts (`Model.embed`) instead of predicting tokens; an
    encoder always does. `sequences` prepares for a server: that many requests share the cache (`localllm.scheduler`).
    A draft model changes the speed, not the distribution of the answers. With a GPU, `Model.placed` says what runs
    where. Raises OptionError, GGUFError, TokenizerError, ModelError, BackendError or SpeculationError, each with one
    line that says what is wrong.
    """
    chosen = LoadOptions.given(options, keywords)
    file, model = open_gguf(resolve(path)), None
    try:
        model = Model(file, chosen.force)
        if file.tensors:
            model.bind(chosen, progress, observe, embeddings=embeddings, sequences=sequences)
            if chosen.speculation.kind != "off":
                model.speculate(chosen, progress)
    except BaseException:
        model.close() if model is not None else file.close()
        raise
    return model
