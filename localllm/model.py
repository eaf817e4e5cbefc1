"""`Model`, an open model that generates, chats and embeds, and `load`, which opens a model."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Progress
from localllm.base.errors import LocalLLMError
from localllm.base.notices import FILE, Notice, Setting
from localllm.constrained.request import answer_constraint, prompt_tail, text_constraint
from localllm.embedding import Embedder, TextPooler, normalized, rank_pair
from localllm.generation.request import LogitsProcessor, MediaSpan, Request, text_of
from localllm.generation.speculation.errors import NoDrafts
from localllm.generation.stream import AHEAD
from localllm.gguf import GGUFFile, open_gguf
from localllm.loading.drafters import find_drafter
from localllm.loading.loaded_model import refuse_serving
from localllm.loading.media_parts import MARKER, MediaParts, of_marked, placed_media
from localllm.loading.mmproj import OFF, open_multimodal
from localllm.loading.resolve import resolve
from localllm.loading.splitting import Splitter
from localllm.loading.templated import Templated, messages_of
from localllm.models import MediaInput, ModelError, Pooler, architecture_of, is_mmproj
from localllm.options import AnswerOptions, DiffusionOptions, LoadOptions, SamplingOptions
from localllm.options.declare import divided
from localllm.options.keywords import CHAT_ONLY, ChatKeywords, GenerateKeywords, LoadKeywords
from localllm.options.signature import takes
from localllm.reply import Reply, pieces_of
from localllm.template.formats import find_format

if TYPE_CHECKING:
    from localllm.chat import Conversation
    from localllm.diffusion.canvas import Canvas
    from localllm.loading.multimodal import MediaChunk
    from localllm.sampling.constraint import Constraint


_SHOWN = (
    "answer_of", "apply_chat_template", "chat", "close", "config", "context", "conversation", "detokenize", "device",
    "diffuse", "embed", "file", "generate", "hidden_states", "logits", "media", "placed", "rank", "reads",
    "token_embeddings", "tokenize", "tokenizer", "vocabulary",
)  # fmt: skip


class Model(Templated):
    """An open model, returned by `load` and closed by `with` or `close`.

    `chat` answers messages, `generate` continues a text, `conversation` remembers turns. `tokenize`, `detokenize` and
    `apply_chat_template` convert between text and token ids, `logits` returns the logits of every token. A model loaded
    with `embeddings` has `embed`, `token_embeddings`, `hidden_states` and `rank`.

    Concurrent answers, in one thread or in many, are generated in a batch. Batching does not change an answer. All
    answers share a prefix cache: only the part of a prompt after the longest cached prefix is evaluated.
    """

    # -- embeddings ------------------------------------------------------------------------------------------------

    @property
    def embedder(self) -> Embedder:
        """Computes embeddings of token ids. Raises LocalLLMError if the model was loaded to predict tokens."""
        self._check_open()
        engine, bound = self.engine, self._bound
        if bound is None or bound.pooler is None:
            raise LocalLLMError("this model was loaded to predict tokens; use localllm.load(path, embeddings=True)")
        return Embedder(bound.config, bound.pooler, engine)

    @property
    def side_embedder(self) -> TextPooler:
        """Pools the hidden states of a model that predicts tokens. Raises LocalLLMError if its engine returns none."""
        self._check_open()
        config, head = self.config, self.pooling_head
        if config is None or head is None:
            problem = "this model was started for text and cannot give embeddings; start it with "
            raise LocalLLMError(Notice(problem, Setting("embeddings")))
        return TextPooler(config, Pooler(config, head))

    def embed(
        self, texts: str | Sequence[str], *, pooling: str = "auto", normalize: bool = True
    ) -> NDArray[np.float32]:
        """Return the embedding of every text, float32 (texts, width); of a single text, (width,).

        `pooling` is "mean", "cls" (the first token), "last", "rank" (the scores of a classifier), or "auto" (as the
        GGUF specifies). Vectors have length 1 unless `normalize` is false; scores are not normalized.
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

    def hidden_states(self, text: str) -> NDArray[np.float32]:
        """Return the hidden state of every token of a text after the final norm, float32 (tokens, width)."""
        return self.token_embeddings(text)

    def rank(self, query: str, documents: Sequence[str]) -> NDArray[np.float32]:
        """Return a reranker's score of each document for the query, float32 (documents,)."""
        embedder, tokenizer = self.embedder, self.tokenizer
        way = embedder.pooling("rank")
        if not documents:
            raise LocalLLMError("rank needs at least one document, got none")
        for text in (query, *documents):
            self.check_length(text)
        pairs = [rank_pair(tokenizer, self.file.metadata, query, document) for document in documents]
        return np.array([scores[0] for scores in embedder.vectors(pairs, way)], np.float32)

    # -- answers ---------------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self,
        prompt: str | Sequence[int | MediaSpan],
        options: AnswerOptions | None = ...,
        sampling: SamplingOptions | None = ...,
        *,
        logprobs: int | None = ...,
        logits_processor: LogitsProcessor | None = ...,
        cancel: threading.Event | None = ...,
        **keywords: Unpack[GenerateKeywords],
    ) -> Reply: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        options: AnswerOptions | None = ...,
        sampling: SamplingOptions | None = ...,
        *,
        logprobs: int | None = ...,
        logits_processor: LogitsProcessor | None = ...,
        cancel: threading.Event | None = ...,
        **keywords: Unpack[GenerateKeywords],
    ) -> list[Reply]: ...

    @takes(AnswerOptions, SamplingOptions, without=CHAT_ONLY)
    def generate(
        self,
        prompt: str | Sequence[int | MediaSpan] | Sequence[str] | Sequence[Sequence[int]],
        options: AnswerOptions | None = None,
        sampling: SamplingOptions | None = None,
        *,
        logprobs: int | None = None,
        logits_processor: LogitsProcessor | None = None,
        cancel: threading.Event | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Reply | list[Reply]:
        """Continue a text or token ids.

            for piece in model.generate("Once upon a time", max_tokens=100, stop="The end"):
                print(piece.text, end="", flush=True)

        Returns a `Reply`, which generates the answer while it is read. For a list of prompts, returns a list of
        replies, which are generated in a batch. Omitted sampling options take the values that the GGUF recommends, or
        else the program's defaults; `sampling` replaces both. Keywords override `options` and `sampling`. `logprobs` is
        the number of alternatives whose log-probabilities come with each token. `logits_processor(tokens, logits)`
        returns the logits (V,) to sample the next token from, given all tokens so far. Setting `cancel` from another
        thread ends the answer. Raises LocalLLMError for wrong values, ContextFull for a prompt that does not fit.
        """
        asked, given = divided(keywords, AnswerOptions, SamplingOptions, without=CHAT_ONLY)
        answer, sampling = AnswerOptions.given(options, asked), self._sampling(sampling, given)
        if answer.system_prompt:
            raise LocalLLMError("generate takes no system_prompt; put the text into the prompt, or use model.chat")
        prompts, many = _prompts(prompt)
        structure = text_constraint(self, answer.structure)
        given_ids = [self.prompt_ids(each) if isinstance(each, str) else self._known(each) for each in prompts]
        requests = [
            self._request(ids, sampling, answer, answer.stops, structure, logprobs, logits_processor)
            for ids in given_ids
        ]
        ahead = None if many else AHEAD
        stepper = self.stepper
        replies = [Reply(pieces_of(stepper.stream(request, cancel, ahead)), stepper) for request in requests]
        return replies if many else replies[0]

    @takes(AnswerOptions, SamplingOptions)
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        options: AnswerOptions | None = None,
        sampling: SamplingOptions | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        logprobs: int | None = None,
        logits_processor: LogitsProcessor | None = None,
        cancel: threading.Event | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> Reply:
        """Answer the messages of a conversation, rendered with the chat template.

            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
            print(model.chat(messages, max_tokens=100))

        With an mmproj file, the content of a message may be a list of parts: {"type": "text", "text": "What is this?"},
        {"type": "image", "image": "a.png"} and {"type": "audio", "audio": "b.wav"}. A source is a path, the bytes of a
        file, an array, a PIL image, or (samples, rate).

        A string is treated as one user message. `tools` are functions in OpenAI's format, with JSON schemas. A call
        that the model begins is constrained to their names and parameters, and returned in `Reply.tool_calls`.
        Everything else is as in `generate`. A warning reports each change that the template required in the messages.
        """
        from localllm.output.reader import AnswerReader

        asked, given = divided(keywords, AnswerOptions, SamplingOptions)
        answer, sampling = AnswerOptions.given(options, asked), self._sampling(sampling, given)
        media = MediaParts()
        told = media.flattened(messages_of(messages, answer.system_prompt))
        text = self._render(told, answer.template_variables, tools)
        template, tail = self.template[0], prompt_tail(text)
        asked_of = replace(answer.asked, tools=tools or (), forced=False)
        ids, stops = self._encoded(text, answer.parse_special_in_content, media, told), (*answer.stops, *template.stops)
        constraint = answer_constraint(self, asked_of, template.source, tail)
        request = self._request(ids, sampling, answer, stops, constraint, logprobs, logits_processor)
        format_ = find_format(template.source)
        request = replace(request, visible=format_.visible(self.tokenizer.special))
        reader = AnswerReader(format_, list(tools or ()), tail, read_calls=bool(tools))
        stepper = self.stepper
        return Reply(pieces_of(stepper.stream(request, cancel), reader), stepper)

    def media(self, prompt: str, data: Any) -> list[MediaChunk]:
        """Return a prompt with pictures and sound in chunks: text tokens, and the inputs of encoders.

            chunks = model.media("a <__media__> b", picture)
            chunks[1].tensors, chunks[1].embeddings
            model.generate([each for chunk in chunks for each in chunk.prompt])

        `data` replaces the marker `<__media__>`; several markers take a list: a path, the bytes of a file, a
        PIL image, an array (height, width, 3), float samples at the rate of the encoder, or (samples, rate). A list for
        one marker has the frames of a video. Special tokens in the prompt count, and BOS is added.
        """
        encoders = self.encoders
        count = prompt.count(MARKER)
        sources = list(data) if isinstance(data, list) and count != 1 else [data]
        media = placed_media(sources, "the prompt")
        return encoders.chunks(of_marked(prompt, media), self.prompt_part, self.media_marks)

    def conversation(
        self,
        options: AnswerOptions | None = None,
        sampling: SamplingOptions | None = None,
        *,
        context_shift: bool = False,
        **keywords: Unpack[ChatKeywords],
    ) -> Conversation:
        """Return a `Conversation`, which remembers its turns.

            talk = model.conversation(system_prompt="Be brief.")
            print(talk.say("Hello!"))
            print(talk.say("Who are you?"))

        Options are as in `chat`. With `context_shift`, a full context drops the oldest turns.
        """
        from localllm.chat import Conversation

        asked, given = divided(keywords, AnswerOptions, SamplingOptions)
        answer, sampling = AnswerOptions.given(options, asked), self._sampling(sampling, given)
        template, note = self.template

        def tell(told: str) -> None:
            warnings.warn(told, stacklevel=4)

        if note:
            tell(note)
        return Conversation(self, template, sampling, tell, answer, context_shift=context_shift)

    def diffuse(
        self,
        prompt: str | Sequence[int],
        options: DiffusionOptions | None = None,
        sampling: SamplingOptions | None = None,
        *,
        max_tokens: int | None = None,
    ) -> Iterator[Canvas]:
        """Yield the canvas of a diffusion model after every step that unmasks tokens; the last canvas holds the whole
        answer.

            for canvas in model.diffuse("Write a poem.", DiffusionOptions(diffusion_steps=64)):
                pass
            print(model.answer_of(canvas))

        The answer has `max_tokens` tokens (default: the rest of the context). Only seed, temperature, top_k and top_p
        of `sampling` are used. Raises LocalLLMError if the model is not a diffusion model.
        """
        from localllm.diffusion.model import diffuse

        ids = self.prompt_ids(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        sampling = self.sampling_defaults.options({}) if sampling is None else sampling
        return diffuse(self, ids, options or DiffusionOptions(), sampling, max_tokens)

    def answer_of(self, canvas: Canvas) -> str:
        """Return the text of a canvas after its prompt, up to the first end-of-generation token."""
        from localllm.diffusion.model import answer_text

        return answer_text(self, canvas)

    def _sampling(self, sampling: SamplingOptions | None, given: Mapping[str, Any]) -> SamplingOptions:
        if sampling is not None:
            return SamplingOptions.given(sampling, given)
        return self.sampling_defaults.options(given)

    def _known(self, ids: list[int | MediaSpan]) -> list[int | MediaSpan]:
        """Return `ids`. Raise LocalLLMError for ids outside the vocabulary, which would fail other requests in the same
        step.
        """
        most = self.vocabulary
        if (wrong := next((token for token in text_of(ids) if not 0 <= token < most), None)) is not None:
            raise LocalLLMError(f"token {wrong} is outside the vocabulary: ids are 0 to {most - 1}")
        return ids

    def _request(
        self,
        ids: Sequence[int | MediaSpan],
        sampling: SamplingOptions,
        answer: AnswerOptions,
        stops: tuple[str, ...],
        constraint: Callable[[], Constraint] | None,
        logprobs: int | None,
        processor: LogitsProcessor | None,
    ) -> Request:
        self._check_open()
        if logprobs is not None and not (isinstance(logprobs, int) and 0 <= logprobs <= self.vocabulary):
            raise LocalLLMError(f"logprobs is {logprobs!r:.60}; give a number of alternatives, 0 or more")
        if processor is not None and not callable(processor):
            raise LocalLLMError("logits_processor must be a function of the tokens so far and the logits")
        return Request(
            ids, sampling, answer.max_tokens, stops, answer.ignore_eos, logprobs, constraint=constraint,
            processor=processor,
        )  # fmt: skip

    def __dir__(self) -> list[str]:
        """List the public attributes. Other attributes are internal."""
        return [*_SHOWN, *(name for name in super().__dir__() if name.startswith("__"))]

    def __repr__(self) -> str:
        what = self.config.architecture if self.config is not None else "no weights"
        state = "closed" if self._closed else f"{what}, context {self.context}, {self.device or 'not loaded'}"
        return f"<Model {self.file.path}: {state}>"


@takes(LoadOptions)
def load(
    path: str | os.PathLike[str],
    options: LoadOptions | None = None,
    *,
    progress: Progress | None = None,
    observe: bool = False,
    embeddings: bool = False,
    sequences: int = 0,
    memory: int = 0,
    most_cache: int = 0,
    split: Splitter | None = None,
    media: MediaInput | None = None,
    **keywords: Unpack[LoadKeywords],
) -> Model:
    """Open a GGUF by path, by the name of a model on this computer, or "demo", the bundled model.

        with localllm.load("model.gguf", ctx_size=8192, gpu_layers=20) as model:
            ...

    Keywords override `options`. `progress(what, done, total)` is called as kernels are compiled and weights are read. A
    GGUF without tensors can only tokenize. With `observe`, the inputs of every matrix product can be read after a step
    (`localllm.quantize.calibration`). With `embeddings`, the model embeds texts (`Model.embed`) instead of predicting
    tokens; an encoder-only model always does. `sequences` is for servers: the number of requests that share the KV
    cache (`localllm.generation`); `memory` is the maximum number of bytes for weights, KV cache and encoders then, and
    `most_cache` for the KV cache. `split` runs the layers in several processes (`localllm.distributed`). `media` says
    which embeddings of pictures and sound the prompts of `generate` may have between their token ids
    (`localllm.engine.MediaSpan`). A draft model changes the speed, not the distribution of the answers. With a GPU,
    `Model.placed` describes which layers run on which device. Raises OptionError, GGUFError, TokenizerError,
    ModelError, BackendError or SpeculationError, each with a one-line message.
    """
    chosen = LoadOptions.given(options, keywords)
    file, model = open_gguf(resolve(path)), None
    try:
        if file.tensors:
            refuse_other_kinds(file)
        model = Model(file, chosen.force)
        if sequences and file.tensors and not embeddings:
            refuse_serving(file)
        drafts = bool(file.tensors) and chosen.speculation.kind != "off"
        if drafts:
            architecture = architecture_of(file.metadata)
            plain = "a diffusion model" if model.diffuses else "a model with an encoder" if architecture.decoder else ""
            if plain and not embeddings and chosen.speculation.asked:
                raise NoDrafts(plain)
            drafts = chosen.speculation.asked or not (plain or embeddings or architecture.encoder)
        if file.tensors:
            if drafts and not embeddings:
                model.drafter = find_drafter(file, chosen.speculation)
            if embeddings:
                _refuse_mmproj(chosen)
            elif media is None:
                model.multimodal = open_multimodal(file, model.maybe_tokenizer, chosen)
                if model.multimodal is not None:
                    counted = sequences or split is not None  # the memory that layers and cache may use
                    media = model.multimodal.reserving(chosen.threads) if counted else model.multimodal.input
            model.bind(chosen, progress, observe, None, embeddings, sequences, memory, split, media, most_cache)
            continues = model.plan is not None and model.plan.causal and not model.recurrent
            if drafts and (chosen.speculation.asked or continues):
                model.speculate(chosen, load, progress, sequences)
    except BaseException:
        model.close() if model is not None else file.close()
        raise
    return model


def _prompts(prompt: Any) -> tuple[list[str | list[int | MediaSpan]], bool]:
    """Return prompts as a list, and whether a list was given. Raise LocalLLMError for anything else."""
    if isinstance(prompt, str):
        return [prompt], False
    if isinstance(prompt, Iterator):
        prompt = list(prompt)  # iterated twice below
    if (ids := _token_ids(prompt)) is not None:
        return [ids], False
    found: list[str | list[int | MediaSpan]] = []
    for each in prompt if isinstance(prompt, Iterable) and not isinstance(prompt, Mapping) else [None]:
        one = each if isinstance(each, str) else _token_ids(each)
        if one is None:
            problem = "generate continues a text or token ids; to answer messages, use model.chat(messages)"
            raise LocalLLMError(problem)
        found.append(one)
    return found, True


def _token_ids(ids: Any) -> list[int | MediaSpan] | None:
    """Return token ids, with pictures and sounds between them, as a list; None for anything else."""
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | Mapping):
        return None
    given = list(ids)
    if not all(isinstance(token, Integral | MediaSpan) for token in given):
        return None
    return [token if isinstance(token, MediaSpan) else int(token) for token in given]


def _refuse_mmproj(options: LoadOptions) -> None:
    """Raise LocalLLMError for an mmproj file that would not be used."""
    if options.mmproj and str(options.mmproj) not in OFF:
        problem = ": a model that is loaded for embeddings reads no pictures or sound; leave it out"
        raise LocalLLMError(Notice(Setting("mmproj", options.mmproj), problem))


def refuse_other_kinds(file: GGUFFile) -> None:
    """Raise ModelError, with the file name, unless the GGUF is a model of a supported architecture."""
    if is_mmproj(file.metadata):
        problem = f"{file.path}: the encoders of pictures or sound, not a model; give the model, and this file ("
        raise ModelError(Notice(problem, Setting("mmproj", FILE), ")"))
    kind = file.metadata.get("general.type")
    if isinstance(kind, str) and kind == "imatrix":
        problem = f"{file.path}: an importance matrix, not a model; give it to `localllm quantize` ("
        raise ModelError(Notice(problem, Setting("imatrix", FILE), ")"))
    try:
        architecture_of(file.metadata)
    except ModelError as error:
        raise ModelError(Notice(f"{file.path}: ", *error.args)) from None
