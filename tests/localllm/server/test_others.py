"""No client can block the others: work is bounded before it starts, and places in the queue are shared."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.generation.interfaces import SchedulerLimits
from localllm.server.catalogue import only
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.tokenizer import Tokenizer
from tests.localllm.server.two_clients import (
    ONE,
    OTHER,
    SHORT,
    WAIT,
    Clients,
    blocked,
    clients,
    clients_of,
)
from tests.localllm.test_embedding import write_embedder

TOO_LONG = "1234567890" * 1000  # 10000 characters, although the longest token has 31


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
    async with clients_of(registry) as made:
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
