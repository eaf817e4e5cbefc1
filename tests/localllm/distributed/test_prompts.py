"""Cache blocks of prompts from another model in this process: the same tokens, hostile answers, lost connections."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

zmq = pytest.importorskip("zmq", reason="replicas need pyzmq")

import localllm  # noqa: E402
from localllm.cluster.errors import ClusterError  # noqa: E402
from localllm.cluster.wire import Kind, Message, decode, encode  # noqa: E402
from localllm.cluster.zeromq import Endpoint  # noqa: E402
from localllm.distributed.prompts import PromptClient, PromptServer, PromptSource, endpoint_bytes  # noqa: E402
from localllm.generation.interfaces import SchedulerLimits  # noqa: E402
from localllm.generation.request import Request  # noqa: E402
from localllm.generation.scheduler import Scheduler  # noqa: E402
from localllm.options import SamplingOptions  # noqa: E402
from localllm.saved.prompt_cache import packed  # noqa: E402
from tests.localllm.generation.support import Answer  # noqa: E402
from tests.models.kit import KIT  # noqa: E402

# Full attention, a sliding window, and three kinds of recurrent layers.
MODELS = ("llama-gqa", "gemma3-12", "qwen35-mtp", "mamba2-dense", "rwkv7")
LIMITS = SchedulerLimits(parallel=3)
CONTEXT = 256
WAIT = 30.0


def endpoints() -> tuple[Endpoint, Endpoint]:
    """Return two connected endpoints."""
    one, other = (Endpoint(endpoint_bytes(CONTEXT), patience=5.0) for _ in range(2))
    one.accept(other.peer.public_key)
    other.accept(one.peer.public_key)
    one.connect(other.peer)
    other.connect(one.peer)
    return one, other


def until(ready: Callable[[], object]) -> None:
    stop = time.monotonic() + WAIT
    while not ready():
        assert time.monotonic() < stop, "it does not happen"
        time.sleep(0.01)


class Pair:
    """A model that decodes and one that evaluates prompts."""

    def __init__(self, path: Path, most_waiting: int = 0, late: float = WAIT) -> None:
        options: Any = {"ctx_size": CONTEXT, "threads": 1, "sequences": 3, "spec": "off"}
        self.decoding, self.prompts = localllm.load(path, **options), localllm.load(path, **options)
        self.scheduler, self.other = (Scheduler(each.new_core(LIMITS)) for each in (self.decoding, self.prompts))
        self.servers: list[PromptServer] = []
        self.client = PromptClient(self._connected, retry=0.1)
        self.source = PromptSource(self.decoding, self.scheduler, [self.client], late=late, most_waiting=most_waiting)
        until(lambda: self.client.connected)

    def _connected(self) -> Endpoint:
        mine, theirs = endpoints()
        self.servers.append(PromptServer(self.prompts, self.other, theirs))
        return mine

    def answer(self, request: Request) -> Answer:
        asyncio.run(self.source.fetch(request))
        found = Answer()
        self.scheduler.submit(request, found)
        found.result()
        return found

    def close(self) -> None:
        self.source.close()
        for each in (*self.servers, self.scheduler, self.other, self.decoding, self.prompts):
            each.close()


@contextmanager
def opened(path: Path, **given: Any) -> Iterator[Pair]:
    pair = Pair(path, **given)
    try:
        yield pair
    finally:
        pair.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 120, length).tolist()


def request_of(length: int, seed: int = 0, tokens: int = 12) -> Request:
    return Request(prompt_of(length, seed), SamplingOptions(seed=7), tokens, ignore_eos=True)


@pytest.mark.parametrize("name", MODELS)
def test_answers_have_the_tokens_and_logits_of_one_process(name: str, tmp_path: Path) -> None:
    path = KIT[name].write(tmp_path / "model.gguf")
    with opened(path) as pair, localllm.load(path, ctx_size=CONTEXT, threads=1, spec="off") as alone:
        for number, length in enumerate((66, 128, 129, 200, 233)):
            request = request_of(length, number)
            plain = Answer()
            with Scheduler(alone.new_core(LIMITS)) as scheduler:
                scheduler.submit(request, plain)
                plain.result()
            found = pair.answer(request)
            assert found.tokens == plain.tokens
            assert found.reused == length - 1  # only the last token was evaluated here
        assert pair.source.fetched == 5
        truth = alone.logits(prompt_of(200, 3))[-1]
        job = pair.scheduler.between(lambda slots: slots.with_cached(prompt_of(200, 3)[:-1], _logits(pair, 3)))
        assert (job.result(WAIT) == truth).all()


def _logits(pair: Pair, seed: int) -> Callable[[Any], Any]:
    from localllm.engine import SequenceRows

    last = prompt_of(200, seed)[-1:]
    return lambda sequence: pair.decoding.engine.step([SequenceRows(sequence, last, "last")])[0].logits[-1].copy()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KIT["llama-gqa"].write(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def pair(path: Path) -> Iterator[Pair]:
    with opened(path) as found:
        yield found


def test_known_and_short_prompts_are_not_sent(pair: Pair) -> None:
    before = pair.source.fetched
    pair.answer(request_of(40, 10))
    assert pair.source.fetched == before
    first = pair.answer(request_of(200, 11))
    again = pair.answer(request_of(200, 11))
    assert (pair.source.fetched, again.tokens) == (before + 1, first.tokens)


def test_many_prompts_at_once(pair: Pair) -> None:
    before, requests = pair.source.fetched, [request_of(150 + number, 20 + number, 1) for number in range(12)]

    async def run() -> None:
        await asyncio.gather(*map(pair.source.fetch, requests))

    asyncio.run(run())
    assert pair.source.fetched == before + 12
    assert not pair.client.tokens
    assert not pair.servers[-1]._tickets


def test_a_prompt_that_is_given_up_ends_there(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    step, waiting = pair.prompts.executable.step, threading.Event()
    monkeypatch.setattr(pair.prompts.executable, "step", lambda batch: (waiting.wait(5), step(batch))[1])

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pair.source.fetch(request_of(230, 40)), 0.3)

    asyncio.run(run())
    until(lambda: not pair.client.tokens and not pair.servers[-1]._tickets)
    waiting.set()
    until(lambda: not pair.other.load().running)


def test_a_late_replica_and_a_lost_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path, late=0.3) as pair:
        plain = pair.answer(request_of(200, 50)).tokens
        with monkeypatch.context() as patched:
            step, waiting = pair.prompts.executable.step, threading.Event()
            patched.setattr(pair.prompts.executable, "step", lambda batch: (waiting.wait(5), step(batch))[1])
            pair.scheduler.forget()
            pair.other.forget()
            assert pair.answer(request_of(200, 50)).tokens == plain
            waiting.set()
        assert (pair.source.fetched, pair.source.failed) == (1, 1)
        pair.servers[0].close()
        until(lambda: not pair.client.connected)
        pair.scheduler.forget()
        assert pair.answer(request_of(200, 50)).tokens == plain
        until(lambda: pair.client.connected)  # again
        pair.scheduler.forget()
        assert pair.answer(request_of(200, 50)).tokens == plain
        assert pair.source.fetched == 2


def test_a_long_queue_is_avoided(path: Path) -> None:
    with opened(path, most_waiting=100) as pair:

        async def run() -> None:
            await asyncio.gather(*[pair.source.fetch(request_of(200, 60 + number)) for number in range(4)])

        asyncio.run(run())
        assert (pair.source.fetched, pair.source.failed) == (1, 0)


class Hostile:
    """A replica for prompts that answers with given messages, made of the blocks of the prompt or of `tokens`."""

    def __init__(self, path: Path, answers: Callable[[int, bytes], list[Message]], tokens: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self.model = localllm.load(path, ctx_size=CONTEXT, threads=1, spec="off")
        self._answers = answers
        self._mine: Endpoint | None
        self._mine, self._endpoint = endpoints()
        self.ended = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def connect(self) -> Endpoint:
        if self._mine is None:
            raise ClusterError("only once")
        found, self._mine = self._mine, None
        return found

    def _run(self) -> None:
        try:
            while True:
                message = decode(self._endpoint.receive())
                if message.kind is Kind.PROMPT:
                    session = self.model.session()
                    session.evaluate(self._tokens or message.arrays[0].tolist(), logits=False)
                    for each in self._answers(message.number, packed(self.model, session.sequence)):
                        self._endpoint.send(encode(each))
                    session.close()
        except ClusterError as error:
            self.ended = str(error)
        self._endpoint.close()

    def close(self) -> None:
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        self.model.close()


def result(number: int, data: bytes, at: int = 0, total: int = 1, dtype: Any = np.uint8) -> list[Message]:
    return [Message(Kind.RESULT, number, (at, total), (np.frombuffer(data, np.uint8).astype(dtype),))]


def flipped(data: bytes, at: int) -> bytes:
    found = bytearray(data)
    found[at] ^= 1
    return bytes(found)


OTHER = prompt_of(199, 99)
ANSWERS: dict[str, Callable[[int, bytes], list[Message]]] = {
    "a wrong digest": lambda number, data: result(number, flipped(data, -1)),
    "a changed block": lambda number, data: result(number, flipped(data, -5000)),
    "a changed token": lambda number, data: result(number, flipped(data, len(data) // 50)),
    "truncated": lambda number, data: result(number, data[:-100]),
    "nothing": lambda number, data: result(number, b""),
    "zeros": lambda number, data: result(number, bytes(len(data))),
    "too long": lambda number, data: result(number, data + bytes(1 << 21)),
    "a wrong place": lambda number, data: result(number, data, 1, 2),
    "many pieces": lambda number, data: result(number, data, 0, 1 << 40),
    "no pieces": lambda number, data: result(number, data, 0, 0),
    "a wrong type": lambda number, data: result(number, data, dtype=np.float32),
    "a wrong kind": lambda number, data: [Message(Kind.STEP, number, (0, 1))],
    "an error": lambda number, data: [Message(Kind.ERROR, number, (0, 11))],
    "another number": lambda number, data: [*result(number + 7, data), Message(Kind.ERROR, number)],
    "no arrays": lambda number, data: [Message(Kind.RESULT, number, (0, 1))],
}


@pytest.mark.parametrize("name", ANSWERS)
def test_hostile_answers_are_refused(name: str, path: Path, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    expected = pair.answer(request_of(200, 70)).tokens
    hostile = Hostile(path, ANSWERS[name])
    with localllm.load(path, ctx_size=CONTEXT, threads=1, sequences=3, spec="off") as model:
        scheduler = Scheduler(model.new_core(LIMITS))
        client = PromptClient(hostile.connect)
        source = PromptSource(model, scheduler, [client], late=5.0)
        until(lambda: client.connected)
        asyncio.run(source.fetch(request_of(200, 70)))
        assert (source.fetched, source.failed) == (0, 1)
        assert "a prompt is evaluated here: " in caplog.text
        found = Answer()
        scheduler.submit(request_of(200, 70), found)
        found.result()
        assert (found.tokens, found.reused) == (expected, 0)
        source.close()
        scheduler.close()
    hostile.close()


def test_blocks_of_another_prompt_or_model_are_refused(path: Path, tmp_path: Path, pair: Pair) -> None:
    for file in (path, KIT["llama-gqa"].write(tmp_path / "model.gguf", seed=2)):
        hostile = Hostile(file, result, OTHER if file == path else ())
        client = PromptClient(hostile.connect)
        source = PromptSource(pair.decoding, pair.scheduler, [client], late=5.0)
        until(partial(getattr, client, "connected"))
        asyncio.run(source.fetch(request_of(200, 80)))
        assert (source.fetched, source.failed) == (0, 1)
        source.close()
        hostile.close()


@pytest.mark.parametrize(
    "asked",
    [
        Message(Kind.PROMPT, 1, (0,), (np.zeros(0, np.int32), np.zeros(1, np.uint8))),
        Message(Kind.PROMPT, 1, (0,), (np.full(9, 1 << 30, np.int32), np.zeros(1, np.uint8))),
        Message(Kind.PROMPT, 1, (0,), (np.full(9, -1, np.int32), np.zeros(1, np.uint8))),
        Message(Kind.PROMPT, 1, (0,), (np.ones(CONTEXT + 1, np.int32), np.zeros(1, np.uint8))),
        Message(Kind.PROMPT, 1, (0,), (np.ones((3, 3), np.int32), np.zeros(1, np.uint8))),
        Message(Kind.PROMPT, 1, (0,), (np.ones(9, np.float32), np.zeros(1, np.uint8))),
    ],
)
def test_wrong_prompts_are_refused(pair: Pair, asked: Message) -> None:
    mine, theirs = endpoints()
    server = PromptServer(pair.prompts, pair.other, theirs)
    mine.send(encode(asked))
    found = decode(mine.receive(WAIT))
    assert (found.kind, found.number) == (Kind.ERROR, 1)
    server.close()
    mine.close()
