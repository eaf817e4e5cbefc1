"""The recipes of MiniMax 01, M2 and M3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Check, Keys, Layer, Recipe, by_name
from localllm.convert.recipes.gated_delta import is_kind
from localllm.convert.recipes.shared import dense_layers, either, head_width, leading
from localllm.convert.tensor import LazyTensor
from localllm.convert.tokens import BYTE, NORMAL
from localllm.models.reading.mixers import RECURRENT_KEY
from localllm.quant import dequantize


def _of_residual(which: str) -> Check:
    """Require one residual factor `alpha` for all parts of a layer, or a factor `beta` of 1."""
    names = [
        (f"{short}_{which}_factor", f"layernorm_{long}_{which}")
        for short, long in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    ]

    def check(config: HfConfig) -> str | None:
        found = [config.real(*each) for each in names]
        values = {1.0 if value is None else value for value in found}
        if len(values) == 1 and (which == "alpha" or values == {1.0}):
            return None
        told = " and ".join(f"{each[0]} {value}" for each, value in zip(names, found, strict=True))
        return f"{told}; the GGUF architecture has {'one factor for all' if which == 'alpha' else 'none'}"

    return check


def _zeros(config: HfConfig) -> np.ndarray:
    """Return which layers have a zero in `attn_type_list`."""
    listed = config.per_layer("attn_type_list", "0 or 1 for each of the {} layers", lambda kind: kind in (0, 1))
    return np.array([kind == 0 for kind in listed])


_01: Layer = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_gate": "self_attn.output_gate",
    "attn_norm_2": "self_attn.norm",
}
_01_KEYS: Keys = {
    "attention.key_length": head_width,
    "attention.value_length": head_width,
    "rope.dimension_count": lambda config: config.integer("rotary_dim") or head_width(config),
    "residual_scale": lambda config: config.real("full_attn_alpha_factor", "layernorm_full_attention_alpha") or 1.0,
    RECURRENT_KEY: is_kind("linear_attention", otherwise=_zeros),
}


def _untrained(config: HfConfig, keys: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> np.ndarray | None:
    """Return suppress_tokens: the list in generation_config.json, and special tokens with a zero embedding, which were
    never trained."""
    table = tensors["token_embd.weight"]
    special = np.flatnonzero(~np.isin(keys["tokenizer.ggml.token_type"], (NORMAL, BYTE))).tolist()
    rows = [i for i in special if not dequantize(table.read(i, i + 1), table.format).any()]
    listed = np.union1d(keys.get("tokenizer.ggml.suppress_tokens", ()), rows).astype(np.int32)
    return listed if len(listed) else None


# -- MiniMax M3 --------------------------------------------------------------------------------------------------------


def _leading(config: HfConfig) -> int:
    """Return the number of leading dense layers."""
    if config.get("mlp_layer_types") is not None or config.get("moe_layer_freq") is None:
        return dense_layers(config)
    return leading(config, "moe_layer_freq", 0, 1, "0 for layers before all with 1")


def _indexed_where_routed(config: HfConfig) -> str | None:
    """Require an indexer in the layers with experts, and in no other layers."""
    kinds = config.get("layer_types")
    if kinds is None:
        flags = config.table(_SPARSE).get("sparse_attention_freq")
        kinds = ["minimax_m3_sparse" if flag else "" for flag in flags] if isinstance(flags, list) else []
    dense, layers = _leading(config), config.layers
    if [kind == "minimax_m3_sparse" for kind in kinds] == [layer >= dense for layer in range(layers)]:
        return None
    return (
        "layer_types has an indexer in layers without experts; the GGUF architecture has it only in layers with experts"
    )


_SPARSE = "sparse_attention_config"
_M3: Layer = {
    **{f"ffn_{x}_shexp": f"block_sparse_moe.shared_experts.{x}_proj" for x in ("gate", "up", "down")},
    **{f"indexer.{x}_{part}": f"self_attn.index_{x}_{part}" for x in ("q", "k") for part in ("proj", "norm")},
}
_M3_KEYS: Keys = {
    "feed_forward_length": "dense_intermediate_size",
    "expert_feed_forward_length": "intermediate_size",
    "expert_shared_count": lambda config: config.integer("n_shared_experts") or 1,
    "expert_weights_norm": True,
    "leading_dense_block_count": _leading,
    "rope.dimension_count": lambda config: config.integer("rotary_dim") or 64,
    "attention.indexer.head_count": either("index_n_heads", _SPARSE, "sparse_num_index_heads"),
    "attention.indexer.key_length": either("index_head_dim", _SPARSE, "sparse_index_dim"),
    "attention.indexer.block_size": either("index_block_size", _SPARSE, "sparse_block_size"),
    "attention.indexer.top_k": either("index_topk_blocks", _SPARSE, "sparse_topk_blocks"),
    "attention.indexer.local_blocks": either("index_local_blocks", _SPARSE, "sparse_local_block"),
}

ROWS = (
    Recipe(
        "minimax-01", ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"), _01,
        like="minimax-m2", keys=_01_KEYS, fixed={"postnorm": True},
        checks=(_of_residual("alpha"), _of_residual("beta")), whole_keys={"tokenizer.ggml.suppress_tokens": _untrained},
    ),
    Recipe("minimax-m2", ("MiniMaxM2ForCausalLM",), keys={"expert_feed_forward_length": "intermediate_size"}),
    Recipe(
        "minimax-m3",
        ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForCausalLM"), _M3,
        like="minimax-m2 llama", keys=_M3_KEYS, norm_offset=1.0,
        fixed={"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "shared_intermediate_size": by_name("intermediate_size")},
        checks=(_indexed_where_routed,), defaults={"routed_scaling_factor": 2.0, "rope_theta": 5e6},
    ),
)  # fmt: skip
