"""A contradictory GGUF of Qwen 4 gives a one-line error that names the key or the tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localllm.models import ModelError
from tests.models.kit import KIT
from tests.models.support import plan_of

METADATA, TENSORS = KIT["qwen4exp-8of40"].loaded()
TABLE = "per_layer_token_embd.weight"
KEYS: dict[str, tuple[str, Any, str]] = {
    "one stream": ("hyper_connection.count", 1, "expected at least 2 streams, found 1"),
    "no rank": ("hyper_connection.low_rank", 0, "expected an integer from 1"),
    "two layers of n-grams": ("ple.layers", [0, 1], "expected a list of 1 integers"),
    "n-grams where there is attention": ("ple.layers", [2], "expected a layer with linear attention, found layer 2"),
    "n-grams behind the last layer": ("ple.layers", [3], "expected an integer from 0 to 2"),
    "n-grams of one token": ("ple.ngram_size", 1, "expected an integer from 2"),
    "heads without a size": ("ple.head_vocab_sizes", [101, 103], "expected a list of 6 integers"),
    "a head without rows": ("ple.head_vocab_sizes", [101, 0, 107, 109, 113, 127], "expected an integer from 1"),
    "products of 64 bits": (
        "ple.layer_multipliers",
        [1, 3, 5, 1 << 60],
        "expected an integer from 0 to 72057594037927935",
    ),
    "no such token": ("ple.eos_token_id", 128, "expected an integer from 0 to 127"),
    "no multipliers": ("ple.layer_multipliers", None, "this key is missing"),
    "pools that no choice is made of": ("attention.compress_ratios", [0, 0, 3], "expected a divisor of .* 8, found 3"),
    "pools of more than a block": ("attention.compress_ratios", [0, 0, 128], "expected an integer from 0 to 64"),
    "rows beyond the table": ("ple.head_offsets", [0, 101, 204, 311, 420, 600], "expected at least 727 rows"),
    "a rotation wider than the indexer": (
        "rope.dimension_count",
        32,
        "indexer.key_length: expected at least .* 32, found 24",
    ),
}


@pytest.mark.parametrize("case", KEYS)
def test_a_contradiction_is_one_line(case: str) -> None:
    key, value, message = KEYS[case]
    with pytest.raises(ModelError, match=message) as error:
        plan_of(METADATA | {f"qwen4exp.{key}": value}, TENSORS)
    assert "\n" not in str(error.value)


def test_pools_of_two_sizes_are_refused() -> None:
    layers = {"qwen4exp.attention.recurrent_layers": np.array([False, True, False]), "qwen4exp.ple.layers": [1]}
    with pytest.raises(ModelError, match=r"expected one size of pools for all layers, found \[2, 4\]"):
        plan_of(METADATA | layers | {"qwen4exp.attention.compress_ratios": [2, 0, 4]}, TENSORS)


def test_a_missing_table_is_one_line() -> None:
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != TABLE}
    with pytest.raises(ModelError, match=f"{TABLE}: this tensor is missing"):
        plan_of(METADATA, tensors)


def test_norms_of_streams_may_be_matrices_or_rows() -> None:
    """llama.cpp's converter writes these norms as vectors, while llama.cpp's test program writes matrices."""
    changed = dict(TENSORS)
    for name, tensor in TENSORS.items():
        if "hc_" in name and name.endswith("_norm.weight"):
            changed[name] = replace(tensor, shape=(4, 96), rows=tensor.rows.reshape(4, -1))
    assert plan_of(METADATA, changed).operations == plan_of(METADATA, TENSORS).operations


@pytest.mark.parametrize(("pool", "every"), [(2, 2), (4, 4), (8, 1)])
def test_index_keys_take_a_row_for_a_pool(pool: int, every: int) -> None:
    """With pools of 8, the keys of one KV cache block would not fill a SIMD vector, so a key is stored for
    every position.
    """
    plan = plan_of(METADATA | {"qwen4exp.attention.compress_ratios": [0, 0, pool]}, TENSORS)
    assert [layer.every for layer in plan.attention_layers if not layer.value_dim] == [every]
