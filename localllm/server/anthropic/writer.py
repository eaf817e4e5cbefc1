"""Convert the events of a turn to a message, either as a stream of events or as a complete object.

A stream is message_start; for each block content_block_start, content_block_delta ..., content_block_stop; then
message_delta and message_stop. A ping follows the first content_block_start. Prompt progress is sent as pings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.generation.request import Event, Finished, Prefilled, Started, Token
from localllm.server.collected import Collected
from localllm.server.streams import Writer
from localllm.server.turn import Json

SIGNATURE = "bG9jYWxsbG0="  # signature of reasoning blocks; clients send it back, and the server does not check it
STOPPED = {
    "end": "end_turn",
    "stop": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "cancelled": "max_tokens",
}
PING: Json = {"type": "ping"}


class _Block:
    """A content block. `delta` is the type of its deltas, and `field` is the name of the text in a delta."""

    __slots__ = ("_texts", "delta", "field", "start")

    def __init__(self, start: Json, delta: str, field: str) -> None:
        self.start, self.delta, self.field = start, delta, field
        self._texts: list[str] = []

    def add(self, text: str) -> Json:
        """Append text, and return it as a delta."""
        self._texts.append(text)
        return {"type": self.delta, self.field: text}

    def json(self) -> Json:
        """Return the complete block."""
        text = "".join(self._texts)
        match self.start["type"]:
            case "thinking":
                return self.start | {"thinking": text, "signature": SIGNATURE}
            case "tool_use":
                return self.start | {"input": arguments(text)}
            case _:
                return self.start | {"text": text}


def arguments(text: str) -> Json:
    """Return the arguments of a call, or an empty object if the token limit truncated them."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class MessageWriter(Writer[Event]):
    """Converts the events of a turn to Anthropic's events. `stops` are the stop strings of the request."""

    named = True

    def __init__(self, id: str, model: str, stops: Sequence[str], shows_reasoning: bool) -> None:
        self._id, self._model, self._stops, self._shows_reasoning = id, model, stops, shows_reasoning
        self._answer = Collected()
        self._blocks: list[_Block] = []
        self._open: _Block | None = None

    def events(self, event: Event) -> Iterator[Json]:
        """Yield Anthropic's events for one event of the turn."""
        self._answer.add(event)
        match event:
            case Started():
                yield {"type": "message_start", "message": self._message()}
            case Prefilled():
                yield PING
            case Token():
                for part in event.parts:
                    yield from self._part(part)
            case Finished():
                for part in event.parts:
                    yield from self._part(part)
                yield from self._close()
                yield {"type": "message_delta", "delta": self._reason(), "usage": self._usage()}
                yield {"type": "message_stop"}

    def whole(self) -> Json:
        """Return the complete message."""
        return self._message() | self._reason() | {"content": [block.json() for block in self._blocks]}

    def _message(self) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _reason(self) -> Json:
        done = self._answer.done
        if done is None:
            return {"stop_reason": None, "stop_sequence": None}
        stop = done.stop if done.reason == "stop" and done.stop in self._stops else None
        reason = "end_turn" if done.reason == "stop" and stop is None else STOPPED[done.reason]
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> Json:
        usage = self._answer.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.reused_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.reused_tokens,
            "output_tokens": usage.answer_tokens,
        }

    def _part(self, part: Part) -> Iterator[Json]:
        match part:
            case Reasoning(text):
                yield from self._begin("thinking")
                yield from self._delta(text if self._shows_reasoning else "")
            case Content(text):
                yield from self._begin("text")
                yield from self._delta(text)
            case CallStart(_, id, name):
                start = {"type": "tool_use", "id": id, "name": name, "input": {}}
                yield from self._start(_Block(start, "input_json_delta", "partial_json"))
            case CallArguments(_, text):
                yield from self._delta(text)

    def _begin(self, kind: str) -> Iterator[Json]:
        """Start a block of text or reasoning, unless a block of this kind is open."""
        if self._open is not None and self._open.start["type"] == kind:
            return
        start = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        yield from self._start(_Block(start, f"{kind}_delta", kind))

    def _start(self, block: _Block) -> Iterator[Json]:
        yield from self._close()
        self._blocks.append(block)
        self._open = block
        yield {"type": "content_block_start", "index": self._index, "content_block": block.start}
        if len(self._blocks) == 1:
            yield PING

    def _delta(self, text: str) -> Iterator[Json]:
        assert self._open is not None
        if text:
            yield {"type": "content_block_delta", "index": self._index, "delta": self._open.add(text)}

    def _close(self) -> Iterator[Json]:
        if self._open is None:
            return
        if self._open.start["type"] == "thinking":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", "index": self._index, "delta": signature}
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1
