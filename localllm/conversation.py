"""A conversation: renders turns with a chat template and streams the answer in pieces.

Every turn renders the whole history again and passes it to the session, which evaluates only the tokens that are not in
its cache.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.answer.thinking import with_thinking
from localllm.cache import keep_held
from localllm.cache.prompt_cache import Kept, read, restore, save
from localllm.confined import Confined
from localllm.errors import LocalLLMError
from localllm.generation.statistics import Piece, Statistics
from localllm.held import end_of, held, parted, without_thought
from localllm.options import AnswerOptions, SamplingOptions
from localllm.template import FAMILIES, ChatEncoder, ChatTemplate, Family, TemplateError, choose_template
from localllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.answer.parts import Part
    from localllm.model import Model
    from localllm.scheduler.request import Constraint

USUAL = AnswerOptions()
_TAIL = 200  # tokens at the end of a prompt that say whether a thought has begun
_HELD_BACK = 64  # tokens at the end of an answer that may not have been shown yet


class Conversation:
    """A conversation with a model. Close it to return its part of the cache.

    With `context_shift`, a full context drops the oldest turns. Without it, a prompt that does not fit raises
    ContextFull, and an answer that fills the context ends with the reason "context". `tell` receives a note, once each,
    about every change that the template required in the messages, and a note each time turns are dropped. Control
    tokens spelled in messages are text, unless `options.parse_special_in_content`.
    """

    def __init__(
        self,
        model: Model,
        template: ChatTemplate,
        sampling: SamplingOptions,
        tell: Callable[[str], None],
        options: AnswerOptions = USUAL,
        *,
        context_shift: bool = False,
    ) -> None:
        self._model, self._context = model, model.context
        self._words, self._template = _words(model), template
        self._special = frozenset(self._words.special.values())
        self._encoder = ChatEncoder(self._words, template.source, options.parse_special_in_content)
        self._tell, self._told = tell, set[str]()
        self._context_shift = context_shift
        self._system, self._added = "", ""  # the system prompt, and what `clear` put after it
        self._answered: list[int] = []  # tokens of the last answer
        self._begins: tuple[str, list[int]] = "", []  # the end of the last prompt, and the tokens given of the answer
        self.messages: list[dict[str, str]] = []
        self.use_options(options)
        self.use_sampling(sampling)
        self.session = model.session()

    # -- settings --------------------------------------------------------------------------------------------------

    def use_options(self, options: AnswerOptions) -> None:
        """Write the next answers by these options. Another system prompt replaces the first message."""
        self._asked_of = options.asked  # first, because it may raise
        self._max_tokens, self._ignore_eos = options.max_tokens, options.ignore_eos
        self._variables = with_thinking(self._template.source, options.template_variables)
        self._stop = (*options.stops, *self._template.stops)
        if options.system_prompt != self._system:
            self._system = options.system_prompt
            begun = [message for message in self.messages[:1] if message["role"] == "system"]
            self.messages = [*self._instructions(), *self.messages[len(begun) :]]

    def use_sampling(self, sampling: SamplingOptions) -> None:
        """Sample the next answers by these options."""
        self._sampler = self._model.sampler(sampling)

    @property
    def structured(self) -> bool:
        """Whether answers are held to a schema or a grammar."""
        return self._asked_of.structure is not None

    @property
    def data(self) -> bool:
        """Whether answers are JSON by a schema, whose lines no display may break."""
        structure = self._asked_of.structure
        return structure is not None and (structure.schema is not None or structure.any_object)

    # -- turns -----------------------------------------------------------------------------------------------------

    def say(self, text: str, cancel: threading.Event | None = None) -> Generator[Piece]:
        """Yield the answer to `text`, piece by piece; the last piece holds the statistics.

        A cancelled answer keeps what was written. A turn without any answer is removed: after ContextFull, after a
        TemplateError, and after a cancel during evaluation of the prompt.
        """
        return self._turn([*self.messages, {"role": "user", "content": text}], [], cancel)

    def again(self, cancel: threading.Event | None = None) -> Generator[Piece]:
        """Replace the last answer with a new one."""
        return self._turn(self._asked("no answer to write again"), [], cancel)

    def go_on(self, cancel: threading.Event | None = None) -> Generator[Piece]:
        """Continue the last answer, and yield the new part."""
        messages, said = self._asked("no answer to continue"), self.messages[-1]["content"]
        begun = self._answered or self._words.encode(said, add_special=False)
        return self._turn(messages, begun, cancel)

    def parts(self, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, tuple[Part, ...]]]:
        """Yield every piece of an answer with the parts of thought and content that it completes."""
        from localllm.answer.parts import Content

        reader = None
        for piece in pieces:
            if self.structured:  # the thought is gone already
                yield piece, ((Content(piece.text),) if piece.text else ())
                continue
            if reader is None:
                tail, begun = self._begins
                reader = parted(self._model, self._template, tail, self._stop, begun)
            yield piece, reader.push(piece)

    def undo(self) -> str:
        """Remove the last turn, and return its question."""
        *before, asked = self._asked("no turn to undo")
        self.messages, self._answered = before, []
        return asked["content"]

    def clear(self, system: str = "") -> None:
        """Start over, with `system` after the system prompt. The cache keeps the common prefix."""
        self._added = system
        self.messages, self._answered = self._instructions(), []

    def shift(self) -> int:
        """Drop the oldest turns, so that at most half of the context is used if possible. Return their number."""
        messages, dropped = self._shifted(self.messages, [])
        if dropped:
            self.messages = messages
        return dropped

    def resume(self, messages: list[dict[str, str]]) -> None:
        """Continue these messages; the next turn evaluates them. Their system message, if any, replaces this one's."""
        begun = [] if messages[:1] and messages[0]["role"] == "system" else self._instructions()
        self.messages, self._answered = [*begun, *messages], []

    def save(self, path: Path, force: bool = False) -> int:
        """Save text and cache to a file, and return its size in bytes. Errors as in `localllm.cache.prompt_cache`."""
        self.forget_rest()
        return save(path, self._model, self.session.sequence, self.messages, force)

    def load(self, path: Path) -> Kept:
        """Replace this conversation with the one in a file. After a CacheFileError this one continues unchanged.

        If `problem` is set, the cache in the file is unusable, and the next turn evaluates the text.
        """
        kept = read(path, self._model)
        restore(kept, self._model, self.session.sequence)
        self.messages, self._answered, self._added = list(kept.messages), [], ""
        return kept

    def forget_rest(self) -> None:
        """Remove tokens from the cache that are not in this conversation, such as turns that were undone."""
        try:
            held = self._prompt(self.messages, complete=True)
        except TemplateError:  # same as without messages
            held = []
        self.session.rewind(self.session.shared(held))

    def close(self) -> None:
        self.session.close()

    # -- internals -------------------------------------------------------------------------------------------------

    def _instructions(self) -> list[dict[str, str]]:
        """Return the system message, if there is one."""
        told = "\n\n".join(part for part in (self._system, self._added) if part)
        return [{"role": "system", "content": told}] if told else []

    def _asked(self, problem: str) -> list[dict[str, str]]:
        """Return the messages up to the last question that has an answer."""
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            raise LocalLLMError(f"{problem}: nothing has been answered yet")
        return self.messages[:-1]

    def _turn(
        self, messages: list[dict[str, str]], begun: list[int], cancel: threading.Event | None
    ) -> Generator[Piece]:
        """Yield the answer to the last of `messages`; its first tokens, `begun`, are given."""
        spent: Statistics | None = None
        tokens, text = list(begun), self._words.decode(begun)
        started = text
        try:
            prompt = [*self._prompt(messages), *tokens]
            self._begins = self._tail(prompt[: len(prompt) - len(tokens)]), begun
            if self._context_shift and len(prompt) >= self._context:
                messages, prompt = self._make_room(messages, tokens) or (messages, prompt)
            while True:
                constraint = self._constraint(prompt, len(tokens))
                self._sampler.restore(0)  # the prompt holds the history; the random numbers continue
                left = None if self._max_tokens is None else self._max_tokens - len(tokens) + len(begun)
                for piece in self._pieces(prompt, left, cancel, bool(tokens), constraint):
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

    def _constraint(self, prompt: list[int], begun: int) -> Constraint | None:
        """Return the constraint of the answer, past its first `begun` tokens, which end the prompt; None if it is free.

        LocalLLMError if these do not match it.
        """
        asked, answered = prompt[: len(prompt) - begun], prompt[len(prompt) - begun :]
        make = held(self._model, self._asked_of, self._template, self._tail(asked))
        if make is None:
            return None
        constraint = make()
        if constraint.validate(answered) < begun:
            raise LocalLLMError("the answer does not match what answers are held to, so it cannot be continued")
        for token in answered:
            constraint.accept(token)
        return constraint

    def _tail(self, prompt: list[int]) -> str:
        return end_of(self._words.decode(prompt[-_TAIL:], special=True))

    def _pieces(
        self,
        prompt: list[int],
        most: int | None,
        cancel: threading.Event | None,
        resumed: bool,
        constraint: Constraint | None,
    ) -> Iterator[Piece]:
        """Yield an answer; if it has a structure, without a thought before it."""
        pieces = self.session.generate(
            prompt, self._sampler, most, self._stop, cancel, self._ignore_eos, resumed, constraint
        )
        if self._asked_of.structure is None or resumed:
            return pieces
        return without_thought(pieces, self._model, self._template, self._tail(prompt), self._stop)

    def _whole(self, tokens: list[int], text: str) -> list[int] | None:
        """Return the tokens of exactly `text`, without a partial character or stop string that was held back."""
        tried = (tokens[:count] for count in range(len(tokens), max(len(tokens) - _HELD_BACK, 0), -1))
        return next((tried for tried in tried if self._words.decode(tried) == text), None)

    def _prompt(self, messages: list[dict[str, str]], complete: bool = False) -> list[int]:
        """Return the tokens of a conversation, reusing cached ones. A `complete` conversation ends without a prompt."""
        for message in messages:
            self._model.check_length(message["content"])
        rendered = self._template.render(messages, not complete, extra=self._variables)
        for note in rendered.notes:
            if note not in self._told:
                self._told.add(note)
                self._tell(note)
        self._model.check_length(rendered.text)
        fresh = self._encoder.encode(rendered.text)
        return keep_held(self.session.tokens, fresh, self._words.piece, self._special)

    def _shifted(self, messages: list[dict[str, str]], tokens: list[int]) -> tuple[list[dict[str, str]], int]:
        """Return `messages` without the oldest turns, and the number of turns dropped.

        Drop as few as possible so that the rest fits half of the context. Always keep the newest turn.
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
        """Return messages and prompt without the oldest turns, after a note; None if that makes no room."""
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


def template_of(
    model: Model, confined: Confined | None = None, given: Family | None = None
) -> tuple[ChatTemplate, str | None]:
    """Return the model's chat template, rendered in `confined`, and a note if the template is not from the file.

    `given` replaces the file's template.
    """
    model.refuse_chat()
    return choose_template(model.file.metadata, _words(model), confined, given)


def is_plain(template: ChatTemplate) -> bool:
    """Return whether neither the file nor its vocabulary defines the chat format of the model."""
    return template.source == FAMILIES[-1].source


def _turns(count: int) -> str:
    return "turn was" if count == 1 else f"{count} turns were"


def _words(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise LocalLLMError(f"{model.file.path}: the file has no tokenizer, so it cannot chat")
    return model.tokenizer
