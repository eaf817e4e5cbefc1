"""Convert messages, texts and files to prompt tokens. All functions may block, so they must run in a worker thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting, said
from localllm.constrained.request import prompt_tail
from localllm.engine import MediaSpan
from localllm.loading.media_parts import MediaParts, Medium, has_media, of_marked, placed_media
from localllm.media import MediaError
from localllm.model import Model
from localllm.server.errors import BadRequest, NotSupported, PromptTooLong
from localllm.server.turn import REQUEST, Completion, Continued, Turn
from localllm.template import ChatEncoder, ChatTemplate
from localllm.template.format import AnswerFormat
from localllm.template.formats import find_format
from localllm.template.origin import MODEL, OWN, Text, joined
from localllm.template.reasoning import begin, with_thinking
from localllm.template.tool_messages import CallForm, call_form, fitted

FILL = {  # role of an infilling token: its metadata keys in GGUF files
    "prefix": ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id"),
    "suffix": ("tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.suffix_token_id"),
    "middle": ("tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id"),
    "repository": ("tokenizer.ggml.fim_rep_token_id",),
    "separator": ("tokenizer.ggml.fim_sep_token_id",),
}
_FILL_TEXTS = {
    "prefix": (
        "<|fim_prefix|>",
        "<fim_prefix>",
        "<fim-prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
    ),
    "suffix": (
        "<|fim_suffix|>",
        "<fim_suffix>",
        "<fim-suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
    ),
    "middle": ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "separator": ("<|file_sep|>", "<file_sep>"),
}
_PROJECT = "myproject\n"  # llama-server's name for the repository, which requests do not contain
_SNIPPET = "\n\n--- snippet ---\n\n"  # llama-server's header of a file, for models without a token for it


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids and text of a prompt. `tail` is the end of the prompt before a partial message."""

    ids: Sequence[int | MediaSpan]
    text: str
    stops: tuple[str, ...] = ()
    resumed: bool = False  # the model continues a partial message
    tail: str = ""

    @property
    def count(self) -> int:
        """The number of tokens, including pictures and sounds."""
        return sum(each.tokens if isinstance(each, MediaSpan) else 1 for each in self.ids)


class Prompts:
    """Builds the prompts of one model."""

    def __init__(self, model: Model, beside: bool = False) -> None:
        """Create the prompt builder of a model. If `beside` is true, templates are rendered in a separate child
        process, so that rendering does not wait for the model's own child process."""
        self._model, self._beside = model, beside
        self._own_template: ChatTemplate | None = None
        self._encoder: ChatEncoder | None = None
        self._format: AnswerFormat | None = None
        self._call_form: CallForm | None = None

    @property
    def template(self) -> ChatTemplate:
        if self._model.encodes:
            raise NotSupported("this model has an encoder, which takes one text and cannot chat; request a completion")
        template = self._model.template[0]
        if not self._beside:
            return template
        if self._own_template is None:
            self._own_template = template.beside()
        return self._own_template

    def close(self) -> None:
        """End the separate child process."""
        if self._own_template is not None:
            self._own_template.close()

    @property
    def format(self) -> AnswerFormat:
        """The format in which the model writes reasoning and tool calls."""
        if self._format is None:
            self._format = find_format(self.template.source)
        return self._format

    def of_turn(self, turn: Turn, tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """Render a conversation; raise TemplateError, ContextFull or BadRequest if it cannot be rendered."""
        media = MediaParts()
        if has_media(turn.messages):
            self._check_reads("messages")
        messages = [dict(message) for message in media.flattened(turn.messages, whole=REQUEST)]
        continued = turn.continued and bool(messages) and messages[-1].get("role") == "assistant"
        last = messages.pop() if continued else {}
        self.check_length(*(str(message.get("content") or "") for message in messages))
        template = self.template
        variables = with_thinking(template.source, {**turn.thinking.variables, **turn.template_variables})
        if self._call_form is None:
            self._call_form = call_form(template)
        messages = fitted(messages, tools, self.format, self._call_form)
        told = list(tools) if tools and self.format.native else None
        prompted = variables.pop("add_generation_prompt", True) is not False or continued
        rendered = template.render(messages, prompted, told, variables)
        if continued:
            text, tail = self._begun(rendered.text, last, turn.continues)
        else:
            text, tail = rendered.text, prompt_tail(rendered.text)
        self.check_length(text)
        if self._encoder is None:
            self._encoder = ChatEncoder(self._model.tokenizer, template.source)
        resumed = continued and bool(last.get("content") or last.get("reasoning_content"))
        try:
            ids = self._model.laid_out(self._encoder, text, media, messages)
        except MediaError as error:
            raise BadRequest(said(error), "messages") from None
        return Prompt(ids, media.shown(text), template.stops, resumed, tail)

    def _check_reads(self, param: str) -> None:
        """Raise BadRequest if the model has no encoders of pictures and sound."""
        if not self._model.reads:
            problem = "image and audio input is not supported: this model was loaded without an mmproj file ("
            raise BadRequest(Notice(problem, Setting("mmproj"), "); send text"), param)

    def _begun(self, prompt: Text, message: Mapping[str, Any], part: Continued) -> tuple[Text, str]:
        """Return the prompt with the partial message appended, and the end of the prompt before that message."""
        reasoning, content = (str(message.get(name) or "") for name in ("reasoning_content", "content"))
        whole = content if part == "content" or (part == "" and content) else None
        found = begin(self.format, prompt_tail(prompt), reasoning, whole)
        opened = joined((prompt[: len(prompt) - found.cut], Text.of(found.opening, OWN)))
        closed = joined((opened, Text.of(found.reasoning, MODEL), Text.of(found.closing, OWN)))
        tail = closed if whole is not None or not found.reasoning else opened
        return joined((closed, Text.of(found.content, MODEL))), prompt_tail(tail)

    def check_length(self, *texts: str) -> None:
        """Raise PromptTooLong early for texts that together cannot fit in the context."""
        context, least = self._model.context, self._model.least_tokens(*texts)
        if context and least > context:
            raise PromptTooLong.of(least, context, "at least ")

    def of_text(self, completion: Completion) -> Prompt:
        """Tokenize a text, or check token ids."""
        if completion.suffix is not None or completion.extra:
            return self._filled(completion)
        prompt = completion.prompt
        if not isinstance(prompt, str):
            most = self._model.vocabulary
            wrong = next((token for token in prompt if not 0 <= token < most), None)
            if wrong is not None:
                raise BadRequest(f"token {wrong} is not in the vocabulary of {most} tokens", "prompt")
            return Prompt(list(prompt), "", resumed=True)
        self.check_length(prompt)
        if completion.media:
            return self._with_media(prompt, completion.media)
        ids = self._model.tokenizer.encode(prompt, completion.add_special, completion.parse_special)
        return Prompt(ids, prompt, resumed=bool(prompt))

    def _with_media(self, prompt: str, media: Sequence[bytes | Medium]) -> Prompt:
        """Return a text prompt with pictures and sounds in place of its markers."""
        self._check_reads("prompt")
        model = self._model
        try:
            listed = [each for each in media if isinstance(each, Medium)] or placed_media(media, REQUEST)
            sections = list(of_marked(prompt, listed))
            ids = model.encoders.prompt(sections, model.prompt_part, model.media_marks)
        except LocalLLMError as error:
            raise BadRequest(said(error), "prompt") from None
        return Prompt(ids, prompt, resumed=True)

    # -- infilling -------------------------------------------------------------------------------------------------

    def fill_token(self, role: str) -> int | None:
        """Return the token that marks a part of an infilling prompt, or None if the model lacks it."""
        for key in FILL[role]:
            value = self._model.file.metadata.get(key)
            if isinstance(value, int) and 0 <= value < self._model.vocabulary:
                return value
        special = self._model.tokenizer.special
        return next((special[text] for text in _FILL_TEXTS[role] if text in special), None)

    @property
    def fills(self) -> bool:
        """Return whether the model has infilling tokens."""
        return all(self.fill_token(role) is not None for role in ("prefix", "suffix", "middle"))

    def _filled(self, completion: Completion) -> Prompt:
        """Return an infilling prompt: files, prefix and suffix, in the order used in training.

        If the files do not fit together with the output, only the last files in the list are kept, which are the
        nearest ones.
        """
        tokenizer = self._model.tokenizer
        prefix, suffix, middle = (self.fill_token(role) for role in ("prefix", "suffix", "middle"))
        if prefix is None or suffix is None or middle is None:
            raise NotSupported("this model has no tokens for infilling; use a model trained to fill gaps in code")
        before = completion.prompt if isinstance(completion.prompt, str) else tokenizer.decode(completion.prompt)
        after = completion.suffix or ""
        self.check_length(before, after)
        ids = [prefix, *self._plain(before), suffix, *self._plain(after), middle]
        start = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
        context, answer = self._model.context, completion.generation.max_tokens
        kept = context // 4 if answer is None else min(answer, context // 4)
        room = context - len(start) - len(ids) - kept
        return Prompt([*start, *self._files(completion.extra, room), *ids], before, resumed=True)

    def _files(self, files: Sequence[tuple[str, str]], room: int) -> list[int]:
        """Return the last `room` tokens of the files."""
        if not files or room <= 0:
            return []
        repository, separator = self.fill_token("repository"), self.fill_token("separator")
        found = [] if separator is None else [separator, *self._plain("filename\n")]
        for name, text in reversed(files):
            if len(found) >= room:
                break
            text = text[-room * self._model.tokenizer.longest :]  # `room` tokens cover at most this many characters
            named = self._plain(_SNIPPET) if separator is None else [separator, *self._plain(f"{name}\n")]
            found = [*named, *self._plain(text), *found]
        else:
            if repository is not None:
                found = [repository, *self._plain(_PROJECT), *found]
        return found[-room:]

    def _plain(self, text: str) -> list[int]:
        return list(self._model.tokenizer.encode(text, add_special=False)) if text else []
