"""StableLM 2 12B: without a norm before the feed-forward, a layer is x + attention(norm(x)) + feed_forward(norm(x)), as
in transformers (`use_parallel_residual`) and in llama.cpp.
"""

from __future__ import annotations

import numpy as np
import pytest

from localllm.models import ModelError
from tests.models.straight_line import dense, rope
from tests.models.support import nmse, plan_of
from tests.models.test_forward import run
from tests.models.tiny import TOKENS, WIDTH, Model
from tests.models.tiny_families import GATED, HEAD_DIM, HEADS, KV_HEADS, OUT, QKV, biased, family

LAYERS, ROTATED = 2, 4
HEAD_NORMS = {"attn_q_norm.weight": (HEADS, HEAD_DIM), "attn_k_norm.weight": (KV_HEADS, HEAD_DIM)}
SHAPES = biased({"attn_norm.weight": (WIDTH,)}) | QKV | OUT | GATED | HEAD_NORMS


def model() -> Model:
    return family("stablelm", 131, SHAPES, top={"output_norm.bias": (WIDTH,)}, rope__dimension_count=ROTATED)


def norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | float = 0.0) -> np.ndarray:
    x = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * weight + bias)


def forward(w: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Return float64 logits (T, vocabulary) of one sequence."""
    x, n = w["token_embd.weight"][tokens].astype(np.float64), len(tokens)
    for name in (f"blk.{layer}." for layer in range(LAYERS)):
        h = norm(x, w[f"{name}attn_norm.weight"], w[f"{name}attn_norm.bias"])
        q, k, v = ((h @ w[f"{name}attn_{part}.weight"].T).reshape(n, -1, HEAD_DIM) for part in "qkv")
        q, k = (
            rope(norm(heads, w[f"{name}attn_{part}_norm.weight"]), ROTATED, neox=True, base=10000.0)
            for part, heads in (("q", q), ("k", k))
        )
        k, v = (np.repeat(heads, HEADS // KV_HEADS, axis=1) for heads in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf  # causal mask
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", p / p.sum(axis=-1, keepdims=True), v).reshape(n, -1)
        x = x + mixed @ w[f"{name}attn_output.weight"].T + dense(w, f"{name}ffn_", h)
    return norm(x, w["output_norm.weight"], w["output_norm.bias"]) @ w["output.weight"].T


def test_logits_equal_a_straight_line_float64_forward() -> None:
    metadata, tensors = model()
    expected = forward({name: tensor.values() for name, tensor in tensors.items()}, TOKENS)
    assert nmse(run((metadata, tensors)), expected).max() < 1e-11


def test_a_norm_that_only_one_layer_lacks_is_named() -> None:
    metadata, tensors = family("stablelm", 131, SHAPES | biased({"ffn_norm.weight": (WIDTH,)}), rope__dimension_count=4)
    del tensors["blk.1.ffn_norm.weight"]
    with pytest.raises(ModelError, match=r"^blk\.1\.ffn_norm\.weight: this tensor is missing"):
        plan_of(metadata, tensors)
