"""From messages, texts and files to the tokens of a prompt. Everything here may block: it runs in a worker thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.answer.formats import find_format
from localllm.answer.grammars import Format
from localllm.answer.messages import CallForm, call_form, fitted
from localllm.answer.thinking import thinking_variables
from localllm.model import Model
from localllm.server.errors import BadRequest, NotSupported
from localllm.server.turn import Completion, Turn
from localllm.template import ChatEncoder, ChatTemplate

FILL = {  # the role of a token, and the keys under which files name it
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens before an answer, and their text."""

    ids: list[int]
    text: str
    stops: tuple[str, ...] = ()
    resumed: bool = False  # the answer continues a text


class Prompts:
    """Makes prompts for one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._encoder: ChatEncoder | None = None
        self._format: Format | None = None
        self._call_form: CallForm | None = None

    @property
    def template(self) -> ChatTemplate:
        return self._model.template[0]

    @property
    def format(self) -> Format:
        """How the model writes thoughts and calls."""
        if self._format is None:
            self._format = find_format(self.template.source)
        return self._format

    def of_turn(self, turn: Turn, tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """Render a conversation. TemplateError, ContextFull or BadRequest if that is not possible."""
        messages = [dict(message) for message in turn.messages]
        begun = ""
        if turn.continued and messages and messages[-1].get("role") == "assistant":
            begun = str(messages.pop().get("content") or "")
        for message in messages:
            self._model.check_length(str(message.get("content") or ""))
        template, thinking = self.template, turn.thinking
        enabled = False if thinking.effort == "none" else thinking.enabled
        effort = "" if thinking.effort == "none" else thinking.effort
        variables = {**thinking_variables(enabled, effort, thinking.budget), **turn.template_variables}
        if self._call_form is None:
            self._call_form = call_form(template)
        messages = fitted(messages, tools, self.format, self._call_form)
        told = list(tools) if tools and self.format.native else None
        prompted = variables.pop("add_generation_prompt", True) is not False
        rendered = template.render(messages, prompted, told, variables)
        self._model.check_length(rendered.text)
        if self._encoder is None:
            self._encoder = ChatEncoder(self._model.words, template.source)
        ids = self._encoder.encode(rendered.text)
        text = str.__str__(rendered.text)
        if begun:
            ids = [*ids, *self._model.words.encode(begun, add_special=False)]
        return Prompt(ids, text + begun, template.stops, bool(begun))

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
        self._model.check_length(prompt)
        return Prompt(self._model.words.encode(prompt, completion.add_special, completion.parse_special), prompt)

    # -- infilling -------------------------------------------------------------------------------------------------

    def fill_token(self, role: str) -> int | None:
        """Return the token that marks a part of an infilling prompt, or None if the model has none."""
        for key in FILL[role]:
            value = self._model.file.metadata.get(key)
            if isinstance(value, int) and 0 <= value < self._model.vocabulary:
                return value
        special = self._model.words.special
        return next((special[text] for text in _FILL_TEXTS[role] if text in special), None)

    @property
    def fills(self) -> bool:
        """Whether the model knows the marks of infilling."""
        return all(self.fill_token(role) is not None for role in ("prefix", "suffix", "middle"))

    def _filled(self, completion: Completion) -> Prompt:
        """Return files, the text before the gap and the text after it, in the order that such models learn."""
        words = self._model.words
        prefix, suffix, middle = (self.fill_token(role) for role in ("prefix", "suffix", "middle"))
        if prefix is None or suffix is None or middle is None:
            raise NotSupported("this model has no tokens for infilling; use a model trained to fill gaps in code")
        before = completion.prompt if isinstance(completion.prompt, str) else words.decode(completion.prompt)
        after = completion.suffix or ""
        self._model.check_length(before + after + "".join(text for _, text in completion.extra))

        def plain(text: str) -> list[int]:
            return list(words.encode(text, add_special=False)) if text else []

        ids: list[int] = [words.bos] if words.add_bos and words.bos is not None else []
        repository, separator = self.fill_token("repository"), self.fill_token("separator")
        if completion.extra and separator is not None:
            if repository is not None:
                ids += [repository, *plain("repository\n")]
            for name, text in completion.extra:
                ids += [separator, *plain(f"{name}\n{text}")]
            ids += [separator, *plain("filename\n")]
        elif completion.extra:
            ids += plain("".join(f"{text}\n" for _, text in completion.extra))
        ids += [prefix, *plain(before), suffix, *plain(after), middle]
        return Prompt(ids, before, resumed=True)
