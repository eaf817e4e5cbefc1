"""Convert the events of a turn to a chat completion: the chunks of a stream, or the complete object."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.generation.request import Event, Finished, Prefilled, Started, Token
from localllm.server.collected import Collected
from localllm.server.openai.accounts import Clock, Stopwatch, timings, usage_of
from localllm.server.openai.head import FINISHED, ReplyHead
from localllm.server.openai.logprobs import chat_entry, chat_logprobs
from localllm.server.openai.request import Show
from localllm.server.turn import Json

CHUNK, WHOLE = "chat.completion.chunk", "chat.completion"


class ChatStream:
    """Converts the events of `n` choices to chunks.

    The chunk with the role is sent with the first token, unless progress is requested. Benchmark tools treat the first
    chunk as the end of prefill, and an error during prefill can still set the HTTP status.
    """

    def __init__(self, head: ReplyHead, n: int, show: Show, clock: Clock = time.perf_counter) -> None:
        self.answers = [Collected() for _ in range(n)]
        self._head, self._show = head, show
        self._watches = [Stopwatch(clock) for _ in range(n)]
        self._entries: list[list[Json]] = [[] for _ in range(n)]  # unsent log probabilities of each choice
        self._begun = [False] * n  # whether each choice's chunk with the role was sent

    def chunks(self, event: Event) -> Iterator[Json]:
        """Yield the chunks for an event."""
        answer = event.choice
        self.answers[answer].add(event)
        if self._show.timings or self._show.progress:
            self._watches[answer].add(event)
        if isinstance(event, Token | Finished) and not self._begun[answer]:
            yield self._begin(answer)
        match event:
            case Started() if self._show.progress:
                yield self._begin(answer) | {"prompt_progress": self._watches[answer].progress(event)}
            case Prefilled() if self._show.progress:
                yield self._chunk(answer, {}) | {"prompt_progress": self._watches[answer].progress(event)}
            case Token():
                if event.logprob is not None:
                    self._entries[answer].append(chat_entry(event.logprob))
                yield from self._parts(event)
            case Finished():
                yield from self._parts(event)
                yield from self._end(event)

    def last(self) -> Iterator[Json]:
        """Yield the chunk after all choices, which has the usage if requested."""
        if self._show.usage:
            body = self._head.body(CHUNK, ()) | {"usage": usage_of(self.answers)}
            yield body | {"timings": timings(self.answers[0].usage)}

    def _begin(self, answer: int) -> Json:
        self._begun[answer] = True
        return self._chunk(answer, {"role": "assistant", "content": None})

    def _parts(self, event: Token | Finished) -> Iterator[Json]:
        for part in event.parts:
            chunk = self._chunk(event.choice, delta(part, self._show.legacy))
            if self._show.timings:
                chunk["timings"] = self._watches[event.choice].timings
            yield chunk

    def _end(self, event: Finished) -> Iterator[Json]:
        if self._entries[event.choice]:
            yield self._chunk(event.choice, {"content": ""})
        chunk = self._chunk(event.choice, {}, finish_reason(event, self._show.legacy))
        if not self._show.usage:
            chunk["timings"] = timings(event.usage)
        yield chunk

    def _chunk(self, answer: int, delta: Json, finish: str | None = None) -> Json:
        entries, self._entries[answer] = self._entries[answer], []
        logprobs = chat_logprobs(entries) if entries else None
        choice = {"index": answer, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._head.body(CHUNK, (choice,)) | ({"usage": None} if self._show.usage else {})


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


class WholeChat:
    """Assembles the choices of a turn into one object."""

    def __init__(self, head: ReplyHead, n: int, show: Show) -> None:
        self._answers = [Collected() for _ in range(n)]
        self._head, self._show = head, show
        self._entries: list[list[Json]] = [[] for _ in range(n)]

    def add(self, event: Event) -> None:
        """Add an event."""
        self._answers[event.choice].add(event)
        if isinstance(event, Token) and event.logprob is not None:
            self._entries[event.choice].append(chat_entry(event.logprob))

    def body(self) -> Json:
        """Return the chat completion."""
        choices = [self._choice(number) for number in range(len(self._answers))]
        body = self._head.body(WHOLE, choices) | {"usage": usage_of(self._answers)}
        return body | {"timings": timings(self._answers[0].usage)}

    def _choice(self, number: int) -> Json:
        answer = self._answers[number]
        assert answer.done is not None
        return {
            "index": number,
            "message": message(answer, self._show.legacy),
            "logprobs": chat_logprobs(self._entries[number]) if self._entries[number] else None,
            "finish_reason": finish_reason(answer.done, self._show.legacy),
        }


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
