"""A service with scripted answers, so that tests of the HTTP APIs need no model.

service = ScriptedService([*said("Hello"), done()])
app = make_app(service, Settings())
... service.asked[-1] is the Turn or Completion that the API handler created
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.generation.request import Event, Finished, Logprob, Prefilled, Reason, Started, Token
from localllm.generation.statistics import Usage
from localllm.options import SamplingOptions
from localllm.server.errors import BadRequest, UnknownModel
from localllm.server.metrics import Metrics
from localllm.server.observer import ServiceObserver
from localllm.server.turn import Completion, EmbedResult, SlotAction, Turn

Step = Event | Exception | float  # an exception is raised; a number is a pause in seconds
ALL = ("completion", "chat", "tools", "thinking", "insert", "embedding", "rerank")


@dataclass
class Model:
    """The model properties that the scripted service reports."""

    id: str = "tiny"
    created: int = 1_700_000_000
    context: int = 4096
    trained_context: int = 8192
    vocabulary: int = 256
    width: int = 64
    tokenizer: str = "llama"
    parameters: int = 1_000_000
    file_bytes: int = 600_000
    path: str = "/models/tiny.gguf"
    architecture: str = "llama"
    quantization: str = "Q4_K_M"
    template: str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    bos: str = "<s>"
    eos: str = "</s>"
    end_tokens: tuple[int, ...] = (2, 3)
    state: Literal["unloaded", "loading", "loaded", "failed"] = "loaded"
    capabilities: tuple[str, ...] = ALL
    digest: str = "0123456789abcdef" * 4


def said(*texts: str, token: int = 7, choice: int = 0, logprob: Logprob | None = None) -> list[Event]:
    """Return content events, one token each."""
    return [Token(token + n, text, logprob, (Content(text),), choice) for n, text in enumerate(texts)]


def wrote(parts: Sequence[Part], token: int, logprob: Logprob | None = None) -> Token:
    """Return the event of a token after which these parts of the answer are complete."""
    return Token(token, "", logprob, tuple(parts))


def thought(*texts: str) -> list[Event]:
    """Return reasoning events, one token each."""
    return [Token(50 + n, text, None, (Reasoning(text),)) for n, text in enumerate(texts)]


def called(name: str, *arguments: str, index: int = 0, id: str = "call_1") -> list[Event]:
    """Return the events of a tool call whose arguments arrive in pieces."""
    parts: list[Part] = [CallStart(index, id, name)]
    parts += [CallArguments(index, piece) for piece in arguments]
    return [Token(90 + n, "", None, (part,)) for n, part in enumerate(parts)]


def done(
    reason: Reason = "end",
    prompt: int = 5,
    reused: int = 2,
    answer_tokens: int = 3,
    stop: str = "",
    choice: int = 0,
    last: Sequence[Part] = (),
) -> Finished:
    """Return the final event of an answer, with the usage statistics and the remaining parts, `last`."""
    usage = Usage(
        prompt_tokens=prompt,
        reused_tokens=reused,
        answer_tokens=answer_tokens,
        queued_seconds=0.001,
        first_token_seconds=0.011,
        prompt_seconds=0.01,
        decode_seconds=0.02,
    )
    return Finished(reason, "", usage, stop, parts=tuple(last), choice=choice)


def script(*texts: str, prompt: int = 5, reused: int = 2, reason: Reason = "end") -> list[Step]:
    """Return the events of a complete answer."""
    middle = said(*texts)
    return [
        Started(prompt, reused),
        Prefilled(prompt),
        *middle,
        done(reason, prompt, reused, answer_tokens=len(middle)),
    ]


def likely(token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> Logprob:
    """Return the log-probability of a token, with the bytes that the scripted tokenizer gives it."""
    return Logprob(token, logprob, tuple(top), _piece(token), tuple(_piece(each) for each, _ in top))


def _piece(token: int) -> bytes:
    return b"<s>" if token == 1 else bytes([token])


@dataclass
class ScriptedService:
    """`Service` that answers with `steps`, or with the result of `steps` for the Turn or Completion."""

    steps: Sequence[Step] | Callable[[Turn | Completion], Sequence[Step]] = field(default_factory=lambda: script("Hi"))
    all_models: Sequence[Model] = field(default_factory=lambda: [Model()])
    asked: list[Turn | Completion] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # model names of the requests
    normalized: list[bool] = field(default_factory=list)  # whether `embed` requested normalized vectors
    closed: int = 0  # number of answers whose iterator was closed or exhausted
    failure: Exception | None = None  # raised by every method except `models` and `find`
    observer: ServiceObserver = field(default_factory=lambda: ServiceObserver(Metrics()))

    def models(self) -> Sequence[Model]:
        return self.all_models

    def find(self, name: str) -> Model:
        self.names.append(name)
        found = next((model for model in self.all_models if model.id == name), None)
        if found is None and len(self.all_models) != 1:
            raise UnknownModel(f"model {name!r} not found")
        return found or self.all_models[0]

    async def _run(self, model: str, asked: Turn | Completion) -> AsyncIterator[Event]:
        self.asked.append(asked)
        try:
            with self.observer.begin(model, asked.generation) as watched:
                self._fail()
                for step in self.steps(asked) if callable(self.steps) else self.steps:
                    if isinstance(step, Exception):
                        raise step
                    if isinstance(step, float | int):
                        await asyncio.sleep(step)
                    else:
                        await asyncio.sleep(0)
                        watched.event(step)
                        yield step
        finally:
            self.closed += 1

    def answer(self, model: str, turn: Turn) -> AsyncIterator[Event]:
        self.find(model)
        return self._run(model, self.observer.admitted(turn))

    def complete(self, model: str, completion: Completion) -> AsyncIterator[Event]:
        self.find(model)
        return self._run(model, self.observer.admitted(completion))

    async def count(self, model: str, turn: Turn) -> int:
        return len((await self.render(model, turn)).split())

    async def render(self, model: str, turn: Turn) -> str:
        self._fail()
        self.find(model)
        self.asked.append(turn)
        return "".join(f"<|{m['role']}|>{m.get('content') or ''} " for m in turn.messages) + "<|assistant|>"

    async def prompt_ids(self, model: str, turn: Turn) -> list[int]:
        """Return the token ids of a prompt; each byte is a token."""
        return list((await self.render(model, turn)).encode())

    async def tokenize(self, model: str, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of a text; each byte is a token. Id 1 is BOS, spelled <s> if `parse_special` is set."""
        self._fail()
        self.find(model)
        found = [1] if add_special else []
        for number, piece in enumerate(text.split("<s>") if parse_special else [text]):
            found += ([1] if number else []) + list(piece.encode())
        return found

    async def tokenize_all(
        self, model: str, texts: Sequence[str], add_special: bool, parse_special: bool
    ) -> list[list[int]]:
        return [
            await self.tokenize(model, text, add_special and not number, parse_special)
            for number, text in enumerate(texts)
        ]

    async def pieces(self, model: str, ids: Sequence[int]) -> list[bytes]:
        self._fail()
        self.find(model)
        if bad := [number for number in ids if not 0 <= number < 256]:
            raise BadRequest(f"token {bad[0]} is not in the vocabulary", "tokens")
        return [_piece(number) for number in ids]

    async def embed(
        self, model: str, texts: Sequence[str | Sequence[int]], pooling: str = "auto", normalize: bool = True
    ) -> EmbedResult:
        self._fail()
        self.find(model)
        self.normalized.append(normalize)
        if pooling == "none":
            return EmbedResult([], sum(map(len, texts)), [[[float(len(text)), 2.0]] * len(text) for text in texts])
        vectors = [[1.0, 0.0, 0.5] if len(text) % 2 else [0.0, 1.0, 0.5] for text in texts]
        return EmbedResult(vectors, sum(len(text) for text in texts))

    async def rank(self, model: str, query: str, documents: Sequence[str]) -> EmbedResult:
        self._fail()
        self.find(model)
        words = set(query.lower().split())
        scores = [[float(len(words & set(document.lower().split())))] for document in documents]
        return EmbedResult(scores, len(query) + sum(len(document) for document in documents))

    async def slot(self, model: str, number: int, action: SlotAction, name: str) -> tuple[int, int]:
        self._fail()
        self.find(model)
        return 10 + number, len(name)

    def sampling_defaults(self, model: str) -> SamplingOptions:
        self.find(model)
        return SamplingOptions()

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure
