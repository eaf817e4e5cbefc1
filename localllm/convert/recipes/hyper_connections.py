"""The recipes of models with hyper-connections and an attention indexer: Hunyuan 4, GLM 5.3 Flash."""

from __future__ import annotations

import numpy as np

from localllm.convert.hf_config import HfConfig
from localllm.convert.latent import LATENT
from localllm.convert.recipe import Keys, Layer, Recipe, by_name, real
from localllm.convert.recipes.gated_delta import is_kind
from localllm.convert.recipes.kimi import KDA_SIZES, one_count, own_table
from localllm.convert.recipes.sparse_attention import (
    GLM_DEFAULTS,
    ROUTING,
    TYPED_KEYS,
    one,
    rotated,
    rotated_indexer,
)
from localllm.models.reading.mixers import BOUND_KEY


def _limits(config: HfConfig) -> np.ndarray | None:
    """Return the SwiGLU limit of each layer's experts."""
    limit = config.real("swiglu_limit")
    return np.full(config.layers, limit, np.float32) if limit and limit > 0 else None


_HUNYUAN: Layer = {
    **LATENT,
    # transformers 5.23 saves these tensors under another name than it loads
    **{
        key: (f"{module}.gate_proj", f"{module}.linear_gate")
        for key, module in (("ffn_gate", "mlp"), ("ffn_gate_shexp", "mlp.shared_experts"))
    },
    "attn_gate": ("self_attn.linear_gate", "self_attn.gate_proj"),
    "attn_sinks.weight": ("self_attn.learnable_sink_param", "self_attn.sinks"),
    **{
        f"hc_{ours}_{part}.weight": f"hc_{theirs}_layer.hc_{part}"
        for ours, theirs in (("attn", "attn"), ("ffn", "mlp"))
        for part in ("fn", "base", "scale")
    },
}
_HUNYUAN_CHANGES = {
    **rotated_indexer(trailing=True),
    "attn_q_b": rotated(by_name("num_attention_heads"), True),
    "attn_kv_a_mqa": rotated(one, True),
}
_CONNECTION_KEYS: Keys = {
    "hyper_connection.count": "hc_mult",
    "hyper_connection.epsilon": real("hc_eps"),
    "swiglu_clamp_exp": _limits,
}


# -- GLM 5.3 Flash -----------------------------------------------------------------------------------------------------


_attends = is_kind("indexed_attention", "full_attention", otherwise=lambda config: np.arange(config.layers) % 4 == 3)


def _bound(config: HfConfig) -> float:
    """Return the lower bound of the exponent of the decay."""
    found = config.real("linear_lower_bound")
    return (own_table(config).real("gate_lower_bound") or -5.0) if found is None else found


_GLM_NEXT: Layer = {
    **LATENT,
    "indexer_compressor_gate.weight": "self_attn.indexer.index_kpool_compress_gate",
    "indexer_compressor_ape.weight": "self_attn.indexer.index_kpool_compress_ape",
    **{f"hc_{x}_{part}.weight": f"hc_{x}_{part}" for x in ("attn", "ffn") for part in ("fn", "base", "scale")},
}
_GLM_NEXT_KEYS: Keys = {
    **TYPED_KEYS,
    **_CONNECTION_KEYS,
    "attention.head_count_kv": lambda config: _attends(config).astype(np.int32),
    "attention.key_length": "kv_lora_rank",
    "attention.key_length_mla": "qk_nope_head_dim",
    "attention.layer_norm_epsilon": lambda config: 1e-6,  # epsilon of the norm on the indexer's keys
    "attention.indexer.kpool": "index_kpool",
    "attention.indexer.kpool_select_tail": lambda config: config.flag("index_kpool_always_select_tail") is not False,
    "rope.dimension_count": 0,
    "rope.freq_base": None,
    **KDA_SIZES,
    BOUND_KEY: _bound,
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    "swiglu_clamp_shexp": _limits,
}


ROWS = (
    Recipe(
        "hy_v4", ("HYV4ForCausalLM",), _HUNYUAN, changes=_HUNYUAN_CHANGES, like="glm-dsa",
        keys={
            **TYPED_KEYS, **_CONNECTION_KEYS,
            "hyper_connection.magnitude": real("hc_magnitude"),
        },
        fixed={**ROUTING, "n_group": 1},
        top={f"output_hc_{part}.weight": f"model.hc_head.hc_head_{part}" for part in ("fn", "base", "scale")},
        defaults={
            "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "norm_topk_prob": True, "index_topk_freq": 4,
            "hc_magnitude": 2.0, "hc_eps": 1e-6,
        },
    ),
    Recipe(
        "glm5-next", ("Glm5NextForConditionalGeneration",), _GLM_NEXT, keys=_GLM_NEXT_KEYS, like="kimi-linear glm-dsa",
        fixed={
            **ROUTING, "qk_rope_head_dim": 0, "mhc": True, "mla_use_nope": True, "linear_attn_config.safe_gate": True,
        },
        checks=(one_count,), defaults={**GLM_DEFAULTS, "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20},
    ),
)  # fmt: skip
