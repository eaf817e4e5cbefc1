"""llama.cpp's logits and generated texts for the reference models: random weights for each architecture, and two
trained models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from localllm.models import architecture_of
from tests.conftest import reference
from tests.models.support import Driver, bind_reference, nmse, open_model, plan_of

FILES = [
    *("gemma-dense", "gemma2-dense", "gemma3-dense", "glm4-dense", "granite-dense", "llama-dense", "mistral3-dense"),
    *("olmo2-dense", "phi3-dense", "qwen2-dense", "qwen3-dense", "smollm3-dense", "stablelm-dense", "starcoder2-dense"),
    *("glm4moe-moe", "gpt-oss-moe", "llama-moe", "qwen2moe-moe", "qwen3moe-moe"),
]

Feed = Callable[[Driver, np.ndarray], Iterator[np.ndarray]]


def as_llama_cpp(driver: Driver, tokens: np.ndarray) -> Iterator[np.ndarray]:
    yield driver.step([(0, tokens[:32])])
    for token in tokens[32:]:
        yield driver.step([(0, [token])])


def in_odd_chunks(driver: Driver, tokens: np.ndarray) -> Iterator[np.ndarray]:
    for start, stop in [(0, 1), (1, 4), (4, 31), (31, 40)]:
        yield driver.step([(0, tokens[start:stop])])


def beside_another_sequence(driver: Driver, tokens: np.ndarray) -> Iterator[np.ndarray]:
    other = tokens[::-1]
    yield driver.step([(1, other[:3]), (0, tokens[:20])])[3:]
    yield driver.step([(0, tokens[20:35]), (1, other[3:40])])[:15]
    yield driver.step([(0, tokens[35:])])


@pytest.mark.parametrize(
    ("file", "cache_type"), [*((file, "f32") for file in FILES), ("llama-dense", "f16"), ("gpt-oss-moe", "f16")]
)
def test_logits_of_every_position(file: str, cache_type: str) -> None:
    """The error comes from llama.cpp's rounding of activations to F16. With F32 weights it is at most 1e-11."""
    metadata, tensors = open_model(reference("archs", f"{file}.gguf"))
    truth = np.load(reference("archs", f"{file}.npz"))
    assert int(truth["prompt_len"].item()) == 32
    plan = plan_of(metadata, tensors)
    results = []
    for feed in (as_llama_cpp, in_odd_chunks, beside_another_sequence):
        driver = Driver(bind_reference(plan, cache_type, positions=64), sequences=2)
        results.append(np.concatenate(list(feed(driver, truth["tokens"]))))
        assert nmse(results[-1], truth["logits"]).max() < 2e-6
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("file", FILES)
def test_the_only_unused_tensors_are_those_llama_cpp_ignores(file: str) -> None:
    metadata, tensors = open_model(reference("archs", f"{file}.gguf"))
    row = architecture_of(metadata)
    for name in tensors.keys() - plan_of(metadata, tensors).tensors:
        part, kind = name.rsplit(".", 1)
        if kind == "scale":
            assert "ffn" in part
            assert not (row.routing and row.routing.scales if "exps" in part else row.ffn_scales)
        else:
            assert kind == "input_scale" or name in ("cls.output.weight", "rope_factors_long.weight")


@pytest.mark.parametrize("name", ["stories260K-f32", "babyllama-969K-tok361-f32"])
def test_greedy_text_is_that_of_llama_cpp(name: str) -> None:
    metadata, tensors = open_model(reference("models", f"{name}.gguf"))
    expected = reference("models", f"{name}.greedy160.txt").read_text()
    pieces = metadata["tokenizer.ggml.tokens"]
    prompt = [metadata["tokenizer.ggml.bos_token_id"], *merge(" Once upon a time", metadata)]
    driver = Driver(bind_reference(plan_of(metadata, tensors), "f16", positions=256))
    tokens = prompt[1:]
    logits = driver.step([(0, prompt)], logit_rows=[len(prompt) - 1])
    for _ in range(160):
        token = int(logits[0].argmax())
        if token == metadata["tokenizer.ggml.eos_token_id"]:
            break
        tokens.append(token)
        logits = driver.step([(0, [token])])
    assert text(tokens, pieces).strip() == expected.strip()


def merge(prompt: str, metadata: dict[str, list[str]]) -> list[int]:
    """Tokenize in the simple SentencePiece way: merge the neighbors whose merged token has the best score (leftmost
    first), until no merge gives a token.
    """
    ids = {piece: i for i, piece in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    parts = list(prompt.replace(" ", "▁"))
    while pairs := [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]:
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ids[part] for part in parts]


def text(tokens: list[int], pieces: list[str]) -> str:
    raw = b""
    for token in tokens:
        piece = pieces[token]
        raw += bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
    return raw.decode()
