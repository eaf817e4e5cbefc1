"""A conversation: turns in, a chat template around them, an answer out as a stream of pieces.

Every turn renders the whole history anew and hands all of it to the session, which evaluates only what its cache does
not hold.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.alignment import keep_held
from localllm.confined import Confined
from localllm.errors import LocalLLMError
from localllm.prompt_cache import Kept, read, restore, save
from localllm.sampling.options import SamplerOptions
from localllm.session import Piece, Statistics
from localllm.template import FAMILIES, ChatEncoder, ChatTemplate, TemplateError, choose_template
from localllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.model import Model

_HELD_BACK = 64  # tokens at the end of an answer that may not have been shown yet


class Conversation:
    """One conversation with a model. Close it to give its part of the cache back.

    With `context_shift` the oldest turns are dropped where the context is full; else ContextFull, or an answer that
    ends with the reason "context", leave the choice to the caller. `tell` hears, once each, what had to be changed in
    the messages for the template to take them, and every time which turns were dropped. Control tokens spelled in
    messages are text, unless `parse_special_in_content`.
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
        context_shift: bool = False,
        parse_special_in_content: bool = False,
    ) -> None:
        self._model, self._context = model, model.context
        self._words, self._template = _words(model), template
        self._special = frozenset(self._words.special.values())
        self._encoder = ChatEncoder(self._words, template.source, parse_special_in_content)
        self._tell, self._told = tell, set[str]()
        self._max_tokens, self._ignore_end = max_tokens, ignore_end
        self._stop = (*stop, *template.stops)
        self._context_shift = context_shift
        self._sampler = model.sampler(sampling)
        self._system = [{"role": "system", "content": system}] if system else []
        self._answered: list[int] = []  # tokens of the last answer
        self.session = model.session()
        self.messages: list[dict[str, str]] = list(self._system)

    # -- turns -----------------------------------------------------------------------------------------------------

    def say(self, text: str, cancel: threading.Event | None = None) -> Iterator[Piece]:
        """The answer to `text`, piece by piece; the last holds the statistics.

        An answer that was cancelled is kept as far as it came. A turn without any answer is forgotten: ContextFull, a
        template that refuses it (TemplateError), a cancel while the prompt is read.
        """
        return self._turn([*self.messages, {"role": "user", "content": text}], [], cancel)

    def again(self, cancel: threading.Event | None = None) -> Iterator[Piece]:
        """Another answer in the place of the last one."""
        return self._turn(self._asked("no answer that could be written anew"), [], cancel)

    def go_on(self, cancel: threading.Event | None = None) -> Iterator[Piece]:
        """The last answer where it broke off: what is new of it."""
        messages, said = self._asked("no answer that could go on"), self.messages[-1]["content"]
        begun = self._answered or self._words.encode(said, add_special=False)
        return self._turn(messages, begun, cancel)

    def undo(self) -> str:
        """Forget the last turn; what was asked in it."""
        *before, asked = self._asked("no turn to take back")
        self.messages, self._answered = before, []
        return asked["content"]

    def clear(self, system: str = "") -> None:
        """Start over, with `system` beside the system prompt; the cache keeps what is alike."""
        told = "\n\n".join(part for part in (*(m["content"] for m in self._system), system) if part)
        self.messages = [{"role": "system", "content": told}] if told else []
        self._answered = []

    def shift(self) -> int:
        """Drop the oldest turns, so that at most half of the context is used where that is possible: how many."""
        messages, dropped = self._shifted(self.messages, [])
        if dropped:
            self.messages = messages
        return dropped

    def save(self, path: Path, overwrite: bool = False) -> int:
        """Keep text and cache in a file; its bytes. CacheFileError and OutputError as in `localllm.prompt_cache`."""
        self.forget_rest()
        return save(path, self._model, self.session, self.messages, overwrite)

    def load(self, path: Path) -> Kept:
        """Take up what a file holds in the place of this conversation. CacheFileError, and this one goes on as it was.

        Where `problem` is set the cache in the file is of no use here, and the next turn evaluates its text.
        """
        kept = read(path, self._model)
        restore(kept, self._model, self.session)
        self.messages, self._answered = list(kept.messages), []
        return kept

    def forget_rest(self) -> None:
        """Leave nothing in the cache that is not of this conversation, as turns that were taken back."""
        try:
            held = self._prompt(self.messages, complete=True)
        except TemplateError:  # as of no messages at all
            held = []
        self.session.rewind(self.session.shared(held))

    def close(self) -> None:
        self.session.close()

    # -- how -------------------------------------------------------------------------------------------------------

    def _asked(self, problem: str) -> list[dict[str, str]]:
        """The messages up to the question that was answered last."""
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            raise LocalLLMError(f"there is {problem}: nothing has been answered yet")
        return self.messages[:-1]

    def _turn(
        self, messages: list[dict[str, str]], begun: list[int], cancel: threading.Event | None
    ) -> Iterator[Piece]:
        """The answer to the last of `messages`, of which the tokens `begun` are there already."""
        spent: Statistics | None = None
        tokens, text = list(begun), self._words.decode(begun)
        started = text
        try:
            prompt = [*self._prompt(messages), *tokens]
            if self._context_shift and len(prompt) >= self._context:
                messages, prompt = self._make_room(messages, tokens) or (messages, prompt)
            while True:
                self._sampler.restore(0)  # the prompt holds the history; random numbers go on
                left = None if self._max_tokens is None else self._max_tokens - len(tokens) + len(begun)
                for piece in self.session.generate(
                    prompt, self._sampler, left, self._stop, cancel, self._ignore_end, resumed=bool(tokens)
                ):
                    if piece.statistics is None:
                        text += piece.text
                        tokens += [] if piece.token is None else [piece.token]
                        yield piece
                    else:
                        last = piece
                assert last.statistics is not None
                spent = last.statistics if spent is None else spent.and_then(last.statistics)
                full = self._context_shift and last.statistics.reason == "context"
                whole = self._whole(tokens, text)
                room = self._make_room(messages, whole) if full and whole is not None else None
                if room is None or whole is None:
                    text += last.text
                    yield replace(last, statistics=spent)
                    return
                (messages, prompt), tokens = room, whole
        finally:
            if text != started or (spent is not None and spent.reason != "cancelled"):
                self.messages = [*messages, {"role": "assistant", "content": text}]
                self._answered = tokens

    def _whole(self, tokens: list[int], text: str) -> list[int] | None:
        """Tokens of just `text`: without those of which half a character, or what may become a stop, was held back."""
        tried = (tokens[:count] for count in range(len(tokens), max(len(tokens) - _HELD_BACK, 0), -1))
        return next((tried for tried in tried if self._words.decode(tried) == text), None)

    def _prompt(self, messages: list[dict[str, str]], complete: bool = False) -> list[int]:
        """Tokens of a conversation, those that the cache holds as they are there; a complete one asks nothing."""
        for message in messages:
            self._model.check_length(message["content"])
        rendered = self._template.render(messages, add_generation_prompt=not complete)
        for note in rendered.notes:
            if note not in self._told:
                self._told.add(note)
                self._tell(note)
        self._model.check_length(rendered.text)
        fresh = self._encoder.encode(rendered.text)
        return keep_held(self.session.tokens, fresh, self._words.piece, self._special)

    def _shifted(self, messages: list[dict[str, str]], tokens: list[int]) -> tuple[list[dict[str, str]], int]:
        """`messages` without as many of the oldest turns as must go, and how many those are.

        What is left fills half of the context, or more where the newest turn alone does.
        """
        starts = [number for number, message in enumerate(messages) if message["role"] == "user"]
        if len(starts) < 2:
            return messages, 0

        def without(turns: int) -> list[dict[str, str]]:
            return [*messages[: starts[0]], *messages[starts[turns] :]]

        def fits(turns: int) -> bool:
            return len(self._prompt(without(turns))) + len(tokens) <= self._context // 2

        dropped = 1 + bisect_left(range(1, len(starts) - 1), True, key=fits)
        return without(dropped), dropped

    def _make_room(
        self, messages: list[dict[str, str]], tokens: list[int]
    ) -> tuple[list[dict[str, str]], list[int]] | None:
        """Messages and prompt without the oldest turns, which is told; None where that makes no room."""
        messages, dropped = self._shifted(messages, tokens)
        prompt = [*self._prompt(messages), *tokens]
        if not dropped or len(prompt) >= self._context:
            return None
        again = len(prompt) - self.session.shared(prompt)
        self._tell(
            f"the context of {self._context} tokens is full: the oldest {_turns(dropped)} dropped, {again} of the "
            f"{len(prompt)} tokens left are evaluated again"
        )
        return messages, prompt


def template_of(model: Model, confined: Confined | None = None) -> tuple[ChatTemplate, str | None]:
    """The model's chat template, rendered in `confined`; and a note to be shown where it is not the file's own."""
    return choose_template(model.file.metadata, _words(model), confined)


def is_plain(template: ChatTemplate) -> bool:
    """Whether neither the file nor its vocabulary tells how a conversation is written for its model."""
    return template.source == FAMILIES[-1].source


def _turns(count: int) -> str:
    return "turn was" if count == 1 else f"{count} turns were"


def _words(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise LocalLLMError(f"{model.file.path}: the file has no tokenizer, so there is no talking with it")
    return model.tokenizer
