"""Ollama's replies: the chunks of a response, its end with durations in nanoseconds, and models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from localllm.generation import parts
from localllm.generation.parts import CallArguments, CallStart, Content, Reasoning
from localllm.generation.request import Event, Finished, Logprob, Started, Token
from localllm.server.info import ModelInfo
from localllm.server.openai.logprobs import LOWEST, token_entry
from localllm.server.openai.models import gguf_details, modified
from localllm.server.streams import Writer
from localllm.server.turn import Json

REASONS = {"end": "stop", "stop": "stop", "tool_calls": "stop", "length": "length", "cancelled": "stop"}
CAPABILITIES = (
    "completion",
    "tools",
    "insert",
    "embedding",
    "thinking",
    "vision",
    "audio",
)  # names that Ollama and localllm share


@dataclass(slots=True)
class ReplyPart:
    """The content of a message: the whole message, or the new part in a chunk."""

    content: str = ""
    thinking: str = ""
    calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.logprobs)

    def add(self, other: ReplyPart) -> None:
        self.content += other.content
        self.thinking += other.thinking
        self.calls += other.calls
        self.logprobs += other.logprobs


Wrap = Callable[[ReplyPart], Json]  # converts a part to the format of /api/chat or /api/generate


class ReplyWriter(Writer[Event]):
    """Converts events to replies. Ollama sends a tool call in one piece, so the arguments of a call are collected."""

    def __init__(self, name: str, logprobs: bool, wrap: Wrap, before: list[int] | None) -> None:
        """Create a writer. `name` is the model's name as in the request; `before` are the prompt tokens, if the last
        reply has a `context`."""
        self._name, self._logprobs, self._wrap, self._before = name, logprobs, wrap, before
        self._started, self._began = time.monotonic(), 0.0
        self._tokens: list[int] = []
        self._done: Finished | None = None
        self._open: CallStart | None = None
        self._arguments: list[str] = []
        self._whole = ReplyPart()

    def events(self, event: Event) -> Iterator[Json]:
        """Yield the replies for an event."""
        for part in self._parts(event):
            yield self._reply(part) | {"done": False}

    def add(self, event: Event) -> None:
        """Add an event to the whole reply."""
        for part in self._parts(event):
            self._whole.add(part)

    def last(self) -> Iterator[Json]:
        """Yield the last reply, without content."""
        yield self._reply(ReplyPart()) | self._end()

    def whole(self) -> Json:
        """Return the whole reply."""
        return self._reply(self._whole) | self._end()

    def _reply(self, part: ReplyPart) -> Json:
        return head(self._name) | self._wrap(part) | ({"logprobs": part.logprobs} if part.logprobs else {})

    def _parts(self, event: Event) -> list[ReplyPart]:
        """Return the parts for an event. A call that is still open at the end of the output becomes a separate part."""
        said, last = ReplyPart(), ReplyPart()
        match event:
            case Started():
                self._began = time.monotonic()
            case Token():
                self._tokens.append(event.token)
                if event.logprob is not None and self._logprobs:
                    said.logprobs.append(_logprob(event.logprob))
                self._read(event.parts, said)
            case Finished():
                self._read(event.parts, said)
                self._close(last)
                self._done = event
        return [part for part in (said, last) if part]

    def _read(self, pieces: Sequence[parts.Part], part: ReplyPart) -> None:
        for piece in pieces:
            match piece:
                case CallArguments():
                    self._arguments.append(piece.json)
                    continue
                case CallStart():
                    self._close(part)
                    self._open = piece
                    continue
                case Content():
                    self._close(part)
                    part.content += piece.text
                case Reasoning():
                    self._close(part)
                    part.thinking += piece.text

    def _close(self, part: ReplyPart) -> None:
        """Close the open call. If its JSON is incomplete, the text is added to the content, so that nothing is lost."""
        if self._open is None:
            return
        text = "".join(self._arguments)
        try:
            found: Any = json.loads(text or "{}")
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            function = {"index": self._open.index, "name": self._open.name, "arguments": found}
            part.calls.append({"id": self._open.id, "function": function})
        else:
            part.content += f"{self._open.name} {text}"
        self._open = None
        self._arguments.clear()

    def _end(self) -> Json:
        """Return the fields of the last reply, with times in nanoseconds."""
        assert self._done is not None
        usage = self._done.usage
        loading = max(self._began - self._started - usage.queued_seconds, 0.0) if self._began else 0.0
        return {
            "done": True,
            "done_reason": REASONS[self._done.reason],
            "total_duration": _ns(time.monotonic() - self._started),
            "load_duration": _ns(loading),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(usage.prompt_seconds),
            "eval_count": usage.answer_tokens,
            "eval_duration": _ns(usage.decode_seconds),
        } | ({} if self._before is None else {"context": [*self._before, *self._tokens]})


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _logprob(logprob: Logprob) -> Json:
    top = [_token(each) for each in logprob.alternatives]
    return _token(logprob) | ({"top_logprobs": top} if top else {})


def _token(logprob: Logprob) -> Json:
    found = token_entry(logprob, LOWEST)
    del found["id"]
    return found


def head(name: str) -> Json:
    """Return the first fields of each reply: the model's name and the current time in Ollama's format."""
    return {"model": name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def listed(model: ModelInfo) -> Json:
    """Return the entry of a model for /api/tags. A name without a tag gets the tag `latest`."""
    name = model.id if ":" in model.id else f"{model.id}:latest"
    return {
        "name": name,
        "model": name,
        "modified_at": modified(model),
        "size": model.file_bytes,
        "digest": model.digest,
        "details": details(model),
    }


def details(model: ModelInfo) -> Json:
    lengths = {"context_length": model.trained_context, "embedding_length": model.width}
    return gguf_details(model, human(model.parameters)) | lengths


def human(count: int) -> str:
    """Return a parameter count in Ollama's format: 7.6B, 137M, 22.57M."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= unit:
            return f"{count / unit:.{0 if count % unit == 0 else digits}f}{letter}"
    return str(count)
