"""A conversation: renders turns with a chat template and streams the answer in pieces.

Every turn renders the whole history again. The model only evaluates tokens that are not in its KV cache.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.base.errors import LocalLLMError
from localllm.constrained.request import answer_constraint, prompt_tail
from localllm.engine import ContextFull, Placed, align_tokens
from localllm.engine.prefix import same
from localllm.generation.request import Event, Finished, Request, Token
from localllm.generation.statistics import Usage
from localllm.loading.media_parts import Absent, Located, MediaParts, has_media
from localllm.loading.numbered import NumberedSpans
from localllm.options import AnswerOptions, SamplingOptions
from localllm.output.reader import AnswerReader
from localllm.reply import Piece, Reply, pieces_of
from localllm.sandbox import Confined
from localllm.saved.attachments import Attachments, ContextCheck, Progress, described, left_out, restored, unread
from localllm.saved.chat_files import keep_in_file, take_up
from localllm.saved.prompt_cache import Kept, content_of, read_prompt_cache
from localllm.template import FAMILIES, ChatEncoder, ChatTemplate, Family, TemplateError, choose_template
from localllm.template.formats import find_format
from localllm.template.reasoning import with_thinking
from localllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.generation.request import AnswerObserver
    from localllm.loading.templated import Templated
    from localllm.sampling.constraint import Constraint

USUAL = AnswerOptions()
_TAIL = 200  # tokens at the end of a prompt that are checked for the start of reasoning
_HELD_BACK = 64  # maximum tokens at the end of an answer whose text may be held back


class Conversation:
    """A conversation with a model.

    With `context_shift`, a full context drops the oldest turns. Without it, a prompt that does not fit raises
    ContextFull, and an answer that fills the context ends with the reason "context". `tell` is called once with a note
    about each change to the messages that the template requires, and each time turns are dropped. Control tokens in
    messages are encoded as plain text, unless `options.parse_special_in_content` is set. `first_messages` follow the
    system prompt in every conversation, also after `clear`; they do not count as turns.
    """

    def __init__(
        self,
        model: Templated,
        template: ChatTemplate,
        sampling: SamplingOptions,
        tell: Callable[[str], None],
        options: AnswerOptions = USUAL,
        *,
        context_shift: bool = False,
        first_messages: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self._model, self._context = model, model.context
        self._tokenizer, self._template = _tokenizer_of(model), template
        self._special = frozenset(self._tokenizer.special.values())
        self._format = find_format(template.source)
        self._visible = self._format.visible(self._tokenizer.special)
        self._parted = any(map(self._tokenizer.is_control, self._visible))  # whether raw text shows control tokens
        self.observer: AnswerObserver | None = None  # observes the generation of answers
        self._encoder = ChatEncoder(self._tokenizer, template.source, options.parse_special_in_content)
        self._tell, self._told = tell, set[str]()
        self._context_shift = context_shift
        self._system, self._added = "", ""  # the system prompt, and the text appended by `clear`
        self._answered: list[int] = []  # tokens of the last answer
        self._media = MediaParts()  # whose markers are in the messages
        self._spans = NumberedSpans(lambda: model.engine)  # the pictures and sounds of `tokens`
        self._restored: list[Placed] = []  # pictures and sounds from a file; keeps their ids
        self.tokens: list[int] = []  # evaluated tokens of the conversation
        self._first = [dict(message) for message in first_messages]
        self.messages: list[dict[str, str]] = []
        self._last: Callable[[], Reply | None] = lambda: None  # weak reference to the last reply
        self.use_options(options)
        self.messages = self._opening()
        self.use_sampling(sampling)
        assert model.stepper is not None  # `stepper` raises LocalLLMError if the model predicts no tokens

    # -- settings --------------------------------------------------------------------------------------------------

    def use_options(self, options: AnswerOptions) -> None:
        """Use these options for later answers. A different system prompt replaces the first message."""
        self._asked_of = options.asked  # assigned first: `asked` may raise an error
        self._max_tokens, self._ignore_eos = options.max_tokens, options.ignore_eos
        self._variables = with_thinking(self._template.source, options.template_variables)
        self._stop = (*options.stops, *self._template.stops)
        if options.system_prompt != self._system:
            self._system = options.system_prompt
            begun = [message for message in self.messages[:1] if message["role"] == "system"]
            self.messages = [*self._instructions(), *self.messages[len(begun) :]]

    def use_sampling(self, sampling: SamplingOptions) -> None:
        """Use these sampling options for later answers."""
        self._sampler = self._model.sampler(sampling)

    @property
    def begun(self) -> bool:
        """Whether the conversation has a turn, or other messages than those before the first turn."""
        return self.messages != self._opening()

    @property
    def told(self) -> list[dict[str, str]]:
        """The messages as text, with a name in brackets in place of each picture and sound."""
        return self.located[0]

    @property
    def located(self) -> tuple[list[dict[str, str]], list[Located]]:
        """The messages as in `told`, and the pictures and sounds with the places of their names."""
        return self._media.located(self.messages)

    def attachments(self) -> Attachments:
        """Return pictures and sounds as files, for saving them with `told`. A note names files that are too
        large."""
        located = self.located[1]
        found = described(located, self._model.encoders.projector.rate if located and self._model.reads else 0)
        if found.problems and (note := left_out(found.problems)) not in self._told:
            self._told.add(note)
            self._tell(note)
        return found

    @property
    def structured(self) -> bool:
        """Whether answers are constrained by a schema or a grammar."""
        return self._asked_of.structure is not None

    @property
    def data(self) -> bool:
        """Whether answers are constrained to JSON, whose lines must not be wrapped when displayed."""
        structure = self._asked_of.structure
        return structure is not None and (structure.schema is not None or structure.any_object)

    def shown(self, piece: Piece) -> str:
        """Return the text of a piece as the model wrote it. If the raw text would show the control tokens of reasoning
        and tool calls, or answers are constrained, return only the content.
        """
        return piece.text if self._parted or self.structured else piece.raw

    # -- turns -----------------------------------------------------------------------------------------------------

    def say(self, text: str | Sequence[Mapping[str, Any]], cancel: threading.Event | None = None) -> Reply:
        """Return the reply to `text`, or to parts: texts, pictures and sounds as in `Model.chat`.

        Reading the reply generates the answer; read it before the next turn.

        The turn is added to the conversation when its reply is read. The next turn closes a reply that was not read to
        the end. A cancelled answer keeps the text so far. A turn without any answer (after ContextFull, TemplateError,
        or a cancel during prefill) is not added.
        """
        self._close_last()
        content = text if isinstance(text, str) else self._content(text)
        return self._reply([*self.messages, {"role": "user", "content": content}], [], cancel)

    def _content(self, parts: Any) -> str:
        """Return the text of a message's parts, with markers in place of pictures and sounds."""
        if not isinstance(parts, list | tuple) or not has_media([{"content": parts}]):
            raise LocalLLMError(f"say expects a text, or parts with media, got {parts!r:.60}; see also model.chat")
        encoders = self._model.encoders
        [message] = self._media.flattened([{"role": "user", "content": parts}], encoders.parts, "the message")
        content: str = message["content"]
        return content

    def again(self, cancel: threading.Event | None = None) -> Reply:
        """Replace the last answer with a new one."""
        self._close_last()
        return self._reply(self._asked("no answer to regenerate"), [], cancel)

    def go_on(self, cancel: threading.Event | None = None) -> Reply:
        """Continue the last answer; return the new part."""
        self._close_last()
        messages, said = self._asked("no answer to continue"), self.messages[-1]["content"]
        begun = self._answered or self._tokenizer.encode(said, add_special=False)
        return self._reply(messages, begun, cancel)

    def undo(self) -> str:
        """Remove the last turn, and return its user message."""
        *before, asked = self._asked("no turn to undo")
        self.messages, self._answered = before, []
        return self._media.shown(asked["content"])

    def clear(self, system: str = "") -> None:
        """Clear the conversation, with `system` appended to the system prompt. The cache keeps the common prefix."""
        self._added = system
        self.messages, self._answered = self._opening(), []

    def shift(self) -> int:
        """Drop the oldest turns until at most half of the context is used, but keep the newest turn. Return the number
        of dropped turns.
        """
        messages, dropped = self._shifted(self.messages, [])
        if dropped:
            self.messages = messages
        return dropped

    def resume(
        self,
        messages: list[dict[str, str]],
        located: Sequence[Located] = (),
        problems: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        """Replace the conversation with `messages`, which the next turn evaluates. A leading system message replaces
        the system prompt. `located` are the pictures and sounds among them; `progress` shows how many are decoded.
        A note names those that the model does not get, and the `problems` of others.
        """
        begun = [] if messages[:1] and messages[0]["role"] == "system" else self._instructions()
        media, told = self._with_media(messages, located, problems, progress)
        self._media, self.messages, self._answered = media, [*begun, *told], []

    def save(self, path: Path, force: bool = False) -> int:
        """Save text and KV cache to a file and return its size in bytes. Raises the errors of
        `localllm.saved.prompt_cache`.
        """
        self.forget_rest()
        written = keep_in_file(path, self._model, self.tokens, self.told, force, self.attachments())[1]
        if reasons := unread(self.located[1]):
            self._tell(left_out(reasons, f"not in {path}"))
        return written

    def load(self, path: Path, progress: Progress | None = None) -> Kept:
        """Replace this conversation with one from a file. After an error or Ctrl-C, this conversation is unchanged.

        `progress` shows how many pictures and sounds are decoded, which may take minutes. If the result's `problem` is
        set, the file's cache is unusable and the next turn evaluates the text.
        """
        kept = read_prompt_cache(path, self._model)
        located, problems = restored(kept.messages, kept.attachments, lambda key: content_of(kept, key))
        media, messages = self._with_media(kept.messages, located, problems, progress)
        tokens = take_up(kept, self._model)
        self._restored, self.tokens = kept.media, tokens
        self._media, self.messages, self._answered, self._added = media, messages, [], ""
        return kept

    def forget_rest(self) -> None:
        """Drop evaluated tokens that are not in this conversation, such as the tokens of undone turns."""
        try:
            held = self._prompt(self.messages, complete=True)
        except TemplateError:  # treated as an empty conversation
            held = []
        del self.tokens[same(self.tokens, held) :]

    # -- internals -------------------------------------------------------------------------------------------------

    def _instructions(self) -> list[dict[str, str]]:
        """Return a list with the system message, or an empty list without a system prompt."""
        told = "\n\n".join(part for part in (self._system, self._added) if part)
        return [{"role": "system", "content": told}] if told else []

    def _with_media(
        self,
        told: Sequence[dict[str, str]],
        located: Sequence[Located],
        problems: Sequence[str],
        progress: Progress | None,
    ) -> tuple[MediaParts, list[dict[str, str]]]:
        """Return saved messages with markers in place of the names at `located`, and the media of the markers."""
        media = MediaParts()
        count = sum(not isinstance(each.medium.source, Absent) for each in located)
        check = ContextCheck(lambda each: self._model.encoders.tokens(each), self._context, count, progress)
        messages, refused = media.put_back(told, located, check)
        if found := [*problems, *refused]:
            self._tell(left_out(found))
        return media, messages

    def _opening(self) -> list[dict[str, str]]:
        """Return the messages before the first turn."""
        return [*self._instructions(), *self._first]

    def _asked(self, problem: str) -> list[dict[str, str]]:
        """Return the messages before the last answer. Without an answer, raise LocalLLMError with `problem`."""
        answered = self.messages[-1:] and self.messages[-1]["role"] == "assistant" and len(self.messages) > 1
        if not answered or not self.begun:
            raise LocalLLMError(f"{problem}: nothing has been answered yet")
        return self.messages[:-1]

    def _reply(self, messages: list[dict[str, str]], begun: list[int], cancel: threading.Event | None) -> Reply:
        reply = Reply(self._turn(messages, begun, cancel), self._model.stepper)
        self._last = weakref.ref(reply)
        return reply

    def _close_last(self) -> None:
        """Close the last reply, which would otherwise overwrite the messages of later turns."""
        if (last := self._last()) is not None:
            last.close()

    def _turn(
        self, messages: list[dict[str, str]], begun: list[int], cancel: threading.Event | None
    ) -> Generator[Piece]:
        """Yield the answer to the last message, as a continuation of the tokens `begun`, which are not yielded."""
        turn = _Turn(messages, list(begun), self._decoded(begun))
        started = text = self._tokenizer.decode(begun)
        ended = False
        try:
            turn.messages, prompt = self._fitting(messages, begun)
            reader = self._reader(prompt[: len(prompt) - len(begun)], begun)
            for piece in pieces_of(self._events(turn, prompt, len(begun), cancel), reader):
                text += self.shown(piece)
                ended = piece.finished is not None and piece.finished.reason != "cancelled"
                yield piece
        finally:
            if text != started or ended:
                self.messages = [*turn.messages, {"role": "assistant", "content": text}]
                self._answered = turn.tokens

    def _events(self, turn: _Turn, prompt: list[int], begun: int, cancel: threading.Event | None) -> Generator[Event]:
        """Yield the events of an answer. If the context fills up, drop the oldest turns and continue."""
        spent: Usage | None = None
        while True:
            constraint = self._constraint(prompt, len(turn.tokens))
            left = None if self._max_tokens is None else self._max_tokens - len(turn.tokens) + begun
            last: Finished | None = None
            given = len(turn.tokens)
            request, sampler = self._request(prompt, left, given, constraint), self._sampler
            stream = self._model.stepper.stream(request, cancel, sampler=sampler)
            try:
                for event in stream:
                    if isinstance(event, Finished):
                        last = event
                        break
                    if isinstance(event, Token):
                        turn.add(event)
                    yield event
            finally:
                stream.close()
                if last is None and self._sampler is sampler:  # the sampler may have sampled tokens that were not read
                    self._sampler = sampler.rewound(len(turn.tokens) - given)
                evaluated = [*prompt, *turn.tokens[given:]]
                self.tokens = evaluated[: last.cached_tokens if last is not None else len(evaluated) - 1]
            assert last is not None, "an answer ends with an event"
            spent = last.usage if spent is None else spent.and_then(last.usage)
            full = self._context_shift and last.reason == "context"
            whole = self._whole(turn) if full else None
            room = self._make_room(turn.messages, whole) if whole is not None else None
            if room is None or whole is None:
                yield replace(last, usage=spent)
                return
            (turn.messages, prompt), turn.tokens = room, whole

    def _request(self, prompt: list[int], left: int | None, given: int, constraint: Constraint | None) -> Request:
        """Return the request for an answer whose first `given` tokens are at the end of the prompt."""
        self._sampler.begin()  # clears the history, which the prompt repeats; keeps the random state
        spanned = self._spans.spanned(prompt)
        self._spans.forget_others(spanned)
        return Request(
            spanned,
            self._sampler.options,
            left,
            self._stop,
            self._ignore_eos,
            constraint=None if constraint is None else lambda: constraint,
            visible=self._visible,
            resumed=given > 0,
            observer=self.observer,
        )

    def _reader(self, prompt: list[int], begun: list[int]) -> AnswerReader:
        """Return a reader that separates the reasoning from the answer, positioned after the answer's first tokens
        `begun`.
        """
        reader = AnswerReader(self._format, prompt_tail=self._tail(prompt))
        reader.push(self._decoded(begun))
        return reader

    def _decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of answer tokens, as the model wrote it."""
        decoder = self._tokenizer.stream(visible=self._visible)
        return "".join([*map(decoder.push, tokens), decoder.finish()])

    def _constraint(self, prompt: list[int], begun: int) -> Constraint | None:
        """Return the constraint of an answer whose first `begun` tokens are at the end of the prompt.

        The constraint has accepted these tokens. Raise LocalLLMError if it does not allow them. Return None if answers
        are unconstrained.
        """
        asked, answered = prompt[: len(prompt) - begun], prompt[len(prompt) - begun :]
        make = answer_constraint(self._model, self._asked_of, self._template.source, self._tail(asked))
        if make is None:
            return None
        constraint = make()
        if constraint.validate(answered) < begun:
            raise LocalLLMError("the answer does not match the grammar or schema, so it cannot be continued")
        for token in answered:
            constraint.accept(token)
        return constraint

    def _tail(self, prompt: list[int]) -> str:
        text = [token for token in prompt[-_TAIL:] if token >= 0]
        return prompt_tail(self._tokenizer.decode(text, special=True))

    def _whole(self, turn: _Turn) -> list[int] | None:
        """Return the leading answer tokens that decode to exactly the text so far, excluding held-back text; None if no
        prefix does.
        """
        tokens = turn.tokens
        tried = (tokens[:count] for count in range(len(tokens), max(len(tokens) - _HELD_BACK, 0), -1))
        return next((tried for tried in tried if self._decoded(tried) == turn.text), None)

    def _prompt(self, messages: list[dict[str, str]], complete: bool = False) -> list[int]:
        """Return the tokens of a conversation, reusing cached tokens for text that is already evaluated.

        If `complete`, the prompt ends without a generation prompt.
        """
        for message in messages:
            self._model.check_length(message["content"])
        messages = self._media.readable(messages)
        rendered = self._template.render(messages, not complete, extra=self._variables)
        for note in rendered.notes:
            if note not in self._told:
                self._told.add(note)
                self._tell(note)
        self._model.check_length(rendered.text)
        fresh = self._spans.numbered(self._model.laid_out(self._encoder, rendered.text, self._media, messages))
        return align_tokens(self.tokens, fresh, self._tokenizer.piece, self._special)

    def _shifted(self, messages: list[dict[str, str]], tokens: list[int]) -> tuple[list[dict[str, str]], int]:
        """Return `messages` without the oldest turns, and the number of turns dropped.

        Drop as few turns as possible to fit the others into half of the context. Always keep the newest turn.
        """
        kept = len(opening) if messages[: len(opening := self._opening())] == opening else 0
        starts = [number for number, message in enumerate(messages) if message["role"] == "user" and number >= kept]
        if len(starts) < 2:
            return messages, 0

        def without(turns: int) -> list[dict[str, str]]:
            return [*messages[: starts[0]], *messages[starts[turns] :]]

        def fits(turns: int) -> bool:
            try:
                return len(self._prompt(without(turns))) + len(tokens) <= self._context // 2
            except ContextFull:
                return False

        dropped = 1 + bisect_left(range(1, len(starts) - 1), True, key=fits)
        return without(dropped), dropped

    def _fitting(self, messages: list[dict[str, str]], begun: list[int]) -> tuple[list[dict[str, str]], list[int]]:
        """Return the messages, without the oldest turns if they exceed the context, and their prompt with `begun`."""
        try:
            prompt = [*self._prompt(messages), *begun]
        except ContextFull:  # known before all pictures are prepared
            if not self._context_shift or (room := self._make_room(messages, begun)) is None:
                raise
            return room
        full = self._context_shift and len(prompt) >= self._context
        return (self._make_room(messages, begun) if full else None) or (messages, prompt)

    def _make_room(
        self, messages: list[dict[str, str]], tokens: list[int]
    ) -> tuple[list[dict[str, str]], list[int]] | None:
        """Drop the oldest turns, with a note, and return the messages and the prompt; None if the prompt still does not
        fit.
        """
        messages, dropped = self._shifted(messages, tokens)
        prompt = [*self._prompt(messages), *tokens]
        if not dropped or len(prompt) >= self._context:
            return None
        again = len(prompt) - same(self.tokens, prompt)
        self._tell(
            f"the context of {self._context} tokens is full: the oldest {_turns(dropped)} dropped, {again} of the "
            f"{len(prompt)} tokens left are evaluated again"
        )
        return messages, prompt


@dataclass(slots=True)
class _Turn:
    """The current turn: messages up to the user message, tokens of the answer so far, and their text."""

    messages: list[dict[str, str]]
    tokens: list[int]
    text: str

    def add(self, event: Token) -> None:
        self.tokens.append(event.token)
        self.text += event.text


def template_of(
    model: Templated, confined: Confined | None = None, given: Family | None = None
) -> tuple[ChatTemplate, str | None]:
    """Return the model's chat template, rendered in `confined`, and a note if the template is not from the GGUF.

    `given` replaces the GGUF's template.
    """
    model.refuse_chat()
    return choose_template(model.file.metadata, _tokenizer_of(model), confined, given)


def is_plain(template: ChatTemplate) -> bool:
    """Return whether neither the GGUF's template nor its vocabulary defines the chat format."""
    return template.source == FAMILIES[-1].source


def _turns(count: int) -> str:
    return "turn was" if count == 1 else f"{count} turns were"


def _tokenizer_of(model: Templated) -> Tokenizer:
    if model.maybe_tokenizer is None:
        raise LocalLLMError(f"{model.file.path}: the file has no tokenizer, so it cannot chat")
    return model.maybe_tokenizer
