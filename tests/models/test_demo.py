"""The bundled model: the required content of its two GGUFs, and its loss on a chat outside the training data.

With our tokenizer and forward pass, the loss of the model and its draft model must equal that computed by PyTorch.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localllm.template.formats import find_format
from localllm.tokenizer import Tokenizer
from tests.models.support import Driver, bind_reference, open_model, plan_of
from tests.models.tiny import Model

SPECIAL = (
    *("<|endoftext|>", "<|im_end|>"),
    *(f"<|im_start|>{role}<|im_sep|>" for role in ("system", "user", "assistant")),
)
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
FILES = {"target": DEMO / "demo.gguf", "draft": DEMO / "draft.gguf"}


@pytest.fixture(scope="module")
def opened() -> dict[str, Model]:
    return {role: open_model(path) for role, path in FILES.items()}


def test_both_files_together_stay_under_14_mb() -> None:
    assert sum(path.stat().st_size for path in FILES.values()) < 14_000_000


def test_its_temperature_is_in_the_file(opened: dict[str, Model]) -> None:
    assert opened["target"][0]["general.sampling.temp"] == 0.5


def test_draft_is_the_smaller_and_speaks_the_same_tokens(opened: dict[str, Model]) -> None:
    target, draft = (opened[role][0] for role in ("target", "draft"))
    keys = {key for key in target if key.startswith("tokenizer.")}
    assert keys == {key for key in draft if key.startswith("tokenizer.")}
    assert {key: target[key] for key in keys} == {key: draft[key] for key in keys}
    assert FILES["draft"].stat().st_size < FILES["target"].stat().st_size / 2


@pytest.mark.parametrize("role", FILES)
def test_every_matrix_can_take_every_block_format(opened: dict[str, Model], role: str) -> None:
    widths = {name: weight.shape[-1] for name, weight in opened[role][1].items() if len(weight.shape) == 2}
    assert len(widths) > 7
    assert {name: width for name, width in widths.items() if width % 256} == {}


@pytest.mark.parametrize("role", FILES)
def test_vocabulary_is_closed_under_its_merges(opened: dict[str, Model], role: str) -> None:
    metadata, tensors = opened[role]
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert len(set(tokens)) == len(tokens) == tensors["token_embd.weight"].shape[0]
    joined = [tuple(merge.split(" ")) for merge in merges]
    assert {part for pair in joined for part in (*pair, "".join(pair))} <= set(tokens)
    kinds = metadata["tokenizer.ggml.token_type"]
    assert [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3] == list(SPECIAL)  # 3: control
    assert len(tokens) == len(SPECIAL) + 256 + len(merges)  # every byte has a token, so every text can be encoded


def test_template_gives_the_text_the_model_was_trained_on(opened: dict[str, Model]) -> None:
    metadata = opened["target"][0]
    template = ImmutableSandboxedEnvironment().from_string(metadata["tokenizer.chat_template"])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "A story"},
    ]
    bos = metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.bos_token_id"]]
    assert template.render(messages=messages, bos_token=bos, add_generation_prompt=True) == (
        "<|endoftext|><|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>Hello!<|im_end|><|im_start|>user<|im_sep|>A story<|im_end|>"
        "<|im_start|>assistant<|im_sep|>"
    )
    assert metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"


def test_template_writes_tools_as_in_training(opened: dict[str, Model]) -> None:
    environment = ImmutableSandboxedEnvironment()
    environment.filters["tojson"] = lambda value: json.dumps(value)
    template = environment.from_string(opened["target"][0]["tokenizer.chat_template"])
    function = {"name": "cat", "description": "Reads", "parameters": {"type": "object"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Open a.txt"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "cat", "arguments": {"p": "a"}}}]},
        {"role": "tool", "content": "5"},
    ]
    assert template.render(messages=messages, bos_token="", tools=[{"function": function}]) == (
        "<|im_start|>system<|im_sep|>Be brief.\n\nTools:\n<tools>\n"
        '{"name": "cat", "description": "Reads", "parameters": {"type": "object"}}\n</tools>\n'
        'To call one, answer <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call><|im_end|>'
        "<|im_start|>user<|im_sep|>Open a.txt<|im_end|>"
        '<|im_start|>assistant<|im_sep|><tool_call>\n{"name": "cat", "arguments": {"p": "a"}}\n</tool_call><|im_end|>'
        "<|im_start|>user<|im_sep|><tool_response>\n5\n</tool_response><|im_end|>"
    )


def test_localllm_reads_its_calls(opened: dict[str, Model]) -> None:
    assert find_format(opened["target"][0]["tokenizer.chat_template"]).name == "hermes"


CHAT = (  # written for this test, so it is not in the training data
    "<|im_start|>user<|im_sep|>Hello, I would like to book a table for two in Oakland.<|im_end|>"
    "<|im_start|>assistant<|im_sep|>Sure. What time would you like the reservation for?<|im_end|>"
    "<|im_start|>user<|im_sep|>At 7 pm please. Is there a good Italian restaurant?<|im_end|>"
    "<|im_start|>assistant<|im_sep|>Please confirm: a table for 2 at 7 pm today at a restaurant in Oakland.<|im_end|>"
    "<|im_start|>user<|im_sep|>Thanks! Tell me a story about a bird.<|im_end|>"
    "<|im_start|>assistant<|im_sep|>Once upon a time, there was a little bird. The bird loved to sing. One day, the "
    "bird saw a big cat. The cat was sad, so the bird sang a song and they became friends.<|im_end|>"
)
# Loss in nats per token of CHAT, computed by train.py with the unquantized weights.
TORCH_LOSS = {"target": 1.6426, "draft": 2.1178}


@pytest.fixture(scope="module")
def chat_logits(opened: dict[str, Model]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return by model: ids (T,) of CHAT, and logits (T, vocab) after each id."""
    result = {}
    for role, (metadata, tensors) in opened.items():
        ids = Tokenizer.from_metadata(metadata).encode(CHAT, parse_special=True)
        driver = Driver(bind_reference(plan_of(metadata, tensors)))
        rows = [driver.step([(0, ids[i : i + 64])]) for i in range(0, len(ids), 64)]
        result[role] = (np.array(ids), np.concatenate(rows).astype(np.float64))
    return result


@pytest.mark.parametrize("role", FILES)
def test_our_forward_predicts_as_torch_does(chat_logits: dict[str, tuple[np.ndarray, np.ndarray]], role: str) -> None:
    ids, logits = chat_logits[role]
    top = logits.max(axis=-1)
    surprise = np.log(np.exp(logits - top[:, None]).sum(axis=-1)) + top  # (T,) log normalizers
    loss = (surprise[:-1] - logits[np.arange(len(ids) - 1), ids[1:]]).mean()
    assert loss == pytest.approx(TORCH_LOSS[role], abs=0.03)  # weights are Q4_K and Q6_K here, float32 in PyTorch


def test_draft_guesses_what_the_target_says(chat_logits: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    target, draft = (chat_logits[role][1].argmax(axis=-1) for role in ("target", "draft"))
    assert (target == draft).mean() > 0.4
