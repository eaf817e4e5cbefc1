"""Latent attention gives the same results with key and value matrices in one tensor as with separate tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm import quant
from localllm.models.tensors import Tensors
from tests.models.kit import KIT
from tests.models.support import Driver, MemoryWeight, bind_reference, plan_of

HEADS, ROWS, OF, COLUMNS = 3, 6, 10, 256
WIDTHS = ("key_length", "value_length")


@pytest.mark.parametrize(("format", "stored"), [("F32", "F32"), ("F16", "F16"), ("BF16", "BF16"), ("Q4_K", "F16")])
def test_transposed_rows_of_each_head(format: str, stored: str) -> None:
    """The transposed matrices keep float formats, while quantized weights become float16. Any range of rows
    can be read.
    """
    values = np.random.RandomState(3).standard_normal((HEADS * OF, COLUMNS))
    source = MemoryWeight.of("kv_b", values, format)
    found = Tensors({"kv_b": source}).transposed("kv_b", HEADS, ROWS, OF, COLUMNS)
    assert (found.format, found.shape) == (stored, (HEADS, COLUMNS, ROWS))
    expected = source.values().reshape(HEADS, OF, COLUMNS)[:, :ROWS].transpose(0, 2, 1)
    if stored != format:
        expected = expected.astype(np.float16).astype(np.float32)
    expected = expected.reshape(HEADS * COLUMNS, ROWS)
    for start, stop in ((0, HEADS * COLUMNS), (0, 5), (250, 261), (COLUMNS, 2 * COLUMNS), (300, 767)):
        rows = quant.dequantize(found.read(start, stop), stored)
        np.testing.assert_array_equal(rows, expected[start:stop])


def test_key_and_value_matrices_as_one_tensor() -> None:
    """DeepSeek GGUFs from before and after the matrix was split give equal logits, up to float32 rounding."""
    metadata, tensors = KIT["deepseek2-groups"].loaded()
    old = dict(tensors)
    for layer in range(3):
        name = f"blk.{layer}.attn_"
        keys, values = (old.pop(f"{name}{part}_b.weight").values() for part in "kv")
        # (heads, unrotated key dimensions + value dimensions, latent).
        both = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)
        old[name + "kv_b.weight"] = MemoryWeight.of(name + "kv_b.weight", both.reshape(-1, both.shape[2]))
    widths = {f"deepseek2.attention.{key}": metadata[f"deepseek2.attention.{key}_mla"] for key in WIDTHS}
    dropped = {key: value for key, value in metadata.items() if not key.endswith("_mla")}
    logits = [
        Driver(bind_reference(plan_of(*model))).step([(0, range(20))])
        for model in ((metadata, tensors), (dropped | widths, old))
    ]
    np.testing.assert_array_equal(*logits)


def test_a_bias_of_the_choice_means_sigmoid_where_the_file_tells_no_gating() -> None:
    """GGUFs of GLM 4.7 Flash may lack the gating key. In GGUFs of DeepSeek V2, which has no bias, a missing key means
    softmax.
    """
    metadata, tensors = KIT["deepseek2-groups"].loaded()
    key = "deepseek2.expert_gating_func"
    told = {gating: _logits({**metadata, key: gating}, tensors) for gating in (1, 2)}
    untold = {name: value for name, value in metadata.items() if name != key}
    assert not np.array_equal(told[1], told[2])
    np.testing.assert_array_equal(_logits(untold, tensors), told[2])
    unbiased = {name: tensor for name, tensor in tensors.items() if "exp_probs_b" not in name}
    assert len(unbiased) < len(tensors)
    np.testing.assert_array_equal(_logits(untold, unbiased), _logits({**metadata, key: 1}, unbiased))


def _logits(metadata: dict[str, Any], tensors: dict[str, MemoryWeight]) -> np.ndarray:
    return Driver(bind_reference(plan_of(metadata, tensors))).step([(0, range(20))])
