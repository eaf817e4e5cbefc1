"""No client can block the others: one client's slow work does not delay another's requests."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from localllm.constrained import compiling
from localllm.constrained.constraint import GrammarVocabulary
from localllm.sandbox import ConfinedStopped, ResourceLimits
from localllm.server.lanes import LARGE
from localllm.template import ChatTemplate
from localllm.tokenizer import Tokenizer
from tests.localllm.server.two_clients import (
    ONE,
    SHORT,
    WAIT,
    blocked,
    clients,
    short_answers,
)


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
