"""The whole server with a given template: the prompt, and the spaces before words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from localllm.server.catalogue import only
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.template import given_template
from tests.conftest import reference
from tests.localllm.server.calls import events
from tests.localllm.server.whole import DEMO, client, opened
from tests.localllm.support import write_model


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
