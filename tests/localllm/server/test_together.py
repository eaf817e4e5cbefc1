"""The whole server with a real model: answers under load equal the answers to single requests, clients
disconnect, and several models are served.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.generation.interfaces import SchedulerLimits
from localllm.loading.resolve import resolve
from localllm.server.app import make_app
from localllm.server.catalogue import folder_of, models_in, only
from localllm.server.metrics import Metrics
from localllm.server.observer import ObservedAnswers, ServiceObserver
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from localllm.server.turn import Generation, Turn
from localllm.template import given_template
from tests.conftest import reference
from tests.localllm.server.calls import events
from tests.localllm.support import write_model
from tests.localllm.test_embedding import write_embedder

DEMO = Path(resolve("demo"))
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                                                   "required": ["city"], "additionalProperties": False}},
}  # fmt: skip


def opened(path: Path, parallel: int = 3, **options: Any) -> Served:
    model = localllm.load(path, backend="cpu", threads=1, sequences=parallel, **options)
    return Served(model, SchedulerLimits(parallel=parallel))


@asynccontextmanager
async def client(registry: ModelRegistry, settings: ServerSettings | None = None) -> AsyncIterator[httpx.AsyncClient]:
    service = Service(registry)
    transport = httpx.ASGITransport(make_app(service, settings or ServerSettings()))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080", timeout=60) as one:
            yield one
    finally:
        registry.end()


def one_model(**options: Any) -> ModelRegistry:
    return ModelRegistry(only("demo", DEMO), lambda path: opened(path, **options))


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


def test_models_are_loaded_when_they_are_asked_for_and_unloaded_by_age(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "deep/c.gguf", "mmproj-x.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(DEMO, tmp_path / name)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    assert [model.name for model in models_in(tmp_path)] == ["a", "b", "broken", "deep/c"]

    async def run() -> None:
        with opened(DEMO, ctx_size=64) as one:
            need = one.bytes
        assert need > DEMO.stat().st_size  # includes the KV cache
        registry = ModelRegistry(folder_of(tmp_path), lambda path: opened(path, ctx_size=64), memory=2 * need)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        async with client(registry) as http:
            for name in ("a", "b", "deep/c"):
                answer = await http.post("/v1/chat/completions", json={**body, "model": name})
                assert answer.json()["model"] == name
            states = {info.id: info.state for info in registry.infos}
            assert states == {"a": "unloaded", "b": "loaded", "deep/c": "loaded", "broken": "failed"}
            assert set(Service(registry).loads()) == {"b", "deep/c"}
            assert (await http.post("/v1/chat/completions", json={**body, "model": "x"})).status_code == 404
            broken = await http.post("/v1/chat/completions", json={**body, "model": "broken"})
            assert broken.status_code == 503
            assert str(tmp_path) not in broken.text
            listed = (await http.get("/v1/models")).json()
            assert {model["id"] for model in listed["data"]} == set(states)

    asyncio.run(run())


def test_a_model_that_does_not_fit_with_its_cache_is_refused_and_freed() -> None:
    loaded: list[Served] = []

    def load(path: Path) -> Served:
        loaded.append(opened(path, ctx_size=64))
        return loaded[-1]

    async def run() -> None:
        registry = ModelRegistry(only("demo", DEMO), load, memory=DEMO.stat().st_size + 1000)
        with pytest.raises(LocalLLMError, match=r"demo needs \d+ MiB, the server may use \d MiB .* smaller context"):
            await registry.load("demo")
        assert [info.state for info in registry.infos] == ["failed"]
        assert registry.loaded("demo") is None

    asyncio.run(run())
    assert len(loaded) == 1
    with pytest.raises(LocalLLMError, match="closed"):
        loaded[0].model.logits([1])


def test_links_out_of_a_folder_of_models_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "models"
    (folder / "below").mkdir(parents=True)
    shutil.copy(DEMO, folder / "below" / "a.gguf")
    (folder / "b.gguf").symlink_to("below/a.gguf")
    (folder / "out.gguf").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe.gguf")
    registry = ModelRegistry(folder_of(folder), opened)
    assert [info.id for info in registry.infos] == ["b", "below/a"]
    assert "out is skipped: it is a link to a file outside" in caplog.text


def test_a_folder_without_models_is_told(tmp_path: Path) -> None:
    with pytest.raises(LocalLLMError, match="no GGUF files"):
        folder_of(tmp_path)


def test_a_server_for_embeddings() -> None:
    async def run() -> None:
        vectors = ModelRegistry(
            only("demo", DEMO),
            lambda path: Served(localllm.load(path, backend="cpu", threads=1, embeddings=True), SchedulerLimits()),
            embeds=True,
        )
        async with client(vectors) as http:
            answer = (await http.post("/v1/embeddings", json={"input": ["a cat", "a dog"]})).json()
            assert "\nllamacpp:n_decode_total 1.0\n" in (await http.get("/metrics")).text
        with localllm.load("demo", backend="cpu", threads=1, embeddings=True) as model:
            expected = model.embed(["a cat", "a dog"])
        for found, vector in zip(answer["data"], expected, strict=True):
            assert found["embedding"] == pytest.approx(vector.tolist(), abs=1e-6)

    asyncio.run(run())


def test_vectors_of_tokens_and_of_any_length() -> None:
    def load(path: Path) -> Served:
        return Served(localllm.load(path, backend="cpu", threads=1, embeddings=True), SchedulerLimits())

    async def run() -> None:
        with localllm.load("demo", backend="cpu", threads=1, embeddings=True) as model:
            long, rows = model.embed("a cat", normalize=False), model.token_embeddings("a cat")
        for settings, body, expected in (
            (ServerSettings(), {"embd_normalize": -1}, [long.tolist()]),
            (ServerSettings(pooling="none"), {}, rows.tolist()),
        ):
            registry = ModelRegistry(only("demo", DEMO), load, embeds=True)
            async with client(registry, settings) as http:
                [found] = (await http.post("/embedding", json={"content": "a cat", **body})).json()
            assert len(found["embedding"]) == len(expected)
            for ours, theirs in zip(found["embedding"], expected, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-6)

    asyncio.run(run())


def test_a_query_counts_with_each_document(tmp_path: Path) -> None:
    path = write_embedder(tmp_path / "rank.gguf", "bert-rank")

    async def run() -> None:
        registry = ModelRegistry(only("rank", path), lambda path: Served(localllm.load(path), SchedulerLimits()))
        async with client(registry) as http:
            await registry.load("rank")
            texts = {"query": "ab", "documents": ["c", "def"]}
            answer = (await http.post("/v1/rerank", json=texts)).json()
            # [CLS] a b [SEP] c [SEP] and [CLS] a b [SEP] d e f [SEP]
            assert answer["usage"] == {"prompt_tokens": 6 + 8, "total_tokens": 6 + 8}

    asyncio.run(run())


def chatml() -> ModelRegistry:
    """Return a registry with a model under the ChatML template."""

    def load(path: Path) -> Served:
        served = opened(path)
        served.model.use_template(given_template("chatml"))
        return served

    return ModelRegistry(only("demo", DEMO), load)


def test_a_given_template_takes_the_place_of_the_files() -> None:
    async def run() -> None:
        registry = chatml()
        messages = [{"role": "user", "content": "Hi"}]
        async with client(registry) as http:
            await http.post("/tokenize", json={"content": "x"})  # this request loads the model
            shown = (await http.post("/apply-template", json={"messages": messages})).json()["prompt"]
            assert shown == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            assert (await http.get("/props")).json()["chat_template"] == given_template("chatml").source
            body = {"messages": messages, "max_tokens": 1, "verbose": True}
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            assert answer["__verbose"]["prompt"].endswith(shown)
            assert answer["__verbose"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]

    asyncio.run(run())


def test_a_continued_message_follows_the_prompt_of_an_answer_whatever_the_request_says_of_it() -> None:
    async def run() -> None:
        registry = chatml()
        begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Wh"}]
        async with client(registry) as http:
            for extra in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
                shown = (await http.post("/apply-template", json={"messages": begun, **extra})).json()["prompt"]
                assert shown == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWh"

    asyncio.run(run())


def test_spaces_before_words_where_a_vocabulary_adds_them() -> None:
    """A continued message follows the prompt without an added space, and a completion keeps its leading space.

    This vocabulary adds a space before text.
    """
    stories = reference("models", "stories260K-f32.gguf")

    def load(path: Path) -> Served:
        served = opened(path)
        served.model.use_template(given_template("chatml"))
        return served

    async def run() -> None:
        begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Wh"}]
        greedy = {"temperature": 0, "max_tokens": 4}
        async with client(ModelRegistry(only("stories", stories), load)) as http:
            body = {"messages": begun, "verbose": True, **greedy}
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            assert answer["__verbose"]["prompt"].endswith("<|im_start|>assistant\nWh")
            told = (await http.post("/v1/completions", json={"prompt": "Once upon", **greedy})).json()
            same = (await http.post("/completion", json={"prompt": "Once upon", **greedy})).json()
            assert told["choices"][0]["text"] == same["content"] == " a time, there"

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_content_is_the_text_of_its_tokens(tmp_path: Path, stream: bool) -> None:
    """The content is the text of the generated tokens, including a leading space."""
    path = write_model(tmp_path / "m.gguf")
    body = {"messages": [{"role": "user", "content": "Hi"}], "grammar": 'root ::= " ab"', "logprobs": True}

    async def run() -> None:
        async with client(ModelRegistry(only("m", path), opened)) as http:
            answer = await http.post("/v1/chat/completions", json={**body, "max_tokens": 8, "stream": stream})
            said, tokens = "", ""
            for event in events(answer) if stream else [answer.json()]:
                for choice in event["choices"]:
                    said += (choice["delta"] if stream else choice["message"]).get("content") or ""
                    tokens += "".join(each["token"] for each in (choice["logprobs"] or {}).get("content", ()))
            assert said == tokens == " ab"

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
