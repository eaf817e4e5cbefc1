"""Output matrices with rows for the last token ids only, as in Qwen3-TTS. Other ids are never generated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm.backends.base import Backend
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.models import ModelError
from tests.backends.support import bind
from tests.models.kit import KIT
from tests.models.support import Driver, MemoryWeight, nmse, plan_of

MODEL, TEXT = KIT["qwen3tts-dense"], 40  # number of text token ids, which precede the ids of speech tokens


def with_text(count: int = TEXT) -> tuple[dict[str, Any], dict[str, MemoryWeight]]:
    """Return the model with `count` text token ids prepended to the vocabulary, without logits."""
    metadata, tensors = MODEL.loaded()
    table = tensors["token_embd.weight"]
    text = np.random.RandomState(1).standard_normal((count, table.shape[1])).astype(np.float32).view(np.uint8)
    rows = np.concatenate([text, table.rows])
    longer = MemoryWeight(table.name, "F32", (len(rows), table.shape[1]), rows)
    keys = {"qwen3tts.vocab_size": len(rows), "tokenizer.ggml.tokens": [str(i) for i in range(len(rows))]}
    return {**metadata, **keys}, {**tensors, table.name: longer}


@pytest.mark.parametrize("backend", [ReferenceBackend, CpuBackend])
def test_logits_are_llama_cpp_s_behind_those_of_tokens_that_never_follow(backend: type[Backend]) -> None:
    driver = Driver(bind(backend(), plan_of(*with_text())))
    found = driver.step([(0, [token + TEXT for token in MODEL.tokens])])
    assert (found[:, :TEXT] == -np.inf).all()
    assert nmse(found[:, TEXT:], MODEL.stored["logits"]).max() < MODEL.limit()


def test_an_output_of_more_rows_is_refused() -> None:
    metadata, tensors = with_text(0)
    output = tensors["output.weight"]
    more = np.concatenate([output.rows, output.rows[:1]])
    tensors["output.weight"] = MemoryWeight(output.name, "F32", (len(more), output.shape[1]), more)
    with pytest.raises(ModelError, match=r"output.weight: expected shape \(3072, 256\)"):
        plan_of(metadata, tensors)


def test_no_other_architecture_has_fewer_rows() -> None:
    metadata, tensors = KIT["qwen3-dense"].loaded()
    output = tensors["output.weight"]
    tensors["output.weight"] = MemoryWeight(output.name, "F32", (9, output.shape[1]), output.rows[:9])
    with pytest.raises(ModelError, match=r"output.weight: expected shape \(\d+, 256\).*found \(9, 256\)"):
        plan_of(metadata, tensors)
