"""No client can block the others: work is bounded before it starts, and one client's requests do not delay another's.

The tests run a real model. The server identifies clients by their addresses.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import localllm
from localllm.constrained import compiling
from localllm.constrained.constraint import GrammarVocabulary
from localllm.generation.interfaces import SchedulerLimits
from localllm.loading.resolve import resolve
from localllm.sandbox import ConfinedStopped, ResourceLimits
from localllm.server.app import make_app
from localllm.server.catalogue import only
from localllm.server.lanes import LARGE
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from localllm.template import ChatTemplate
from localllm.tokenizer import Tokenizer
from tests.localllm.test_embedding import write_embedder

DEMO = Path(resolve("demo"))
ONE, OTHER = "10.0.0.1", "10.0.0.2"
CONTEXT = 256
WAIT = 30  # seconds after which a test counts as hanging
SHORT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TOO_LONG = "1234567890" * 1000  # 10000 characters, although the longest token has 31
Clients = dict[str, httpx.AsyncClient]


@asynccontextmanager
async def _of(registry: ModelRegistry) -> AsyncIterator[Clients]:
    app = make_app(Service(registry), ServerSettings())
    made = {
        address: httpx.AsyncClient(
            transport=httpx.ASGITransport(app, client=(address, 1)), base_url="http://localhost", timeout=WAIT
        )
        for address in (ONE, OTHER)
    }
    try:
        yield made
    finally:
        for each in made.values():
            await each.aclose()
        registry.end()


@asynccontextmanager
async def clients(limits: SchedulerLimits | None = None, context: int = CONTEXT) -> AsyncIterator[Clients]:
    """Yield HTTP clients with two addresses, connected to one server."""
    limits = limits or SchedulerLimits(parallel=2)

    def opened(path: Path) -> Served:
        model = localllm.load(path, backend="cpu", threads=1, sequences=limits.parallel, ctx_size=context)
        return Served(model, limits)

    registry = ModelRegistry(only("demo", DEMO), opened)
    async with _of(registry) as made:
        yield made


# -- work bounded by the input length --------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": TOO_LONG}]
LONG: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"content": TOO_LONG}),
    ("/tokenize", {"content": ["12345"] * 2000 + [1]}),
    ("/tokenize", {"content": "漢" * 4000}),  # 12000 bytes; the limit counts bytes in UTF-8
    ("/completion", {"prompt": TOO_LONG}),
    ("/completion", {"prompt": [TOO_LONG, 1]}),
    ("/completion", {"prompt": "a", "logit_bias": [[TOO_LONG, 1]]}),
    ("/completion", {"prompt": "a", "logit_bias": [["12345" * 10, 1]] * 200}),
    ("/v1/completions", {"prompt": TOO_LONG}),
    ("/v1/completions", {"prompt": [TOO_LONG]}),
    ("/v1/completions", {"prompt": TOO_LONG, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": ["12345"] * 2000 + [1]}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "12345" * 10}] * 200}),
    ("/v1/chat/completions", {**SHORT, "logit_bias": [[TOO_LONG, 1]]}),
    ("/v1/responses", {"input": TOO_LONG}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/api/chat", {"model": "demo", "messages": MESSAGES, "stream": False}),
    ("/api/generate", {"model": "demo", "prompt": TOO_LONG, "stream": False}),
    ("/api/generate", {"model": "demo", "prompt": TOO_LONG, "raw": True, "stream": False}),
]


def test_texts_that_no_context_can_hold_are_refused_before_they_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = [0]
    real = Tokenizer.encode

    def encode(self: Tokenizer, text: str, *more: Any, **named: Any) -> list[int]:
        longest[0] = max(longest[0], len(text))
        return real(self, text, *more, **named)

    async def run() -> None:
        async with clients() as http:
            assert (await http[ONE].post("/v1/chat/completions", json=SHORT)).status_code == 200
            longest[0] = 0
            monkeypatch.setattr(Tokenizer, "encode", encode)
            for path, body in LONG:
                answer = await http[ONE].post(path, json=body)
                assert answer.status_code == 400, (path, str(body)[:80], answer.text)
                assert "exceeds the available context size of 256 tokens" in answer.text, (path, answer.text)
            assert longest[0] < 100

    asyncio.run(run())


def test_texts_are_searched_for_only_if_they_are_short() -> None:
    async def run() -> None:
        async with clients() as http:
            for path, field in (
                ("/completion", "stop"), ("/completion", "dry_sequence_breakers"),
                ("/v1/chat/completions", "stop"), ("/v1/chat/completions", "dry_sequence_breakers"),
            ):  # fmt: skip
                body = {"prompt": "a", "messages": SHORT["messages"], "dry_multiplier": 1, field: ["x" * 1001]}
                answer = await http[ONE].post(path, json=body)
                assert answer.status_code == 400
                assert "has 1001 characters; the limit is 1000" in answer.text

    asyncio.run(run())


# -- one client's work while another works ---------------------------------------------------------------------------


def blocked(job: threading.Event, free: threading.Event) -> None:
    job.set()
    assert free.wait(WAIT)


async def short_answers(http: Clients) -> None:
    """Check that the other client's requests are answered while the first client's work runs."""
    for path, body in (
        ("/v1/chat/completions", SHORT),
        ("/tokenize", {"content": "hello"}),
        ("/completion", {"prompt": "Once", "n_predict": 2}),
        ("/v1/messages/count_tokens", {"messages": SHORT["messages"]}),
    ):
        answer = await asyncio.wait_for(http[OTHER].post(path, json=body), WAIT)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions", "/completion"])
def test_a_long_text_does_not_hold_up_short_ones(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    began, free = threading.Event(), threading.Event()
    real = Tokenizer.encode

    def encode(self: Tokenizer, text: str, *more: Any, **named: Any) -> list[int]:
        if len(text) > 10_000:
            blocked(began, free)
            return [1]
        return real(self, text, *more, **named)

    async def run() -> None:
        async with clients(context=2048) as http:
            await short_answers(http)
            monkeypatch.setattr(Tokenizer, "encode", encode)
            text = "a " * (LARGE // 2)
            body = {"content": text, "messages": [{"role": "user", "content": text}], "prompt": text, "max_tokens": 1}
            long = asyncio.create_task(http[ONE].post(path, json=body))
            await asyncio.to_thread(began.wait, WAIT)
            await short_answers(http)
            assert not long.done()
            free.set()
            assert (await long).status_code == 200

    asyncio.run(run())


def test_a_conversation_that_is_slow_to_render_does_not_hold_up_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    began, free = threading.Event(), threading.Event()
    real = ChatTemplate.render

    def render(self: ChatTemplate, messages: Any, *more: Any, **named: Any) -> Any:
        if len(messages) > 100:
            blocked(began, free)
            messages = messages[:1]
        return real(self, messages, *more, **named)

    async def run() -> None:
        async with clients(context=2048) as http:
            await short_answers(http)
            monkeypatch.setattr(ChatTemplate, "render", render)
            long = asyncio.create_task(
                http[ONE].post("/v1/chat/completions", json={**SHORT, "messages": SHORT["messages"] * 10_000})  # type: ignore[operator]
            )
            await asyncio.to_thread(began.wait, WAIT)
            await short_answers(http)
            free.set()
            assert (await long).status_code == 200

    asyncio.run(run())


class SlowChild:
    """A grammar compiler that blocks until the client disconnects."""

    def __init__(self) -> None:
        self.began, self.stopped = threading.Event(), threading.Event()

    def compile(self, source: str, stop: threading.Event) -> tuple[str, int]:
        self.began.set()
        assert stop.wait(WAIT)
        self.stopped.set()
        raise ConfinedStopped("it was stopped")

    def close(self) -> None:
        pass


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["unheard of"]}}}
TOOL = {"type": "function", "function": {"name": "unheard_of", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**SHORT, "response_format": FORMAT}),
        ("/v1/chat/completions", {**SHORT, "tools": [TOOL], "tool_choice": "required"}),
        ("/completion", {"prompt": "a", "grammar": 'root ::= "unheard of"'}),
        ("/api/chat", {"model": "demo", **SHORT, "format": {"enum": ["unheard of"]}, "stream": False}),
    ],
)
def test_a_grammar_holds_up_nobody_and_ends_with_its_client(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = SlowChild()
    monkeypatch.setattr(GrammarVocabulary, "new_child", lambda self: child)

    async def run() -> None:
        async with clients() as http:
            await short_answers(http)
            asked = asyncio.create_task(http[ONE].post(path, json=body))
            await asyncio.to_thread(child.began.wait, WAIT)
            await short_answers(http)
            asked.cancel()
            assert await asyncio.to_thread(child.stopped.wait, WAIT)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("limits", "status", "says"),
    [
        (
            {"seconds": 60, "wall": 0},
            503,
            "was not compiled: its process was killed, or takes more than 0 s on the clock",
        ),
        ({"seconds": 0.2, "wall": 60}, 400, "the grammar or schema takes more than 0.2 s to compile; make it smaller"),
    ],
    ids=["clock", "processor"],
)
def test_a_grammar_is_the_clients_fault_only_if_it_takes_processor_time(
    limits: dict[str, float], status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar is the client's fault (status 400) only if it uses up its CPU time.

    A busy machine or low memory gives 503, so that the client may retry.
    """
    rules = "\n".join(f"r{n} ::= r{n + 1} r{n + 1} | r{n + 1}" for n in range(1400))
    body = {"prompt": "a", "n_predict": 1, "grammar": f'root ::= r0\n{rules}\nr1400 ::= "a"'}

    async def run() -> None:
        async with clients() as http:
            answer = await http[ONE].post("/completion", json={**body, "grammar": 'root ::= "warm"'})
            assert answer.status_code == 200
            monkeypatch.setattr("localllm.constrained.child._LIMITS", ResourceLimits(memory=256 << 20, **limits))
            answer = await http[ONE].post("/completion", json=body)
            assert (answer.status_code, answer.headers.get("retry-after")) == (status, "1" if status == 503 else None)
            assert says in answer.json()["error"]["message"]

    asyncio.run(run())


def test_grammars_are_compiled_in_their_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    real = compiling.matcher_of

    def matcher_of(tokens: Any, source: str) -> Any:
        threads.add(threading.current_thread().name)
        return real(tokens, source)

    monkeypatch.setattr("localllm.constrained.constraint.matcher_of", matcher_of)

    async def run() -> None:
        async with clients() as http:
            for _ in range(2):
                answer = await http[ONE].post("/v1/chat/completions", json={**SHORT, "response_format": FORMAT})
                assert answer.status_code == 200
                answer = await http[ONE].post("/completion", json={"prompt": "a", "grammar": 'root ::= "no"'})
                assert answer.json()["content"] == "no"

    asyncio.run(run())
    assert threads == {"grammars"}


@pytest.mark.parametrize(
    ("path", "body"), [("/completion", {"prompt": "a", "n_predict": 2}), ("/v1/chat/completions", SHORT)]
)
def test_sequence_breakers_hold_up_nobody(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Searching a large vocabulary for new DRY sequence breakers takes up to a second.

    Other clients are answered meanwhile, and the result is cached.
    """
    began, free, searches = threading.Event(), threading.Event(), []
    real = Tokenizer.encode

    def encode(self: Tokenizer, text: str, *more: Any, **named: Any) -> list[int]:
        if text == "xqz":  # the rest of the sequence breaker "zxqz" after a token that ends in "z"
            searches.append(text)
            blocked(began, free)
        return real(self, text, *more, **named)

    body = {**body, "dry_multiplier": 0.5, "dry_sequence_breakers": ["zxqz", "upon"]}

    async def run() -> None:
        async with clients() as http:
            await short_answers(http)
            monkeypatch.setattr(Tokenizer, "encode", encode)
            asked = asyncio.create_task(http[ONE].post(path, json=body))
            await asyncio.to_thread(began.wait, WAIT)
            await short_answers(http)
            assert not asked.done()
            free.set()
            assert (await asked).status_code == 200
            again = await http[ONE].post(path, json={**body, "dry_sequence_breakers": ["upon", "zxqz"]})
            assert again.status_code == 200
            assert searches == ["xqz"]

    asyncio.run(run())


# -- the queue -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"user": "u"}, {"service_tier": "priority"}])
def test_a_client_is_answered_while_another_has_all_places(more: dict[str, Any]) -> None:
    async def run() -> None:
        async with clients(SchedulerLimits(parallel=2, waiting=30), 1024) as http:
            asked = []
            for number in range(8):
                fields = {name: f"u{number}" if name == "user" else value for name, value in more.items()}
                messages = [{"role": "user", "content": f"Story {number}"}]
                body = {"messages": messages, "max_tokens": 900, "ignore_eos": True, "stream": True, **fields}
                asked.append(asyncio.create_task(http[ONE].post("/v1/chat/completions", json=body)))
            while (await http[ONE].get("/slots")).json()[0]["is_processing"] is False:
                await asyncio.sleep(0.01)
            assert (await http[OTHER].post("/v1/chat/completions", json=SHORT)).status_code == 200
            assert not all(task.done() for task in asked), "it came last"
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(run())


def test_answers_of_one_request_count_one_by_one() -> None:
    """Each answer of a request with `n` counts separately, so that one client cannot fill the queue."""

    async def run() -> None:
        async with clients(SchedulerLimits(parallel=1, waiting=9), 1024) as http:
            body = {**SHORT, "max_tokens": 900, "ignore_eos": True, "n": 5}
            first = asyncio.create_task(http[ONE].post("/v1/chat/completions", json={**body, "stream": True}))
            while (await http[ONE].get("/slots")).json()[0]["is_processing"] is False:
                await asyncio.sleep(0.01)
            second = await http[ONE].post("/v1/chat/completions", json=body)
            assert second.status_code == 429
            assert "of your answers are running or waiting" in second.json()["error"]["message"]
            assert (await http[OTHER].post("/v1/chat/completions", json=SHORT)).status_code == 200
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_a_list_of_prompts_takes_its_places_in_turn(path: str) -> None:
    """A request may have more prompts than the queue holds, because the surplus prompts wait outside the queue."""

    async def run() -> None:
        async with clients(SchedulerLimits(parallel=2, waiting=130)) as http:
            answer = await http[ONE].post(path, json={"prompt": ["a"] * 150, "n_predict": 1})
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert len(found if path == "/completion" else found["choices"]) == 150

    asyncio.run(run())


# -- embeddings ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def embedding(path: Path) -> AsyncIterator[Clients]:
    registry = ModelRegistry(only("bert", path), lambda path: Served(localllm.load(path), SchedulerLimits()))
    await registry.load("bert")
    async with _of(registry) as made:
        yield made


def test_a_long_text_is_refused_or_cut_before_it_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_embedder(tmp_path / "bert.gguf", "bert-mean")
    longest = [0]
    real = Tokenizer.encode

    def encode(self: Tokenizer, text: str, *more: Any, **named: Any) -> list[int]:
        longest[0] = max(longest[0], len(text))
        return real(self, text, *more, **named)

    monkeypatch.setattr(Tokenizer, "encode", encode)

    async def run() -> None:
        text = "ab " * 100_000
        async with embedding(path) as http:
            for where, body in (
                ("/v1/embeddings", {"input": ["a", text]}),
                ("/embedding", {"content": text}),
                ("/api/embed", {"model": "bert", "input": text, "truncate": False}),
            ):
                answer = await http[ONE].post(where, json=body)
                assert answer.status_code == 400, answer.text
            assert longest[0] == 0  # no text of the list was tokenized
            # Ollama truncates by default
            cut = await http[ONE].post("/api/embed", json={"model": "bert", "input": text})
            assert cut.status_code == 200
            assert cut.json()["prompt_eval_count"] > 8
        assert longest[0] < len(text) // 2

    asyncio.run(run())


def test_texts_of_others_come_between_those_of_a_long_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_embedder(tmp_path / "bert.gguf", "bert-mean")
    began, free = threading.Event(), threading.Event()
    real = Tokenizer.encode

    def encode(self: Tokenizer, text: str, *more: Any, **named: Any) -> list[int]:
        if not began.is_set():
            blocked(began, free)
        return real(self, text, *more, **named)

    async def run() -> None:
        async with embedding(path) as http:
            monkeypatch.setattr(Tokenizer, "encode", encode)
            many = asyncio.create_task(http[ONE].post("/v1/embeddings", json={"input": ["abc def " * 5] * 2000}))
            await asyncio.to_thread(began.wait, WAIT)
            one = asyncio.create_task(http[OTHER].post("/v1/embeddings", json={"input": "abc"}))
            await asyncio.sleep(0.1)  # the request now waits in the same queue
            free.set()
            assert (await one).status_code == 200
            assert not many.done()
            assert len((await many).json()["data"]) == 2000

    asyncio.run(run())
