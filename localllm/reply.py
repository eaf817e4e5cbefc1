"""A model's answer: a stream of pieces, then the whole text, reasoning, tool calls and usage."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from localllm.base.errors import LocalLLMError
from localllm.generation.statistics import Usage

if TYPE_CHECKING:
    from localllm.generation.parts import Part
    from localllm.generation.request import Event, Finished, Logprob
    from localllm.generation.stream import Stepper
    from localllm.output.reader import AnswerReader

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(slots=True)
class Piece:
    """A token of an answer, and the text that it completed. The last piece has a `finish_reason` instead of a token."""

    text: str  # new answer text, without reasoning and tool calls
    token: int | None = None
    reasoning: str = ""  # new reasoning text
    logprob: Logprob | None = None
    parts: Sequence[Part] = ()  # reasoning, text and tool calls, in order
    raw: str = ""  # the new text as the model wrote it
    finished: Finished | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None for all but the last piece."""
        if self.finished is None:
            return None
        return _REASONS[self.finished.reason]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call by the model. `arguments` is empty unless the model wrote a complete JSON object, which a truncated
    answer may lack.
    """

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def message(self) -> dict[str, Any]:
        """The call as an entry of an assistant message's `tool_calls`."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


class Reply(Iterator[Piece]):
    """An answer, which is generated while it is read.

    Iterate over a reply with `for` or `async for` to stream its pieces. The attributes wait for the end of the answer.

        reply = model.chat("Who are you?")
        print(reply)                            # or reply.text

    `text` excludes reasoning (`reasoning`) and tool calls (`tool_calls`). `close` ends the answer early, even while
    another thread reads it. If the answer fails, reading it raises the LocalLLMError.
    """

    def __init__(self, pieces: Iterator[Piece], stepper: Stepper | None = None) -> None:
        """`stepper` generates the pieces."""
        self._pieces, self._stepper = pieces, stepper
        self._lock = threading.Lock()  # held by the reading thread
        self._reader: int | None = None  # id of the reading thread
        self._closing = False
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, str, list[str]]] = {}
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._end: Finished | None = None

    def __next__(self) -> Piece:
        self._refuse_within()
        with self._lock:
            self._reader = threading.get_ident()
            try:
                piece = next(self._pieces)
                self._record(piece)
            finally:
                self._reader = None
        if self._closing:
            self._end_now()
        return piece

    def _refuse_within(self) -> None:
        """Raise LocalLLMError if this thread is already reading the answer, where waiting would deadlock."""
        if self._reader == threading.get_ident():
            raise LocalLLMError("a function that this answer calls cannot read it")
        if self._stepper is not None:
            self._stepper.refuse_within()

    def _record(self, piece: Piece) -> None:
        self._text.append(piece.text)
        if piece.reasoning:
            self._reasoning.append(piece.reasoning)
        if piece.token is not None:
            self._tokens.append(piece.token)
        if piece.logprob is not None:
            self._logprobs.append(piece.logprob)
        if piece.parts:
            self._collect(piece.parts)
        if piece.finished is not None:
            self._end = piece.finished

    def _collect(self, parts: Iterable[Part]) -> None:
        from localllm.generation.parts import CallArguments, CallStart

        for part in parts:
            if isinstance(part, CallStart):
                self._calls[part.index] = (part.id, part.name, [])
            elif isinstance(part, CallArguments):
                self._calls[part.index][2].append(part.json)

    # -- the whole answer ------------------------------------------------------------------------------------------

    def wait(self) -> Reply:
        """Read the answer to its end; return this reply."""
        for _ in self:
            pass
        return self

    def __str__(self) -> str:
        return self.text

    def __format__(self, spec: str) -> str:
        return format(self.text, spec)

    def __repr__(self) -> str:
        text = "".join(self._text)
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        return f"Reply({shown!r}, finish_reason={self._reason!r})" if self._end is not None else f"Reply({shown!r} ...)"

    @property
    def text(self) -> str:
        """The answer, without reasoning and tool calls."""
        return "".join(self.wait()._text)

    @property
    def reasoning(self) -> str:
        """The reasoning of the answer; "" without reasoning."""
        return "".join(self.wait()._reasoning)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls of the answer."""
        self.wait()
        return [ToolCall(id_, name, _arguments("".join(text))) for id_, name, text in self._calls.values()]

    @property
    def tokens(self) -> list[int]:
        """The token ids of the answer, reasoning included."""
        return list(self.wait()._tokens)

    @property
    def logprobs(self) -> list[Logprob]:
        """The log-probability of each token; empty unless `logprobs` was given."""
        return list(self.wait()._logprobs)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended: "stop" (end-of-generation token or stop string), "length" (`max_tokens` or the
        context), "tool_calls" or "cancelled".
        """
        self.wait()
        return self._reason

    @property
    def end(self) -> Finished:
        """The last event, with the exact reason and the stop string that ended the answer."""
        self.wait()
        if self._end is None:
            raise LocalLLMError("this answer was closed before its end, so it has no usage and no exact reason")
        return self._end

    @property
    def usage(self) -> Usage:
        """Token counts, times and speeds."""
        return self.end.usage

    @property
    def message(self) -> dict[str, Any]:
        """The answer as an assistant message, to append to the messages of the conversation."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if calls := self.tool_calls:
            found["tool_calls"] = [call.message for call in calls]
        return found

    @property
    def _reason(self) -> FinishReason:
        return "cancelled" if self._end is None else _REASONS[self._end.reason]

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the answer and free its cache blocks: now, or after the piece that another thread is reading."""
        self._closing = True
        self._end_now()

    def _end_now(self) -> None:
        """Close the stream of pieces, or let the reading thread do so after its current piece."""
        from localllm.generation.stream import Uninterrupted

        with Uninterrupted():
            if (close := getattr(self._pieces, "close", None)) is None or not self._lock.acquire(blocking=False):
                return
            try:
                close()
            finally:
                self._lock.release()

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- asyncio ---------------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Piece]:
        import asyncio  # imported late: asyncio is slow to import

        try:
            while (piece := await asyncio.to_thread(next, self, None)) is not None:
                yield piece
        except asyncio.CancelledError:
            self.close()
            raise

    def __await__(self) -> Generator[Any, None, Reply]:
        """Wait for the end of the answer without blocking the event loop; return this reply. Cancelling the wait ends
        the answer.
        """
        import asyncio

        try:
            return (yield from asyncio.to_thread(self.wait).__await__())
        except asyncio.CancelledError:
            self.close()
            raise


_REASONS: dict[str, FinishReason] = {
    "end": "stop", "stop": "stop", "length": "length", "context": "length", "cancelled": "cancelled",
    "tool_calls": "tool_calls",
}  # fmt: skip


def pieces_of(events: Iterator[Event], reader: AnswerReader | None = None) -> Generator[Piece]:
    """Yield the pieces of an answer from its events. `reader` parses reasoning and tool calls in the text."""
    from localllm.generation.parts import Content, Reasoning
    from localllm.generation.request import Finished, Token
    from localllm.output.reader import with_parts

    try:
        for event in events:
            if reader is None and isinstance(event, Token):  # fast path for plain text
                yield Piece(event.text, event.token, "", event.logprob, (), event.text)
                continue
            event = with_parts(event, reader)
            if not isinstance(event, Token | Finished):
                continue
            text = "".join([part.text for part in event.parts if isinstance(part, Content)])
            reasoning = "".join([part.text for part in event.parts if isinstance(part, Reasoning)])
            if isinstance(event, Finished):
                yield Piece(text, None, reasoning, None, event.parts, event.text, event)
            else:
                yield Piece(text, event.token, reasoning, event.logprob, event.parts, event.text)
    finally:
        if (close := getattr(events, "close", None)) is not None:
            close()


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
