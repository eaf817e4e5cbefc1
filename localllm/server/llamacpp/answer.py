"""One choice of /completion: the chunks of a stream, and the final object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.generation.parts import Content, Part
from localllm.generation.request import Event, Finished, Logprob, Prefilled, Started, Token
from localllm.generation.statistics import Usage
from localllm.server.collected import Progress, timings
from localllm.server.info import ModelInfo
from localllm.server.llamacpp.request import Wanted, described
from localllm.server.openai.logprobs import LOWEST, chat_entry, named_token
from localllm.server.structs import listed
from localllm.server.turn import Json

STOP_TYPES = {"end": "eos", "stop": "word", "length": "limit", "tool_calls": "eos", "cancelled": "none"}


@dataclass(slots=True)
class Cut:
    """Ends the output at a line with too little indentation, or at the first line break after a time limit."""

    indent: int
    milliseconds: int
    fresh: bool = False  # whether the text so far ends in the indentation of a line
    found: int = 0  # width of the current line's indentation so far

    def take(self, text: str, elapsed_ms: float) -> tuple[str, bool]:
        """Return the part of the text that belongs to the output, and whether the output ends here."""
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
    """The state of one choice. `index` is its number in the response, and `prompt` is the prompt as text."""

    wanted: Wanted
    model: ModelInfo
    index: int
    prompt: str
    stop_tokens: int = 0  # tokens of the stop string, once they are known
    progress: Progress = field(default_factory=Progress)
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    probabilities: list[Json] = field(default_factory=list)
    lines: bool = False
    sent: int = 0  # tokens sent in chunks
    done: Finished | None = None
    cut: Cut = field(init=False)

    def __post_init__(self) -> None:
        self.cut = Cut(self.wanted.body.n_indent, self.wanted.body.t_max_predict_ms)

    def take(self, event: Event) -> list[Json]:
        """Process an event, and return the chunks that a stream sends for it."""
        before = self.progress.evaluated
        self.progress.add(event)
        match event:
            case Started() | Prefilled():
                advanced = isinstance(event, Started) or event.evaluated > before
                shows = advanced and self.wanted.body.return_progress
                return [self._chunk("", []) | self.progress.prefill] if shows else []
            case Token():
                self.tokens.append(event.token)
                if event.logprob is not None and self.wanted.generation.logprobs:
                    sampled = self.wanted.generation.sampled
                    self.probabilities.append(_sampled(event.logprob) if sampled else chat_entry(event.logprob, LOWEST))
                return self._text(event.parts)
            case Finished():
                chunks = self._text(event.parts)
                return chunks if self.done is not None else chunks + self._end(event)
            case _:
                return []

    def _text(self, parts: Sequence[Part]) -> list[Json]:
        new = "".join(part.text for part in parts if isinstance(part, Content))
        new, ends = self.cut.take(new, self.progress.decode_seconds * 1e3)
        self.text.append(new)
        self.lines = self.lines or "\n" in new
        chunks = self._sent() if self.wanted.body.stream and new else []
        return chunks + (self._end(Finished("length", "", self.progress.usage)) if ends else [])

    def _sent(self) -> list[Json]:
        """Return the chunks for the text and tokens since the last chunk.

        Text without new tokens was held back, and is sent in the final object.
        """
        if self.sent == len(self.tokens):
            return []
        chunk = self._chunk("".join(self.text), self.tokens[self.sent :])
        if self.wanted.generation.logprobs:
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
            "id_slot": self.wanted.generation.slot,
            "tokens_predicted": self.progress.tokens,
            "tokens_evaluated": self.progress.prompt_tokens,
        }
        return found | ({"timings": self.progress.timings} if self.wanted.body.timings_per_token else {})

    def _end(self, done: Finished) -> list[Json]:
        self.done = done
        return [self.final()]

    def final(self) -> Json:
        """Return the final object. In a stream it only has text that was not sent before."""
        assert self.done is not None
        usage, stream = self.done.usage, self.wanted.body.stream
        shown = self.tokens[self.sent :] if stream else self.tokens if self.wanted.body.return_tokens else []
        found: Json = {
            "index": self.index,
            "content": "".join(self.text),
            "tokens": shown,
            "id_slot": self.wanted.generation.slot,
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
            "tokens_cached": usage.prompt_tokens + max(usage.answer_tokens - 1, 0),  # the last token is not cached yet
            "timings": timings(usage),
        }
        if self.probabilities and not stream:
            found["completion_probabilities"] = self.probabilities[: len(self.probabilities) - self.stop_tokens]
        return _chosen(found, listed(self.wanted.body.response_fields))


def _length(usage: Usage) -> int:
    return usage.prompt_tokens + usage.answer_tokens


def _sampled(logprob: Logprob) -> Json:
    """Return the probabilities after the sampling options. Tokens with probability 0 are missing."""
    return _chance(logprob) | {"top_probs": [_chance(each) for each in logprob.alternatives]}


def _chance(logprob: Logprob) -> Json:
    return named_token(logprob) | {"prob": min(math.exp(logprob.logprob), 1.0)}


def _chosen(whole: Json, names: tuple[str, ...]) -> Json:
    """Return only these fields. "a/b" selects field b of a and returns it under that name. Unknown names are
    skipped."""
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
