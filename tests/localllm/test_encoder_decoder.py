"""T5 from Python, from the command line and behind a server: the prompt is encoded in one step, then the
answer is decoded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.engine import SequenceRows
from localllm.generation.request import Request
from localllm.model import Model
from localllm.server.catalogue import only
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from tests.localllm import t5
from tests.localllm.generation.support import ask, scheduled
from tests.localllm.server.whole import client, opened
from tests.localllm.support import localllm as run
from tests.localllm.test_embedding import expected, write_t5

PROMPTS = list(t5.ANSWERS)
LONG = "a cat and dogs " * 6  # more than two KV cache blocks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return t5.write(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with localllm.load(path, cache_type_k="f32", cache_type_v="f32", threads=2, sequences=3) as model:
        yield model


def answer(model: Model, prompt: str | list[int], count: int = 20) -> list[int]:
    pieces = model.generate(prompt, temperature=0, max_tokens=count)
    return [piece.token for piece in pieces if piece.token is not None]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_tokens_of_llama_completion(model: Model, prompt: str) -> None:
    ids = model.tokenize(prompt)
    assert ids[-1] == t5.END
    text = "".join(model.tokenizer.piece(token).decode() for token in answer(model, prompt))
    assert text.startswith(t5.ANSWERS[prompt])
    assert answer(model, ids) == answer(model, [*ids, t5.START]) == answer(model, prompt)


def test_a_given_beginning_of_the_answer(model: Model) -> None:
    """Text after the decoder's start token is the beginning of the answer."""
    ids, whole = model.tokenize(PROMPTS[0]), answer(model, PROMPTS[0])
    assert answer(model, [*ids, t5.START, *whole[:5]], 15) == whole[5:]


def test_the_command_line(path: Path, tmp_path: Path) -> None:
    greedy = ("--temp", "0", "-n", "15", "-ctk", "f32", "-ctv", "f32")
    done = run("run", str(path), PROMPTS[0], *greedy)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(t5.ANSWERS[PROMPTS[0]])
    kept = tmp_path / "kept"
    for _ in range(2):  # the second run restores the KV cache of LONG from the file
        again = run("run", str(path), LONG, *greedy, "--prompt-cache", str(kept), "--prompt-cache-all")
        assert again.stdout == run("run", str(path), LONG, *greedy).stdout
    refusals = {
        ("chat", str(path)): "has an encoder, which reads a single text and cannot chat; use `localllm run`",
        ("run", str(path), "a", "--spec", "ngram"): "a model with an encoder does not support drafts; leave --spec out",
        ("perplexity", str(path), "-f", __file__): "answers a text, and cannot score or continue one",
        ("bench", str(path), "-p", "8", "-n", "0"): "has an encoder, and bench measures models that continue a text",
    }
    for arguments, problem in refusals.items():
        refused = run(*arguments)
        assert refused.returncode == 1, refused
        assert problem in refused.stderr
        assert "Traceback" not in refused.stderr


def test_sequences_fork_and_go_back(model: Model) -> None:
    engine, ids = model.engine, [*model.tokenize(LONG), t5.START]
    border = len(ids) - 1
    whole = answer(model, LONG, 12)
    first, other = engine.add(), engine.add()
    engine.step([SequenceRows(other, [*model.tokenize("z"), t5.START, *whole[:3]])])
    [result, _] = engine.step([SequenceRows(first, ids), SequenceRows(other, whole[3:4])])
    assert int(result.logits.argmax()) == whole[0]
    assert first.border == border
    second = engine.fork(first)
    # The fork and the original sequence decode in turn. The fork decodes another text's answer.
    for number, token in enumerate(whole[:-1]):
        rows = [SequenceRows(second, [token]), SequenceRows(first, [token]), SequenceRows(other, [token])]
        results = engine.step(rows)
        assert [int(one.logits.argmax()) for one in results[:2]] == [whole[number + 1]] * 2
        np.testing.assert_array_equal(results[0].logits, results[1].logits)
    assert engine.truncate(first, border + 4) == border + 4
    [result] = engine.step([SequenceRows(first, whole[3:6], "all")])
    assert result.logits.argmax(axis=1).tolist() == whole[4:7]
    assert engine.truncate(second, border) == 0  # the encoder's text stays whole, together with the start token
    assert second.border == 0
    [result] = engine.step([SequenceRows(second, [*ids, *whole[:2]], (border, border + 2))])
    assert result.logits.argmax(axis=1).tolist() == [whole[0], whole[2]]
    for sequence in (first, second, other):
        engine.release(sequence)


def test_wrong_steps_change_nothing(model: Model) -> None:
    engine, ids = model.engine, model.tokenize("a cat")
    sequence = engine.add()
    for tokens, wanted, problem in (
        (ids, "last", "answers a text, and cannot score or continue one"),
        ([t5.START, *ids], "last", "answers a text"),
        ([*ids, t5.START], "all", "has no logits of the text that it answers"),
        ([*ids, t5.START], (1, len(ids)), "has no logits of the text that it answers"),
    ):
        with pytest.raises(LocalLLMError, match=problem):
            engine.step([SequenceRows(sequence, tokens, wanted)])  # type: ignore[arg-type]
        assert (sequence.length, sequence.border) == (0, 0)
    with pytest.raises(LocalLLMError, match="cannot score or continue one"):
        model.logits(ids)
    with pytest.raises(
        LocalLLMError, match=r"has an encoder, which reads a single text and cannot chat; use model\.generate"
    ):
        next(model.chat("hello"))


def test_requests_together_and_alone(model: Model) -> None:
    """Requests with texts of different lengths start and end. Each answer has the same tokens as without other
    requests.

    A text is encoded in one step, even if the time budget of a step allows only a part of it.
    """
    texts = [PROMPTS[0], LONG, "z", PROMPTS[1], PROMPTS[0], LONG]
    alone = {text: answer(model, text, 30) for text in set(texts)}
    options = model.sampling_defaults.options({"temperature": 0})
    with scheduled(model, parallel=3, itl_target=1e-6) as scheduler:
        asked = [
            ask(scheduler, Request(model.tokenize(text), options, max_tokens=5 + 5 * number))
            for number, text in enumerate(texts)
        ]
        for number, (text, one) in enumerate(zip(texts, asked, strict=True)):
            one.result()
            assert one.tokens == alone[text][: 5 + 5 * number]


def test_the_server(path: Path) -> None:
    registry = ModelRegistry(only("t5", path), lambda path: opened(path, cache_type_k="f32", cache_type_v="f32"))

    async def run() -> None:
        async with client(registry) as one:
            greedy = {"prompt": PROMPTS[0], "temperature": 0}
            body = (await one.post("/v1/completions", json={**greedy, "max_tokens": 15})).json()
            assert body["choices"][0]["text"].startswith(t5.ANSWERS[PROMPTS[0]])
            body = (await one.post("/completion", json={**greedy, "n_predict": 15})).json()
            assert body["content"].startswith(t5.ANSWERS[PROMPTS[0]])
            chat = {"messages": [{"role": "user", "content": "a"}]}
            refused = await one.post("/v1/chat/completions", json=chat)
            assert refused.status_code >= 400
            assert "has an encoder, which takes one text and cannot chat" in json.dumps(refused.json())
            echoed = await one.post("/v1/completions", json={**greedy, "echo": True, "logprobs": 1})
            assert "has no logits of the text" in json.dumps(echoed.json())
            assert (await one.post("/completion", json={**greedy, "n_predict": 3})).status_code == 200

    asyncio.run(run())


def test_the_encoder_alone_embeds(path: Path) -> None:
    with localllm.load(path, embeddings=True) as model:
        assert not model.encodes
        assert model.embed("a cat").shape == (128,)


@pytest.mark.parametrize("name", ["t5-gated", "t5encoder"])
def test_the_server_embeds(name: str, tmp_path: Path) -> None:
    """The embedding is the mean of the encoder's hidden states, for a whole T5 and for an encoder. In embedding mode, a
    T5 does not generate.
    """
    path = t5.write(tmp_path, name) if name == "t5-gated" else write_t5(tmp_path / "t5encoder.gguf")

    def load(path: Path) -> Served:
        return opened(path, embeddings=True, cache_type_k="f32", cache_type_v="f32")

    registry = ModelRegistry(only(name, path), load, embeds=True)

    async def run() -> None:
        async with client(registry) as one:
            texts = ["a cat", LONG]
            body = (await one.post("/v1/embeddings", json={"input": texts, "model": name})).json()
            ids = [(await one.post("/tokenize", json={"content": text, "add_special": True})).json() for text in texts]
            for found, tokens in zip(body["data"], ids, strict=True):
                assert tokens["tokens"][-1] == t5.END
                theirs = expected(path, tokens["tokens"], "mean")
                np.testing.assert_allclose(found["embedding"], theirs / np.linalg.norm(theirs), atol=1e-4)
            assert body["usage"]["prompt_tokens"] == sum(len(tokens["tokens"]) for tokens in ids)
            assert (await one.post("/v1/completions", json={"prompt": "a"})).status_code >= 400

    asyncio.run(run())
