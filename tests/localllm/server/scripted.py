"""A service with scripted answers, so that tests of the HTTP APIs need no model.

service = ScriptedService([*said("Hello"), done()])
app = make_app(service, Settings())
... service.asked[-1] is the Turn or Completion that the API handler created
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.generation.request import Event, Failed, Finished, Logprob, Prefilled, Reason, Started, Token
from localllm.generation.statistics import Usage
from localllm.server.errors import BadRequest, UnknownModel
from localllm.server.info import ModelInfo
from localllm.server.prompts import Prompt
from localllm.server.served import Prepared
from localllm.server.service import Service
from localllm.server.turn import Completion, EmbedResult, SlotAction, Turn

Step = Event | Exception | float  # an exception is raised; a number is a pause in seconds
ALL = ("completion", "chat", "tools", "thinking", "insert", "embedding", "rerank")


def Model(id: str = "tiny", **changes: Any) -> ModelInfo:
    """Return the description of a model, with changes."""
    return replace(TINY, id=id, **changes)


TINY = ModelInfo(
    id="tiny",
    created=1_700_000_000,
    context=4096,
    trained_context=8192,
    vocabulary=256,
    width=64,
    tokenizer="llama",
    parameters=1_000_000,
    file_bytes=600_000,
    path="/models/tiny.gguf",
    architecture="llama",
    quantization="Q4_K_M",
    template="{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>",
    bos="<s>",
    eos="</s>",
    end_tokens=(2, 3),
    state="loaded",
    capabilities=ALL,
    digest="0123456789abcdef" * 4,
)


def said(*texts: str, token: int = 7, choice: int = 0, logprob: Logprob | None = None) -> list[Event]:
    """Return content events, one token each."""
    return [Token(token + n, "", logprob, (Content(text),), choice) for n, text in enumerate(texts)]


def wrote(parts: Sequence[Part], token: int, logprob: Logprob | None = None) -> Token:
    """Return the event of a token after which these parts of the answer are complete."""
    return Token(token, "", logprob, tuple(parts))


def thought(*texts: str) -> list[Event]:
    """Return reasoning events, one token each."""
    return [Token(50 + n, "", None, (Reasoning(text),)) for n, text in enumerate(texts)]


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


class ScriptedService(Service):
    """A service whose models answer with `steps`, or with the result of `steps` for the Turn or Completion."""

    def __init__(
        self,
        steps: Sequence[Step] | Callable[[Turn | Completion], Sequence[Step]] | None = None,
        all_models: Sequence[ModelInfo] = (TINY,),
        failure: Exception | None = None,
    ) -> None:
        """Create a service. `failure` is raised by every method except `models` and `find`."""
        super().__init__(self)  # type: ignore[arg-type]
        self.steps = script("Hi") if steps is None else steps
        self.infos, self.failure = all_models, failure
        self.asked: list[Any] = []  # turns and completions
        self.names: list[str] = []  # model names of the requests
        self.normalized: list[bool] = []  # whether `embed` requested normalized vectors
        self.closed = 0  # number of answers whose iterator was closed or exhausted

    async def refresh(self) -> None:
        pass

    def find(self, name: str) -> ModelInfo:
        self.names.append(name)
        found = next((model for model in self.infos if model.id == name), None)
        if found is None and len(self.infos) != 1:
            raise UnknownModel(f"model {name!r} not found")
        return found or self.infos[0]

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[ScriptedModel]:
        self.find(name)
        if self.failure is not None:
            raise self.failure
        yield ScriptedModel(self)

    def loaded(self, name: str) -> None:
        return None


class ScriptedModel:
    """The methods of `Served` that the service calls. Each byte is a token, and BOS has the id 1."""

    def __init__(self, service: ScriptedService) -> None:
        self._service = service
        self.scheduler = self

    async def of_turn(self, asked: Turn | Completion) -> Prepared:
        self._service.asked.append(asked)
        requests: Any = [asked] + [None] * (asked.generation.n - 1)
        return Prepared(requests, lambda: None)

    of_completion = of_turn

    def submit(self, asked: Turn | Completion | None, put: Callable[[Event], None]) -> Script:
        """Play the script, whose events are of all choices, for the first choice."""
        return Script(self._service, asked, put)

    async def prompt(self, turn: Turn) -> Prompt:
        self._service.asked.append(turn)
        text = "".join(f"<|{m['role']}|>{m.get('content') or ''} " for m in turn.messages) + "<|assistant|>"
        return Prompt(list(text.encode()), text)

    async def tokenize(self, texts: Sequence[str], add_special: bool, parse_special: bool) -> list[list[int]]:
        """Return the token ids of texts. BOS is spelled <s> if `parse_special` is set."""
        found = []
        for number, text in enumerate(texts):
            pieces = [list(piece.encode()) for piece in (text.split("<s>") if parse_special else [text])]
            first = [1] if add_special and not number else []
            found.append(first + [token for at, piece in enumerate(pieces) for token in ([1] if at else []) + piece])
        return found

    async def pieces(self, ids: Sequence[int]) -> list[bytes]:
        if bad := [number for number in ids if not 0 <= number < 256]:
            raise BadRequest(f"token {bad[0]} is not in the vocabulary", "tokens")
        return [_piece(number) for number in ids]

    async def embed(self, texts: Sequence[str | Sequence[int]], pooling: str, normalize: bool) -> EmbedResult:
        self._service.normalized.append(normalize)
        if pooling == "none":
            return EmbedResult([], sum(map(len, texts)), [[[float(len(text)), 2.0]] * len(text) for text in texts])
        vectors = [[1.0, 0.0, 0.5] if len(text) % 2 else [0.0, 1.0, 0.5] for text in texts]
        return EmbedResult(vectors, sum(len(text) for text in texts))

    async def rank(self, query: str, documents: Sequence[str]) -> EmbedResult:
        words = set(query.lower().split())
        scores = [[float(len(words & set(document.lower().split())))] for document in documents]
        return EmbedResult(scores, len(query) + sum(len(document) for document in documents))

    async def slot(self, number: int, action: SlotAction, name: str) -> tuple[int, int]:
        return 10 + number, len(name)


class Script:
    """The running script of one request. Choices that it does not end are empty."""

    def __init__(self, service: ScriptedService, asked: Turn | Completion | None, put: Callable[[Event], None]) -> None:
        self._service, self._put = service, put
        steps = service.steps(asked) if asked and callable(service.steps) else service.steps
        self._task = asyncio.create_task(self._play(steps, asked.generation.n)) if asked else None

    async def _play(self, steps: Any, n: int) -> None:
        left = set(range(n))
        for step in steps:
            await asyncio.sleep(step if isinstance(step, float | int) else 0)
            if isinstance(step, Exception):
                return self._put(Failed(step))  # type: ignore[arg-type]
            if not isinstance(step, float | int):
                left -= {step.choice} if isinstance(step, Finished) else set()
                self._put(step)
        for choice in left:
            self._put(done(choice=choice))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._service.closed += 1
