"""The whole server with a real model: answers under load equal the answers to single requests; clients disconnect."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.generation.interfaces import SchedulerLimits
from localllm.server.catalogue import only
from localllm.server.metrics import Metrics
from localllm.server.observer import ObservedAnswers, ServiceObserver
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.service import Service
from localllm.server.turn import Generation, Turn
from tests.localllm.server.whole import DEMO, client, one_model

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                                                   "required": ["city"], "additionalProperties": False}},
}  # fmt: skip


def requests(count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests to every API, greedy or seeded."""
    chance = random.Random(seed)
    words = ("once", "upon", "a", "time", "there", "was", "a", "little", "girl", "who", "loved", "her", "red", "ball")
    made: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        text = " ".join(chance.choices(words, k=chance.randrange(1, 60)))
        messages = [{"role": "user", "content": text}]
        heat = chance.choice([0, 0.9])
        usual = {"temperature": heat, "max_tokens": chance.randrange(1, 30)}
        made.append(
            [
                ("/v1/chat/completions", {"messages": messages, "seed": number, **usual}),
                ("/v1/completions", {"prompt": text, "seed": number, **usual}),
                ("/v1/messages", {"messages": messages, "max_tokens": 12, "temperature": 0}),
                ("/api/chat", {"model": "demo", "messages": messages, "stream": False,
                               "options": {"num_predict": 9, "temperature": heat, "seed": number}}),
                ("/completion", {"prompt": text, "n_predict": 9, "temperature": heat, "seed": number}),
            ][number % 5]
        )  # fmt: skip
    return made


def said(body: dict[str, Any]) -> Any:
    """Return the generated text of a response in any API's format."""
    choices = body.get("choices")
    if choices:
        return choices[0]["message"]["content"] if "message" in choices[0] else choices[0]["text"]
    return body["message"]["content"] if "message" in body else body["content"]


def test_answers_under_load_are_those_of_an_idle_server() -> None:
    async def run() -> None:
        async with client(one_model(ctx_size=256)) as http:
            asked = requests(40, 1)
            alone = [said((await http.post(path, json=body)).json()) for path, body in asked]
            for shuffle in (2, 3):
                order = list(range(len(asked)))
                random.Random(shuffle).shuffle(order)
                answers = await asyncio.gather(*(http.post(asked[i][0], json=asked[i][1]) for i in order))
                for i, answer in zip(order, answers, strict=True):
                    assert answer.status_code == 200, answer.text
                    assert said(answer.json()) == alone[i]

    asyncio.run(run())


def test_several_answers_with_the_log_probabilities_of_their_prompt() -> None:
    body = {"prompt": "Once upon", "max_tokens": 8, "seed": 4, "temperature": 3.0, "echo": True, "logprobs": 1}

    async def run() -> None:
        async with client(one_model()) as http:
            two = (await http.post("/v1/completions", json={**body, "n": 2})).json()["choices"]
            for number, choice in enumerate(two):
                [alone] = (await http.post("/v1/completions", json={**body, "seed": 4 + number})).json()["choices"]
                assert choice == {**alone, "index": number}
        assert two[0]["logprobs"]["tokens"][:2] == ["Once", " upon"]
        assert two[0]["text"] != two[1]["text"]

    asyncio.run(run())


def test_streams_carry_the_same_text() -> None:
    async def run() -> None:
        body = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0, "max_tokens": 20}
        async with client(one_model()) as http:
            whole = said((await http.post("/v1/chat/completions", json=body)).json())
            lines = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole
        assert lines[-1] == "data: [DONE]" or "data: [DONE]" in lines

    asyncio.run(run())


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_schemas_and_forced_tools_hold(temperature: float) -> None:
    async def run() -> None:
        async with client(one_model()) as http:
            body = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": temperature, "max_tokens": 300}
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
            for seed in range(3):
                answer = await http.post("/v1/chat/completions", json={**body, "seed": seed, "response_format": form})
                choice = answer.json()["choices"][0]
                if choice["finish_reason"] == "stop":
                    assert json.loads(choice["message"]["content"])["n"] in (1, 2, 3)
                forced = {**body, "seed": seed, "tools": [WEATHER], "tool_choice": "required"}
                choice = (await http.post("/v1/chat/completions", json=forced)).json()["choices"][0]
                if choice["finish_reason"] == "tool_calls":
                    [call] = choice["message"]["tool_calls"][:1]
                    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
                assert choice["finish_reason"] in ("tool_calls", "length")

    asyncio.run(run())


def test_a_call_that_is_not_parsed_is_content() -> None:
    async def run() -> None:
        body = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0, "max_tokens": 300, "seed": 1,
                "tools": [WEATHER], "tool_choice": "required"}  # fmt: skip
        async with client(one_model()) as http:
            read = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
            left = (await http.post("/v1/chat/completions", json={**body, "parse_tool_calls": False})).json()
        [call] = read["message"]["tool_calls"][:1]
        assert "tool_calls" not in left["choices"][0]["message"]
        assert '"weather"' in left["choices"][0]["message"]["content"]
        assert json.loads(call["function"]["arguments"])["city"] in left["choices"][0]["message"]["content"]
        assert left["choices"][0]["finish_reason"] != "tool_calls"

    asyncio.run(run())


def test_a_client_that_vanishes_frees_its_place() -> None:
    async def run() -> None:
        registry = one_model(parallel=1)
        service = Service(registry)
        async with client(registry) as http:
            from localllm.server.turn import Completion, Generation

            wanted = Completion("Once", Generation({"temperature": 0}, max_tokens=900, ignore_eos=True))
            events = service.complete("demo", wanted)
            seen = 0
            async for _ in events:
                seen += 1
                if seen == 5:
                    break
            await events.aclose()
            answer = await http.post("/completion", json={"prompt": "Once", "n_predict": 3})
            assert answer.status_code == 200
            for _ in range(1000):  # the last event arrives before the scheduler removes the request
                load = service.load_of("demo")
                assert load is not None
                if not load.running and load.kept_blocks + load.free_blocks == load.blocks:
                    break
                await asyncio.sleep(0.01)
            assert not load.running
            assert load.kept_blocks
            assert load.kept_blocks + load.free_blocks == load.blocks
            assert service.loads() == {"demo": load}

    asyncio.run(run())


def test_a_prompt_far_beyond_the_context_says_how_long_it_is_at_least() -> None:
    async def run() -> None:
        async with client(one_model(ctx_size=64)) as http:
            longest = localllm.load(DEMO, backend="cpu", threads=1).tokenizer.longest
            long = "x" * (longest * 64 + 1)
            for path, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
                ("/completion", {"prompt": long}),
                ("/v1/completions", {"prompt": long}),
            ):
                answer = await http.post(path, json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (400, "exceed_context_size_error")
                assert error["n_ctx"] == 64
                assert error["n_prompt_tokens"] >= 65
                assert "exceeds the available context size" in error["message"]

    asyncio.run(run())


def test_the_state_tells_the_options_of_the_server() -> None:
    async def run() -> None:
        def load(path: Path) -> Served:
            model = localllm.load(path, backend="cpu", threads=1, sequences=1)
            return Served(model, SchedulerLimits(parallel=1), sampling={"seed": 42, "temperature": 0.25})

        async with client(ModelRegistry(only("demo", DEMO), load)) as http:
            settings = (await http.post("/completion", json={"prompt": "a", "n_predict": 1})).json()
            shown = (await http.get("/props")).json()["default_generation_settings"]["params"]
            for found in (settings["generation_settings"], shown):
                assert (found["seed"], found["temperature"]) == (42, 0.25)

    asyncio.run(run())


class Noting(ServiceObserver):
    """An observer that records the requests."""

    def begin(self, model: str, generation: Generation) -> ObservedAnswers:
        self.begun = generation
        return super().begin(model, generation)


@pytest.mark.parametrize(("allowed", "priority"), [(False, 0), (True, 1)])
def test_the_service_tells_of_its_answers(allowed: bool, priority: int) -> None:
    async def main() -> None:
        registry = one_model()
        try:
            service = Service(registry)
            service.observer = observer = Noting(Metrics(), lambda *one: spent.append(one), allowed)
            turn = Turn([{"role": "user", "content": "Hi"}], Generation(n=2, max_tokens=3, priority=1, client="c/u"))
            loads = [observer.load() async for _ in service.answer("demo", turn)]
            assert loads[-1] == observer.load() == (0, 0)
            assert any(running for running, _ in loads)
            assert observer.begun.priority == priority
            assert [client for client, _ in spent] == ["c", "c"]
        finally:
            registry.end()

    spent: list[tuple[str, int]] = []
    asyncio.run(main())
