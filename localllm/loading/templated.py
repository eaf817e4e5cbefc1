"""A model with its chat template, which is rendered in a child process."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

from localllm.base.errors import LocalLLMError
from localllm.engine import MediaSpan
from localllm.gguf import GGUFFile
from localllm.loading.media_parts import MediaParts
from localllm.loading.predictor import Predictor

if TYPE_CHECKING:
    from localllm.sandbox import Confined
    from localllm.template import ChatEncoder, ChatTemplate, Family


class Templated(Predictor):
    """An open model that renders conversations with its chat template."""

    def __init__(self, file: GGUFFile, nearest_rule: bool = False) -> None:
        """`nearest_rule`: use the most similar known pre-tokenizer if the GGUF's is unknown."""
        super().__init__(file, nearest_rule)
        self._confined: Confined | None = None
        self._given: Family | None = None  # chat template that replaces the GGUF's

    @overload
    def apply_chat_template(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tokenize: Literal[True] = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        add_generation_prompt: bool = ...,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tokenize: Literal[False],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        add_generation_prompt: bool = ...,
        **variables: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """Return a conversation's prompt, rendered as in `chat`: token ids, or text if `tokenize` is false.

        `add_generation_prompt` appends the start of the answer. `variables` are passed to the template.
        """
        media = MediaParts()
        text = self._render(media.flattened(messages_of(messages)), variables, tools, add_generation_prompt)
        if not tokenize:
            return media.shown(text)
        if media:
            raise LocalLLMError(
                "token ids cannot say which picture or sound is meant; use model.chat, or tokenize=False"
            )
        return [each for each in self._encoded(text) if not isinstance(each, MediaSpan)]

    @cached_property
    def template(self) -> tuple[ChatTemplate, str | None]:
        """The chat template, and a note if it does not come from the GGUF. A child process renders the template."""
        from localllm.template import choose_template, renderer

        self.refuse_chat()
        tokenizer = self.tokenizer
        self._confined = renderer()
        return choose_template(self.file.metadata, tokenizer, self._confined, self._given)

    def use_template(self, given: Family) -> None:
        """Use the chat template `given` instead of the GGUF's template. Raise TemplateError if it is invalid.

        Call this before `template` is first used.
        """
        assert "template" not in self.__dict__, "the file's template is in use"
        self._given = given
        assert self.template[0].source == given.source

    @property
    def template_source(self) -> str:
        """The source of the chat template in use, given or from the GGUF; "" without a template."""
        source = self._given.source if self._given is not None else self.file.metadata.get("tokenizer.chat_template")
        return source if isinstance(source, str) else ""

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return a conversation's prompt as text. Warn about changes to the messages that the template required."""
        from localllm.template.reasoning import with_thinking

        self._check_open()  # a closed model would start its child process again
        _check_tools(tools)
        template, note = self.template
        for message in messages:
            self.check_length(str(message.get("content") or ""))
        variables = with_thinking(template.source, variables)
        rendered = template.render(messages, add_generation_prompt, tools=tools, extra=variables)
        for told in (*([note] if note else []), *rendered.notes):
            warnings.warn(told, stacklevel=3)
        self.check_length(rendered.text)
        return rendered.text

    def _encoded(
        self,
        rendered: str,
        parse_special: bool = False,
        media: MediaParts | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> list[int | MediaSpan]:
        """Return the tokens of a rendered prompt, with the spans of `media` in place of their markers in `messages`.

        Control tokens in messages are text unless `parse_special`.
        """
        from localllm.template import ChatEncoder

        encoder = ChatEncoder(self.tokenizer, self.template[0].source, parse_special)
        return self.laid_out(encoder, rendered, media, messages)

    def laid_out(
        self, encoder: ChatEncoder, rendered: str, media: MediaParts | None, messages: Sequence[Mapping[str, Any]]
    ) -> list[int | MediaSpan]:
        """Return the tokens of rendered `messages`, with the spans of `media` in place of their markers."""
        if not media:
            return [*encoder.encode(rendered)]
        return self.encoders.prompt(media.split(rendered, messages), encoder.encode, self.media_marks)

    def close(self) -> None:
        """Free the weights and the KV cache, and end the template's child process. Running answers
        end with an error."""
        if self._confined is not None:
            self._confined.close()
        super().close()


def _check_tools(tools: Any) -> None:
    """Raise LocalLLMError unless tools are None or a list of functions with names."""
    if tools is None:
        return
    listed = list(tools) if isinstance(tools, Iterable) and not isinstance(tools, str | bytes | Mapping) else [None]
    for each in listed:
        function = each.get("function", each) if isinstance(each, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            example = '[{"type": "function", "function": {"name": "weather", "parameters": {...}}}]'
            raise LocalLLMError(f"tools are a list of functions such as {example}, got {each or tools!r:.60}")


def messages_of(messages: Any, system_prompt: str = "") -> list[Mapping[str, Any]]:
    """Return a text or messages as a list of messages after the system prompt; raise LocalLLMError for other types."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    messages = list(messages) if isinstance(messages, Iterable) else []
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        example = '[{"role": "user", "content": "Hello!"}]'
        raise LocalLLMError(f"chat answers messages such as {example}; to continue a text, use generate")
    return [{"role": "system", "content": system_prompt}, *messages] if system_prompt else messages
