"""Convert the events of a turn to a chat completion: the chunks of a stream, or the complete object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.generation.request import Event, Finished, Prefilled, Started, Token
from localllm.server.collected import Collected, timings
from localllm.server.openai.generation import GenerationBody
from localllm.server.openai.head import DONE, FINISHED, ReplyHead, usage_of
from localllm.server.openai.logprobs import chat_entry, chat_logprobs
from localllm.server.streams import Writer
from localllm.server.turn import Json

CHUNK, WHOLE = "chat.completion.chunk", "chat.completion"


class ChatWriter(Writer[Event]):
    """Converts the events of `n` choices to chunks, or to one object.

    The chunk with the role is sent with the first token, unless progress is requested. Benchmark tools treat the first
    chunk as the end of prefill, and an error during prefill can still set the HTTP status. With `legacy`, the response
    has `function_call` instead of `tool_calls`. `extra` are fields of the object or of the first chunk.
    """

    def __init__(
        self, head: ReplyHead, n: int, asked: GenerationBody, legacy: bool = False, extra: Json | None = None
    ) -> None:
        self._answers = [Collected() for _ in range(n)]
        self._head, self._asked, self._legacy, self._extra = head, asked, legacy, extra or {}
        self._entries: list[list[Json]] = [[] for _ in range(n)]  # unsent log probabilities of each choice
        self._begun = [False] * n  # whether each choice's chunk with the role was sent

    def add(self, event: Event) -> None:
        """Add an event."""
        self._answers[event.choice].add(event)
        if isinstance(event, Token) and event.logprob is not None:
            self._entries[event.choice].append(chat_entry(event.logprob))

    def events(self, event: Event) -> Iterator[Json]:
        """Yield the chunks for an event."""
        for chunk in self._chunks(event):
            yield chunk | self._extra
            self._extra = {}

    def last(self) -> Iterator[bytes | Json]:
        """Yield the end of a stream, with the usage if requested."""
        if self._asked.shows_usage:
            yield self._whole(CHUNK, ())
        yield DONE

    def whole(self) -> Json:
        """Return the chat completion."""
        return self._whole(WHOLE, [self._choice(number) for number in range(len(self._answers))]) | self._extra

    def _whole(self, kind: str, choices: Sequence[Json]) -> Json:
        numbers = {"usage": usage_of(self._answers), "timings": timings(self._answers[0].usage)}
        return self._head.body(kind, choices) | numbers

    def _chunks(self, event: Event) -> Iterator[Json]:
        answer, progress = event.choice, self._answers[event.choice].progress
        if isinstance(event, Token | Finished) and not self._begun[answer]:
            yield self._begin(answer)
        self.add(event)
        match event:
            case Started() if self._asked.return_progress:
                yield self._begin(answer) | progress.prefill
            case Prefilled() if self._asked.return_progress:
                yield self._chunk(answer, {}) | progress.prefill
            case Token() | Finished():
                for part in event.parts:
                    times = {"timings": progress.timings} if self._asked.timings_per_token else {}
                    yield self._chunk(answer, delta(part, self._legacy)) | times
        if isinstance(event, Finished):
            if self._entries[answer]:
                yield self._chunk(answer, {"content": ""})
            times = {} if self._asked.shows_usage else {"timings": timings(event.usage)}
            yield self._chunk(answer, {}, finish_reason(event, self._legacy)) | times

    def _begin(self, answer: int) -> Json:
        self._begun[answer] = True
        return self._chunk(answer, {"role": "assistant", "content": None})

    def _chunk(self, answer: int, delta: Json, finish: str | None = None) -> Json:
        choice = {"index": answer, "delta": delta, "logprobs": self._logprobs(answer), "finish_reason": finish}
        return self._head.body(CHUNK, (choice,)) | ({"usage": None} if self._asked.shows_usage else {})

    def _choice(self, number: int) -> Json:
        answer = self._answers[number]
        assert answer.done is not None
        return {
            "index": number,
            "message": message(answer, self._legacy),
            "logprobs": self._logprobs(number),
            "finish_reason": finish_reason(answer.done, self._legacy),
        }

    def _logprobs(self, answer: int) -> Json | None:
        """Return the log probabilities that were not sent yet."""
        entries, self._entries[answer] = self._entries[answer], []
        return chat_logprobs(entries) if entries else None


def delta(part: Part, legacy: bool) -> Json:
    """Return the delta of a part."""
    match part:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case CallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": id, "type": "function", "function": function}
            return {"function_call": function} if legacy else {"tool_calls": [call]}
        case CallArguments(index, text):
            function = {"arguments": text}
            return {"function_call": function} if legacy else {"tool_calls": [{"index": index, "function": function}]}


def finish_reason(done: Finished, legacy: bool = False) -> str:
    """Return OpenAI's finish_reason."""
    reason = FINISHED[done.reason]
    return "function_call" if legacy and reason == "tool_calls" else reason


def message(answer: Collected, legacy: bool = False) -> Json:
    """Return a choice as a message. Its content is null if it only has tool calls."""
    calls: Sequence[Any] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls.values()
    ]
    content = answer.content or (None if calls else "")
    found: Json = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        found["reasoning_content"] = answer.reasoning
    if calls and legacy:
        found["function_call"] = calls[0]["function"]
    elif calls:
        found["tool_calls"] = calls
    return found
