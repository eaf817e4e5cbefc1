"""Shapes of models with top-k attention, whose indexer selects the positions, for `benchmarks/deep.py`.

Attention and indexer have the true sizes. The hidden size, the number of experts, the vocabulary and the number of
layers are small, so that the models fit and attention takes most of the time at depth. All layers of MiniMax M3 use
sparse attention here; the published model has three dense layers.
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
    """Return a model with latent attention: latent rows have 512 + 64 dimensions.

    Queries are computed from rows of `rank` dimensions; a query head has `plain` + 64 dimensions.
    """

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
    """Return the model as glm-dsa, whose GGUF lists the layers that have an indexer."""
    keys = {**model.keys, "attention.indexer.types": np.ones(model.layers, bool)}
    return Model("glm-dsa", model.layers, model.width, model.vocabulary, keys, model.layer)


def _minimax(layer: int) -> Shapes:
    return {
        "attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,), **attention(WIDTH, 64, 4, 128, norms=True),
        "indexer.q_proj.weight": (4 * 128, WIDTH), "indexer.k_proj.weight": (128, WIDTH),
        "indexer.q_norm.weight": (128,), "indexer.k_norm.weight": (128,), **_fed(layer, 0),
    }  # fmt: skip


POOLS = (4, 128)  # positions per pool, by layer


def _compressed(layer: int) -> Shapes:
    """Return a layer with 64 heads of 512 dimensions that share one KV head.

    Pools of 4 overlap, and an indexer of 64 heads selects pools.
    """
    heads, dim, rank, groups, streams, pool = 64, 512, 1024, 8, 4, POOLS[layer]
    mixing = 2 * streams + streams * streams

    def compressor(name: str, width: int) -> Shapes:
        wide = width * (1 + (pool == POOLS[0]))
        return {
            **{f"{name}_{part}.weight": (wide, WIDTH) for part in ("kv", "gate")}, f"{name}_ape.weight": (pool, wide),
            f"{name}_norm.weight": (width,),
        }  # fmt: skip

    indexer = {
        **compressor("indexer_compressor", 128), "indexer.proj.weight": (64, WIDTH),
        "indexer.attn_q_b.weight": (64 * 128, rank),
    }  # fmt: skip
    connections = {
        f"hc_{part}_{name}.weight": shape
        for part in ("attn", "ffn")
        for name, shape in (("fn", (mixing, streams * WIDTH)), ("base", (mixing,)), ("scale", (3,)))
    }
    return {
        "attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,), "attn_sinks.weight": (heads,),
        "attn_q_a.weight": (rank, WIDTH), "attn_q_a_norm.weight": (rank,), "attn_q_b.weight": (heads * dim, rank),
        "attn_kv.weight": (dim, WIDTH), "attn_kv_a_norm.weight": (dim,),
        "attn_output_a.weight": (groups, rank, heads * dim // groups), "attn_output_b.weight": (WIDTH, groups * rank),
        **compressor("attn_compressor", dim), **(indexer if pool == POOLS[0] else {}), **connections, **_fed(layer, 0),
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
    "deepseek4": Model(
        "deepseek4", 2, WIDTH, VOCABULARY,
        {
            **_MIXTURE, "leading_dense_block_count": 0, "hash_layer_count": 0, "expert_gating_func": 4,
            "attention.head_count": 64,
            "attention.head_count_kv": 1, "attention.key_length": 512, "attention.value_length": 512,
            "attention.q_lora_rank": 1024, "attention.output_group_count": 8, "attention.output_lora_rank": 1024,
            "attention.sliding_window": 128, "attention.compress_ratios": np.array(POOLS, np.int32),
            "attention.compress_rope_freq_base": 160000.0, "rope.dimension_count": 64, "rope.freq_base": 10000.0,
            "attention.indexer.head_count": 64, "attention.indexer.key_length": 128, "attention.indexer.top_k": 512,
            "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 20,
            "hyper_connection.epsilon": 1e-6, "swiglu_clamp_exp": np.full(2, 10.0, np.float32),
            "swiglu_clamp_shexp": np.full(2, 10.0, np.float32),
        },
        _compressed,
        extra={
            "output_hc_fn.weight": (4, 4 * WIDTH), "output_hc_base.weight": (4,), "output_hc_scale.weight": (1,),
        },
    ),
}  # fmt: skip
