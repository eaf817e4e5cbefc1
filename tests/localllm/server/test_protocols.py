"""The bundled model gives the same answers through llama.cpp's and Ollama's APIs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.localllm.server.whole import client, one_model

GREEDY = {"temperature": 0, "n_predict": 12}


async def told(one: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await one.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_completions_tokens_and_texts_agree() -> None:
    async def main() -> None:
        async with client(one_model()) as one:
            text = "Once upon a time"
            ids = (await told(one, "/tokenize", content=text, add_special=True))["tokens"]
            whole = await told(one, "/completion", prompt=text, return_tokens=True, n_probs=3, **GREEDY)
            assert whole["tokens_evaluated"] == len(ids)
            assert whole["tokens_predicted"] == len(whole["tokens"]) == len(whole["completion_probabilities"]) == 12
            assert (await told(one, "/detokenize", tokens=whole["tokens"]))["content"] == whole["content"]
            for token, each in zip(whole["tokens"], whole["completion_probabilities"], strict=True):
                best = max(each["top_logprobs"], key=lambda one: one["logprob"])
                assert token == each["id"] == best["id"]
                assert bytes(each["bytes"]).decode() == each["token"]
            by_ids = await told(one, "/completion", prompt=ids, **GREEDY)
            assert by_ids["content"] == whole["content"]
            assert by_ids["prompt"] == whole["prompt"] == (await told(one, "/detokenize", tokens=ids))["content"]
            stopped = await told(one, "/completion", prompt=text, stop=[whole["content"][8:12]], **GREEDY)
            assert stopped["content"] == whole["content"][:8]
            assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", whole["content"][8:12])

    asyncio.run(main())


def test_streams_and_answers_agree() -> None:
    async def main() -> None:
        async with client(one_model()) as one:
            body = {"prompt": ["Once", "The cat"], "return_progress": True, "timings_per_token": True, **GREEDY}
            whole = await told(one, "/completion", **body)
            response = await one.post("/completion", json=body | {"stream": True})
            found = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
            for index, each in enumerate(whole):
                mine = [chunk for chunk in found if chunk["index"] == index]
                assert "".join(chunk["content"] for chunk in mine) == each["content"]
                assert sum(len(chunk["tokens"]) for chunk in mine) == each["tokens_predicted"]
                assert mine[0]["prompt_progress"]["processed"] == mine[0]["prompt_progress"]["cache"]
                assert [chunk["stop"] for chunk in mine] == [False] * (len(mine) - 1) + [True]
                assert mine[-1]["stop_type"] == each["stop_type"]

    asyncio.run(main())


@pytest.mark.parametrize("opened", [True, False])
def test_a_template_with_and_without_the_beginning_of_the_answer(opened: bool) -> None:
    async def main() -> None:
        async with client(one_model()) as one:
            body = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": opened}
            prompt = (await told(one, "/apply-template", **body))["prompt"]
            assert prompt.endswith("<|im_start|>assistant<|im_sep|>") is opened
            assert "Hi" in prompt

    asyncio.run(main())


def test_ollamas_answers_are_openais() -> None:
    async def main() -> None:
        async with client(one_model()) as one:
            messages = [{"role": "user", "content": "Tell me a story."}]
            options = {"temperature": 0, "num_predict": 12}
            theirs = await told(one, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=12)
            text = theirs["choices"][0]["message"]["content"]
            chat = await told(one, "/api/chat", model="demo", messages=messages, options=options, stream=False)
            assert chat["message"]["content"] == text
            assert (chat["eval_count"], chat["done_reason"]) == (12, "length")
            assert chat["prompt_eval_count"] == theirs["usage"]["prompt_tokens"]
            body = {"prompt": "Tell me a story.", "options": options, "stream": False}
            first = await told(one, "/api/generate", model="demo", **body)
            assert first["response"] == text
            assert len(first["context"]) == chat["prompt_eval_count"] + 12
            again = await told(one, "/api/generate", **body | {"context": first["context"], "prompt": "More."})
            assert again["model"] == "demo"
            assert again["context"][: len(first["context"])] == first["context"]

    asyncio.run(main())


def test_a_prompt_over_the_context_is_told_with_both_lengths() -> None:
    async def main() -> None:
        async with client(one_model(ctx_size=64)) as one:
            response = await one.post("/completion", json={"prompt": [5] * 100})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["type"] == "exceed_context_size_error"
            assert (error["n_prompt_tokens"], error["n_ctx"]) == (100, 64)
            assert "exceeds the available context size" in error["message"]

    asyncio.run(main())
