"""One answer as /completion tells it: chunks while it streams, and one object at its end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from localllm.answer.parts import Content
from localllm.scheduler.request import Logprob, Usage
from localllm.server.llamacpp.clock import Clock, timings
from localllm.server.llamacpp.request import Wanted, described
from localllm.server.pieces import Pieces
from localllm.server.turn import Begun, Done, Evaluated, Json, ModelInfo, More, TurnEvent

LOWEST = -3.4028234663852886e38  # stands for minus infinity, which JSON does not have
STOP_TYPES = {"end": "eos", "stop": "word", "length": "limit", "tool_calls": "eos", "cancelled": "none"}


@dataclass(slots=True)
class Cut:
    """Ends an answer at a line with too little indentation, or at the first line break after a time limit."""

    indent: int
    milliseconds: int
    fresh: bool = False  # whether the text stands in the white space that begins a line
    found: int = 0  # white space of this line

    def take(self, text: str, elapsed_ms: float) -> tuple[str, bool]:
        """Return what belongs to the answer, and whether it ends here."""
        at = 0
        while self.indent and at < len(text):
            if self.fresh and text[at] in " \t":
                self.found += 1
                at += 1
                continue
            if self.fresh and self.found < self.indent:
                return text[:at], True
            line = text.find("\n", at)
            self.fresh, self.found, at = line >= 0, 0, (line + 1 if line >= 0 else len(text))
        return text, 0 < self.milliseconds < elapsed_ms and "\n" in text


@dataclass(slots=True)
class Answer:
    """The state of one answer. `index` counts the answers of a request, `prompt` is its prompt as a text."""

    wanted: Wanted
    model: ModelInfo
    pieces: Pieces
    index: int
    prompt: str
    stop_tokens: int = 0  # tokens of the stop string, once known
    clock: Clock = field(default_factory=Clock)
    prompt_tokens: int = 0
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    probabilities: list[Json] = field(default_factory=list)
    lines: bool = False
    sent: int = 0  # tokens that chunks had
    done: Done | None = None
    cut: Cut = field(init=False)

    def __post_init__(self) -> None:
        self.cut = Cut(self.wanted.indent, self.wanted.milliseconds)

    async def take(self, event: TurnEvent) -> list[Json]:
        """Take an event; return the chunks that a stream sends for it."""
        match event:
            case Begun():
                self.clock.begin(event.reused)
                self.prompt_tokens = event.prompt_tokens
                return self._progress()
            case Evaluated():
                advanced = event.tokens > self.clock.evaluated
                self.clock.prompt(event.tokens)
                return self._progress() if advanced else []
            case More():
                return await self._more(event)
            case Done():
                return await self._end(event)

    def _progress(self) -> list[Json]:
        if not self.wanted.return_progress:
            return []
        progress = {
            "total": self.prompt_tokens,
            "cache": self.clock.cached,
            "processed": self.clock.evaluated,
            "time_ms": int((time.monotonic() - self.clock.began) * 1e3),
        }
        return [self._chunk("", []) | {"prompt_progress": progress}]

    async def _more(self, event: More) -> list[Json]:
        if event.token is not None:
            self.clock.token(self.prompt_tokens)
            self.tokens.append(event.token)
        if event.logprob is not None and self.wanted.probs:
            await self.pieces.load_all(event.logprob)
            probability = _sampled if self.wanted.generation.sampled else _probability
            self.probabilities.append(probability(event.logprob, self.pieces))
        new = "".join(part.text for part in event.parts if isinstance(part, Content))
        new, ends = self.cut.take(new, self.clock.usage().decode_seconds * 1e3)
        self.text.append(new)
        self.lines = self.lines or "\n" in new
        chunks = self._sent() if self.wanted.stream and new else []
        return chunks + (await self._end(Done("length", self.clock.usage())) if ends else [])

    def _sent(self) -> list[Json]:
        """Send the text and tokens since the last chunk. A text without tokens was held back: it goes with the end."""
        if self.sent == len(self.tokens):
            return []
        chunk = self._chunk("".join(self.text), self.tokens[self.sent :])
        if self.wanted.probs:
            chunk["completion_probabilities"] = self.probabilities[self.sent :]
        self.text.clear()
        self.sent = len(self.tokens)
        return [chunk]

    def _chunk(self, text: str, tokens: list[int]) -> Json:
        found: Json = {
            "index": self.index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": self.wanted.slot,
            "tokens_predicted": self.clock.predicted,
            "tokens_evaluated": self.prompt_tokens,
        }
        return found | ({"timings": timings(self.clock.usage())} if self.wanted.timings_per_token else {})

    async def _end(self, done: Done) -> list[Json]:
        self.done = done
        if done.stop and self.wanted.probs and not self.wanted.stream:
            self.stop_tokens = await self.pieces.count(done.stop)
        return [self.final()]

    def final(self) -> Json:
        """Return the object at the end of the answer. In a stream it has only the text that no chunk had."""
        assert self.done is not None
        usage, stream = self.done.usage, self.wanted.stream
        shown = self.tokens[self.sent :] if stream else self.tokens if self.wanted.return_tokens else []
        found: Json = {
            "index": self.index,
            "content": "".join(self.text),
            "tokens": shown,
            "id_slot": self.wanted.slot,
            "stop": True,
            "model": self.model.id,
            "tokens_predicted": usage.answer_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": described(self.wanted, self.model.end_tokens),
            "prompt": self.prompt,
            "has_new_line": self.lines,
            "truncated": self.done.reason == "length" and _length(usage) >= self.model.context,
            "stop_type": STOP_TYPES[self.done.reason],
            "stopping_word": self.done.stop,
            "tokens_cached": usage.prompt_tokens + max(usage.answer_tokens - 1, 0),  # the last is in no cache yet
            "timings": timings(usage),
        }
        if self.probabilities and not stream:
            found["completion_probabilities"] = self.probabilities[: len(self.probabilities) - self.stop_tokens]
        return _chosen(found, self.wanted.response_fields)


def _length(usage: Usage) -> int:
    return usage.prompt_tokens + usage.answer_tokens


def _probability(logprob: Logprob, pieces: Pieces) -> Json:
    top = [_token(token, value, pieces) for token, value in logprob.top]
    return _token(logprob.token, logprob.logprob, pieces) | {"top_logprobs": top}


def _sampled(logprob: Logprob, pieces: Pieces) -> Json:
    """Return the probabilities after the sampling options: tokens that cannot come are not among them."""
    top = [_chance(token, value, pieces) for token, value in logprob.top]
    return _chance(logprob.token, logprob.logprob, pieces) | {"top_probs": top}


def _chance(token: int, logprob: float, pieces: Pieces) -> Json:
    return {
        "id": token,
        "token": pieces.text(token),
        "bytes": list(pieces.bytes(token)),
        "prob": min(math.exp(logprob), 1.0),
    }


def _token(token: int, value: float, pieces: Pieces) -> Json:
    return {
        "id": token,
        "token": pieces.text(token),
        "bytes": list(pieces.bytes(token)),
        "logprob": value if math.isfinite(value) else LOWEST,
    }


def _chosen(whole: Json, names: tuple[str, ...]) -> Json:
    """Return only these fields; "a/b" is the field b of a, by this name. Unknown names are left out."""
    if not names:
        return whole
    found: Json = {}
    for name in names:
        value: Any = whole
        for step in name.split("/"):
            value = value.get(step) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found
