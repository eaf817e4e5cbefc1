"""Shapes of models whose indexer chooses what attention reads, for `benchmarks/deep.py`.

Attention and indexer have the true sizes. Width, experts and vocabulary are small and layers few, so that the models
fit and attention takes most of the time at depth. All layers of MiniMax M3 are sparse here; it has three that are not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.shapes import Model, Shapes, attention, dense, mixture

WIDTH, FFN, EXPERTS, EXPERT_FFN, VOCABULARY = 2048, 2048, 16, 512, 4096
_MIXTURE: dict[str, Any] = {
    "feed_forward_length": FFN, "leading_dense_block_count": 1, "expert_count": EXPERTS, "expert_used_count": 4,
    "expert_feed_forward_length": EXPERT_FFN, "expert_shared_count": 1, "expert_gating_func": 2,
    "expert_weights_norm": True, "expert_weights_scale": 2.5, "context_length": 131072,
}  # fmt: skip


def _fed(layer: int, lead: int = 1) -> Shapes:
    if layer < lead:
        return dense(WIDTH, FFN)
    return {**mixture(WIDTH, EXPERTS, EXPERT_FFN, EXPERT_FFN), "exp_probs_b.bias": (EXPERTS,)}


def _latent(heads: int, rank: int, plain: int, value: int, index_heads: int) -> Model:
    """Attention to latent rows of 512 + 64; queries come from `rank` numbers, a head has `plain` + 64."""

    def layer(number: int) -> Shapes:
        return {
            "attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,),
            "attn_q_a.weight": (rank, WIDTH), "attn_q_a_norm.weight": (rank,),
            "attn_q_b.weight": (heads * (plain + 64), rank),
            "attn_kv_a_mqa.weight": (576, WIDTH), "attn_kv_a_norm.weight": (512,),
            "attn_k_b.weight": (heads, 512, plain), "attn_v_b.weight": (heads, value, 512),
            "attn_output.weight": (WIDTH, heads * value),
            "indexer.k_norm.weight": (128,), "indexer.k_norm.bias": (128,),
            "indexer.proj.weight": (index_heads, WIDTH), "indexer.attn_k.weight": (128, WIDTH),
            "indexer.attn_q_b.weight": (index_heads * 128, rank), **_fed(number),
        }  # fmt: skip

    keys = {
        **_MIXTURE, "attention.head_count": heads, "attention.head_count_kv": 1, "attention.q_lora_rank": rank,
        "attention.kv_lora_rank": 512, "attention.key_length": 576, "attention.value_length": 512,
        "attention.key_length_mla": plain + 64, "attention.value_length_mla": value, "rope.dimension_count": 64,
        "rope.freq_base": 10000.0, "attention.indexer.head_count": index_heads, "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048,
    }  # fmt: skip
    return Model("deepseek32", 2, WIDTH, VOCABULARY, keys, layer)


def _with_types(model: Model) -> Model:
    """GLM: the file says which layers have an indexer."""
    keys = {**model.keys, "attention.indexer.types": np.ones(model.layers, bool)}
    return Model("glm-dsa", model.layers, model.width, model.vocabulary, keys, model.layer)


def _minimax(layer: int) -> Shapes:
    return {
        "attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,), **attention(WIDTH, 64, 4, 128, norms=True),
        "indexer.q_proj.weight": (4 * 128, WIDTH), "indexer.k_proj.weight": (128, WIDTH),
        "indexer.q_norm.weight": (128,), "indexer.k_norm.weight": (128,), **_fed(layer, 0),
    }  # fmt: skip


SPARSE = {
    "deepseek32": _latent(128, 1536, 128, 128, 64),
    "glm-dsa": _with_types(_latent(64, 2048, 192, 256, 32)),
    "minimax-m3": Model(
        "minimax-m3", 2, WIDTH, VOCABULARY,
        {
            **_MIXTURE, "leading_dense_block_count": 0, "attention.head_count": 64, "attention.head_count_kv": 4,
            "attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 64,
            "rope.freq_base": 5e6, "attention.indexer.head_count": 4, "attention.indexer.key_length": 128,
            "attention.indexer.top_k": 16, "attention.indexer.block_size": 128, "attention.indexer.local_blocks": 1,
        },
        _minimax,
    ),
}  # fmt: skip
