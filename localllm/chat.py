"""A conversation: turns in, a chat template around them, an answer out as a stream of pieces.

Every turn renders the whole history anew and hands all of it to the session, which evaluates only what its cache does
not hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from localllm.errors import LocalLLMError
from localllm.sampling.options import SamplerOptions
from localllm.session import Piece, StopReason
from localllm.template import FAMILIES, ChatTemplate, choose_template, encode_chat
from localllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.model import Model


class Conversation:
    """One conversation with a model. Close it to give its part of the cache back.

    `tell` hears, once each, what had to be changed in the messages for the template to take them.
    """

    def __init__(
        self,
        model: Model,
        template: ChatTemplate,
        sampling: SamplerOptions,
        tell: Callable[[str], None],
        *,
        system: str = "",
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        ignore_end: bool = False,
    ) -> None:
        self._words, self._template = _words(model), template
        self._tell, self._told = tell, set[str]()
        self._max_tokens, self._ignore_end = max_tokens, ignore_end
        self._stop = (*stop, *template.stops)
        self._sampler = model.sampler(sampling)
        self._session = model.session()
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._system)

    def say(self, text: str, cancel: threading.Event | None = None) -> Iterator[Piece]:
        """The answer to `text`, piece by piece; the last holds the statistics.

        An answer that was cancelled is kept as far as it came. A turn without any answer is forgotten: ContextFull, a
        template that refuses it (TemplateError), a cancel while the prompt is read.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        reason: StopReason = "cancelled"
        try:
            rendered = self._template.render(self.messages)
            for note in rendered.notes:
                if note not in self._told:
                    self._told.add(note)
                    self._tell(note)
            prompt = encode_chat(self._words, rendered.text)
            self._sampler.restore(0)  # the prompt holds the history; random numbers go on
            for piece in self._session.generate(
                prompt, self._sampler, self._max_tokens, self._stop, cancel, self._ignore_end
            ):
                answer += piece.text
                reason = piece.statistics.reason if piece.statistics else reason
                yield piece
        finally:
            if answer or reason != "cancelled":
                self.messages.append({"role": "assistant", "content": answer.strip()})
            else:
                self.messages.pop()

    def clear(self) -> None:
        """Start over; the cache keeps what the next conversation begins with alike."""
        self.messages = list(self._system)

    def close(self) -> None:
        self._session.close()


def template_of(model: Model) -> tuple[ChatTemplate, str | None]:
    """The model's chat template; and a note to be shown where it is not the file's own."""
    return choose_template(model.file.metadata, _words(model))


def is_plain(template: ChatTemplate) -> bool:
    """Whether neither the file nor its vocabulary tells how a conversation is written for its model."""
    return template.source == FAMILIES[-1].source


def _words(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise LocalLLMError(f"{model.file.path}: the file has no tokenizer, so there is no talking with it")
    return model.tokenizer
