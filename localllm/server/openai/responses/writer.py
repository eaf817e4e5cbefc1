"""Convert the events of a turn to the events of a response. The last event holds the complete response."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.generation.request import Event, Finished, Prefilled, Started, Token
from localllm.server.collected import Collected, timings
from localllm.server.errors import refusal_of
from localllm.server.openai.generation import GenerationBody
from localllm.server.openai.head import ReplyHead
from localllm.server.openai.logprobs import chat_entry
from localllm.server.openai.responses.output import CustomCall, FunctionCall, Item, Message, ReasoningItem
from localllm.server.openai.responses.tools import Named
from localllm.server.streams import Writer
from localllm.server.turn import Json

CODES = {"rate_limit": "rate_limit_exceeded", "invalid_request": "invalid_prompt"}  # OpenAI's error codes


class ResponseWriter(Writer[Event]):
    """Converts the events of a turn to events of a response."""

    named = True

    def __init__(
        self,
        head: ReplyHead,
        repeated: Json,
        tools: Mapping[str, Named],
        asked: GenerationBody,
        empty: bool = False,
    ) -> None:
        self._head, self._repeated, self._tools, self._asked = head, repeated, tools, asked
        self._answer = Collected()
        self._items: list[Item] = []
        self._entries: list[Json] = []
        self._open: Item | None = None
        self._status = "completed" if empty else "in_progress"
        self._error: Json | None = None
        self._number = -1

    def events(self, event: Event) -> Iterator[Json]:
        """Yield the response events for one event of the turn."""
        self._answer.add(event)
        for made in self._events(event):
            if self._asked.timings_per_token and made["type"].endswith(".delta"):
                made["timings"] = self._answer.progress.timings
            yield self._numbered(made)

    def last(self) -> Iterator[Json]:
        """Yield the events of an empty response."""
        for kind in ("created", "in_progress", "completed") if self._number < 0 else ():
            yield self._numbered(self._response_event(kind))

    def failed(self, error: Exception) -> Iterator[Json]:
        """Yield the event of a response that failed after its start."""
        refusal = refusal_of(error)
        self._status = "failed"
        self._error = {"code": CODES.get(refusal.kind, "server_error"), "message": refusal.message}
        yield self._numbered(self._response_event("failed"))

    def whole(self) -> Json:
        """Return the response in its current state."""
        finished = self._status not in ("in_progress", "failed")
        length = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": length,
            "model": self._head.model,
            "output": [item.json() for item in self._items] if self._status != "in_progress" else [],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": self._usage() if finished else None,
        } | self._repeated

    def _events(self, event: Event) -> Iterator[Json]:
        match event:
            case Started():
                yield self._response_event("created")
                yield self._progress()
            case Prefilled() if self._asked.return_progress:
                yield self._progress()
            case Token():
                if event.logprob is not None:
                    self._entries.append(chat_entry(event.logprob))
                for part in event.parts:
                    yield from self._part(part)
            case Finished():
                for part in event.parts:
                    yield from self._part(part)
                self._status = "incomplete" if event.reason in ("length", "cancelled") else "completed"
                yield from self._close(self._status)
                yield self._response_event(self._status) | {"timings": timings(event.usage)}

    def _progress(self) -> Json:
        made = self._response_event("in_progress")
        return made | (self._answer.progress.prefill if self._asked.return_progress else {})

    def _part(self, part: Part) -> Iterator[Json]:
        match part:
            case Reasoning(text):
                yield from self._add(ReasoningItem, text)
            case Content(text):
                yield from self._add(Message, text)
            case CallStart(_, id, name):
                tool = self._tools.get(name, Named(name))
                made = CustomCall if tool.custom else FunctionCall
                yield from self._begin(made(len(self._items), id, tool))
            case CallArguments(_, text):
                assert self._open is not None
                yield from self._open.add(text, [])
        if not isinstance(part, Content):
            self._entries.clear()

    def _add(self, kind: type[ReasoningItem] | type[Message], text: str) -> Iterator[Json]:
        if not isinstance(self._open, kind):
            yield from self._begin(kind(len(self._items)))
        entries, self._entries = self._entries, []
        assert self._open is not None
        yield from self._open.add(text, entries)

    def _begin(self, item: Item) -> Iterator[Json]:
        yield from self._close("completed")
        self._items.append(item)
        self._open = item
        yield from item.opened()

    def _close(self, status: str) -> Iterator[Json]:
        if self._open is not None:
            yield from self._open.closed(status)
            self._open = None

    def _response_event(self, kind: str) -> Json:
        return {"type": f"response.{kind}", "response": self.whole()}

    def _numbered(self, event: Json) -> Json:
        self._number += 1
        return event | {"sequence_number": self._number}

    def _usage(self) -> Json:
        usage = self._answer.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.reused_tokens,
                "cache_write_tokens": usage.prompt_tokens - usage.reused_tokens,
            },
            "output_tokens": usage.answer_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.thinking_tokens},
            "total_tokens": usage.prompt_tokens + usage.answer_tokens,
        }
