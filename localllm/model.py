"""An open model: what embeds texts and answers, on top of `LoadedModel`. `load` opens one."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Progress
from localllm.box import resolve
from localllm.embedding import Embedder, normalized, pair
from localllm.errors import LocalLLMError
from localllm.generation.statistics import Piece
from localllm.gguf import GGUFFile, open_gguf
from localllm.held import end_of, held, held_text, without_thought
from localllm.loaded import LoadedModel, refuse_serving
from localllm.models import ModelError, architecture_of
from localllm.notice import FILE, Notice, NotUsed, Setting
from localllm.options import AnswerOptions, DiffusionOptions, LoadOptions, SamplingOptions, SpeculationOptions
from localllm.options.declare import divided
from localllm.options.keywords import CHAT_ONLY, ChatKeywords, GenerateKeywords, LoadKeywords
from localllm.options.signature import takes
from localllm.sampling.infill import Spellings
from localllm.sampling.repetition import Breakers, BreakerTokens
from localllm.sampling.sampler import Sampler
from localllm.speculation.errors import NoDrafts

if TYPE_CHECKING:
    from localllm.answer.constraint import GrammarVocabulary
    from localllm.confined import Confined
    from localllm.diffusion.canvas import Canvas
    from localllm.scheduler.request import Constraint
    from localllm.template import ChatTemplate, Family


class Model(LoadedModel):
    """An open model: `load` opens it, `with` closes it.

    `chat` answers messages, `generate` continues a text, `tokenize` and `detokenize` convert between text and token
    ids, `logits` returns the logits of every token. A model loaded with `embeddings` has `embed`, `token_embeddings`
    and `rank`.

    Answers may alternate piece by piece. A call, or the next piece of an answer, raises ModelBusy while another thread
    is inside. `tokenize` and `detokenize` work in any thread.
    """

    def __init__(self, file: GGUFFile, force: bool = False) -> None:
        """`force`: if the file's tokenizer rule is unknown, take the nearest."""
        super().__init__(file, force)
        self.draft: Model | None = None  # drafts tokens; closed with this model
        self._confined: Confined | None = None
        self._given: Family | None = None  # the format that replaces the file's chat template

    def speculate(self, options: LoadOptions, progress: Progress | None = None, sequences: int = 0) -> None:
        """Enable drafting for new sessions: load the draft model if there is one, and time passes.

        `sequences` prepares for a server, as in `bind`. As many draft layers go to the GPU as still fit; none if the
        target has none there.
        """
        from localllm.speculation.setup import Speculation

        speculation, draft = options.speculation, None
        if speculation.model_draft:
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
                any_cache=True,  # no warnings: what a draft gets wrong costs only time
            )
        try:
            self.speculation = Speculation(self.reader(), speculation, draft.reader() if draft is not None else None)
        except BaseException:
            if draft is not None:
                draft.close()
            raise
        for note in self.speculation.notes:
            warnings.warn(note, NotUsed, stacklevel=2)
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
        for note in self.speculation.notes:
            warnings.warn(note, NotUsed, stacklevel=2)

    # -- embeddings ------------------------------------------------------------------------------------------------

    @property
    def embedder(self) -> Embedder:
        """What embeds token ids; LocalLLMError if the model was loaded to predict tokens."""
        self._check_open()
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

    def sampler(self, options: SamplingOptions, breakers: Breakers | None = None) -> Sampler:
        """Return a sampler for this vocabulary. `breakers`: DRY's sequence breakers, if they have been found before."""
        if breakers is None and options.dry_multiplier and self.breakers is not None:
            breakers = self.breakers.find(options.dry_sequence_breaker)
        if self.tokenizer is None:
            return Sampler(options, breakers)
        spellings = Spellings(partial(self.tokenizer.piece, special=False), self.tokenizer.eog, self.tokenizer.end)
        return Sampler(options, breakers, self.tokenizer.suppressed, spellings)

    @cached_property
    def breakers(self) -> BreakerTokens | None:
        """What finds DRY's sequence breakers in the vocabulary; None without a tokenizer."""
        words = self.tokenizer
        if words is None:
            return None
        return BreakerTokens(
            lambda: [words.piece(token) for token in range(words.vocab_size)],
            lambda text: words.encode(text, add_special=False),
        )

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
        whole = isinstance(prompt, str) or (
            isinstance(prompt, Iterable) and all(isinstance(token, Integral) for token in prompt)
        )
        if not whole:
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

        A plain text is one user message. `tools` are functions as JSON schemas; a call that the model begins is held to
        their names and parameters. Everything else is as in `generate`. A warning reports each change that the template
        required.
        """
        from localllm.answer.thinking import with_thinking
        from localllm.template import ChatEncoder

        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        messages = list(messages) if isinstance(messages, Iterable) else []
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
        variables = with_thinking(template.source, answer.template_variables)
        rendered = template.render(messages, tools=tools, extra=variables)
        for told in (*([note] if note else []), *rendered.notes):
            warnings.warn(told, stacklevel=2)
        self.check_length(rendered.text)
        encoder = ChatEncoder(self.words, template.source, answer.parse_special_in_content)
        ids, stops, tail = encoder.encode(rendered.text), (*answer.stops, *template.stops), end_of(rendered.text)
        asked_of = replace(answer.asked, tools=tools or (), forced=False)
        pieces = self._stream(ids, sampler, answer, stops, cancel, held(self, asked_of, template, tail))
        return pieces if asked_of.structure is None else without_thought(pieces, self, template, tail, stops)

    def diffuse(
        self,
        prompt: str | Sequence[int],
        options: DiffusionOptions | None = None,
        sampling: SamplingOptions | None = None,
        *,
        max_tokens: int | None = None,
    ) -> Iterator[Canvas]:
        """Yield the canvas of a diffusion model whenever tokens settle; the last one holds the whole answer.

            for canvas in model.diffuse("Write a poem.", DiffusionOptions(diffusion_steps=64)):
                pass
            print(model.answer_of(canvas))

        The answer has `max_tokens` tokens (default: what is left of the context). Of `sampling` count seed,
        temperature, top_k and top_p. LocalLLMError for a model of another kind.
        """
        from localllm.diffusion.model import diffuse

        ids = self.prompt_ids(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        sampling = self.sampling_defaults.options({}) if sampling is None else sampling
        return diffuse(self, ids, options or DiffusionOptions(), sampling, max_tokens)

    def answer_of(self, canvas: Canvas) -> str:
        """Return the text of a canvas after its prompt, up to the first token that ends an answer."""
        from localllm.diffusion.model import answer_text

        return answer_text(self, canvas)

    @cached_property
    def template(self) -> tuple[ChatTemplate, str | None]:
        """The chat template, and a note if it is not from the file. It is rendered in a child process."""
        from localllm.template import choose_template, renderer

        self.refuse_chat()
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
        super().close()


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
        if file.tensors:
            _refuse_other_kinds(file)
        model = Model(file, chosen.force)
        if sequences and file.tensors and not embeddings:
            refuse_serving(file)
        drafts = bool(file.tensors) and chosen.speculation.kind != "off"
        if drafts and model.diffuses and not embeddings:
            raise NoDrafts("a diffusion model")
        if drafts and architecture_of(file.metadata).decoder and not embeddings:
            raise NoDrafts("a model with an encoder")
        if file.tensors:
            model.bind(chosen, progress, observe, embeddings=embeddings, sequences=sequences)
            if drafts:
                model.speculate(chosen, progress, sequences)
    except BaseException:
        model.close() if model is not None else file.close()
        raise
    return model


def _refuse_other_kinds(file: GGUFFile) -> None:
    """Raise ModelError, with the file's name, for a file that holds no model of a supported architecture."""
    if file.metadata.get("general.type") == "imatrix":
        problem = f"{file.path}: an importance matrix, not a model; give it to `localllm quantize` ("
        raise ModelError(Notice(problem, Setting("imatrix", FILE), ")"))
    try:
        architecture_of(file.metadata)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from None
