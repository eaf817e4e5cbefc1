"""The recipe of DeepSeek 4: hyper-connections, compressed keys, and layers that choose experts by token id.

Published checkpoints use the tensor names of the reference implementation. transformers keeps most names and changes
the others.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.changes import of_one, stacked
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Keys, Layer, Raw, Recipe, real, taken
from localllm.convert.recipes.shared import leading

_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_CORRECTION = re.compile(r"model\.layers\.(\d+)\.(ffn|mlp)\.gate\.(bias|e_score_correction_bias)")


_INTEGERS = of_one(t.as_int32)


def _compressor(ours: str, own: str, other: str) -> Layer:
    """Return the sources of a key compressor: GGUF prefix `ours`, reference name `own`, and transformers' name
    `other`."""
    return {
        f"{ours}_compressor_kv": (f"{own}.wkv", f"{other}.kv_proj"),
        f"{ours}_compressor_gate": (f"{own}.wgate", f"{other}.gate_proj"),
        f"{ours}_compressor_norm": (f"{own}.norm", f"{other}.kv_norm"),
        f"{ours}_compressor_ape.weight": (f"{own}.ape", f"{other}.position_bias"),
    }


_LAYER: Layer = {
    "attn_q_a": ("attn.wq_a", "self_attn.q_a_proj"),
    "attn_q_a_norm": ("attn.q_norm", "self_attn.q_a_norm"),
    "attn_q_b": ("attn.wq_b", "self_attn.q_b_proj"),
    "attn_kv": ("attn.wkv", "self_attn.kv_proj"),
    "attn_kv_a_norm": ("attn.kv_norm", "attn.norm", "self_attn.kv_norm"),  # second name: transformers 5.23
    "attn_output_a": ("attn.wo_a", "self_attn.o_a_proj"),
    "attn_output_b": ("attn.wo_b", "self_attn.o_b_proj"),
    "attn_sinks.weight": ("attn.attn_sink", "self_attn.sinks"),
    **_compressor("attn", "attn.compressor", "self_attn.compressor"),
    **_compressor("indexer", "attn.indexer.compressor", "self_attn.compressor.indexer"),
    "indexer.attn_q_b": ("attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj"),
    "indexer.proj": ("attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"),
    **{
        f"hc_{x}_{part}.weight": (f"hc_{x}_{part}", f"{x}_hc.{part}")
        for x in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    "ffn_gate_inp.weight": ("ffn.gate.weight", "mlp.gate.weight"),
    "exp_probs_b.bias": ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    "exp_probs_b_vl.bias": "ffn.gate.bias_vl",  # bias for images, which localllm's forward pass does not use
    "ffn_gate_tid2eid.weight": (taken("ffn.gate.tid2eid", _INTEGERS), taken("mlp.gate.tid2eid", _INTEGERS)),
    **{
        f"ffn_{x}_exps.weight": taken(f"ffn.experts.{{}}.{own}.weight", stacked)
        for x, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    **{f"ffn_{x}_shexp": f"ffn.shared_experts.{own}" for x, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
}


def _read(raw: Raw, config: HfConfig) -> Raw:
    """Drop the unused router biases of layers that choose experts by token id."""
    biases = {name: found for name in raw if (found := _CORRECTION.fullmatch(name))}
    return {name: parts for name, parts in raw.items() if name not in biases or int(biases[name][1]) >= _hashed(config)}


def _hashed(config: HfConfig) -> int:
    """Return the number of leading layers that choose experts by token id."""
    if config.get("mlp_layer_types") is None:
        told = config.integer("num_hash_layers")
        return min(config.layers, 3 if told is None else told)
    return leading(config, "mlp_layer_types", "hash_moe", "moe", "hash_moe before moe")


def _is_kind(value: object) -> bool:
    return isinstance(value, str) and value in _RATIOS


def _ratios(config: HfConfig) -> np.ndarray:
    """Return each layer's compression ratio: from config.json, or transformers' default of 128, 128, then alternately
    128 and 4."""
    told, layers = config.get("compress_ratios"), config.layers
    if config.get("layer_types") is not None:
        expected = f"{' or '.join(_RATIOS)}, {{}} times"
        return np.array([_RATIOS[x] for x in config.per_layer("layer_types", expected, _is_kind)], np.int32)
    if told is None:
        return np.array([4 if n > 1 and n % 2 else 128 for n in range(layers)], np.int32)
    known = [*_RATIOS.values()]
    if not isinstance(told, list) or len(told) < layers or not all(type(n) is int and n in known for n in told):
        raise config.error("compress_ratios", told, f"{', '.join(map(str, known))} for each of the {layers} layers")
    return np.array(told[:layers], np.int32)  # the other entries belong to multi-token prediction layers


def _rotated(config: HfConfig) -> int:
    """Return the number of rotated values at the end of each head."""
    share, told = config.real("partial_rotary_factor"), config.integer("qk_rope_head_dim")
    return told if share is None and told else int(config.needed("head_dim") * (64 / 512 if share is None else share))


def _ropes(config: HfConfig) -> tuple[HfConfig, HfConfig]:
    """Return the rope parameters of layers without compression, and of layers with compression."""
    table = config.table("rope_parameters", "rope_scaling")
    told = config.below("rope_parameters", table)
    if "compress" not in table:
        return config.below("rope_parameters", {}), told
    return config.below("rope_parameters main", told.table("main")), config.below(
        "rope_parameters", told.table("compress")
    )


def _base(config: HfConfig) -> float:
    return _ropes(config)[0].real("rope_theta") or config.real("rope_theta") or 10000.0


def _far_base(config: HfConfig) -> float:
    table = config.table("rope_parameters")
    own = _ropes(config)[1].real("rope_theta") if "compress" in table else None
    return own or config.real("compress_rope_theta") or 160000.0


def _plain_main(config: HfConfig) -> str | None:
    main, far = _ropes(config)
    if (kind := main.get("rope_type", "type") or "default") != "default":
        return f"rope_type of main is {kind}; the GGUF architecture does not stretch it"
    if (factor := far.real("attention_factor")) not in (None, 1.0):
        return f"attention_factor is {factor:g}; the GGUF architecture requires 1"
    turned, size = _rotated(config), config.needed("head_dim")
    for rope in (main, far):
        share = rope.real("partial_rotary_factor")
        if share is not None and int(size * share) != turned:
            return f"partial_rotary_factor is {share:g} in rope_parameters; the GGUF architecture has one for all"
    return None


def _limits(config: HfConfig) -> np.ndarray:
    """Return the SwiGLU limit, the same for all layers."""
    return np.full(config.layers, config.real("swiglu_limit") or 0.0, np.float32)


_KEYS: Keys = {
    "feed_forward_length": "moe_intermediate_size",
    "embedding_length_out": lambda config: config.width * config.needed("hc_mult"),
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": "q_lora_rank",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": None,
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
    "attention.output_group_count": "o_groups",
    "attention.output_lora_rank": "o_lora_rank",
    "attention.compress_ratios": _ratios,
    "attention.compress_rope_freq_base": _far_base,
    "hyper_connection.count": "hc_mult",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    "hyper_connection.epsilon": real("hc_eps"),
    "hash_layer_count": _hashed,
    "swiglu_clamp_exp": _limits,
    "swiglu_clamp_shexp": _limits,
    "rope.dimension_count": _rotated,
    "rope.freq_base": _base,
    "rope.scaling.attn_factor": None,
}
_DEFAULTS: dict[str, Any] = {
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "max_position_embeddings": 1 << 20,
}

ROWS = (
    Recipe(
        "deepseek4", ("DeepseekV4ForCausalLM",), _LAYER, keys=_KEYS, defaults=_DEFAULTS, raw=_read, like="deepseek2",
        top={
            "token_embd": ("embed", "model.embed_tokens"),
            **{
                f"output_hc_{part}.weight": (f"hc_head_{part}", f"model.hc_head.hc_{part}")
                for part in ("fn", "base", "scale")
            },
        },
        fixed={
            "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "n_group": 1,
            "num_key_value_heads": 1, "n_shared_experts": 1, "attention_bias": False, "mlp_bias": False,
            "compress_rates.compressed_sparse_attention": 4, "compress_rates.heavily_compressed_attention": 128,
            "compress_rate_csa": 4, "compress_rate_hca": 128,
        },
        checks=(_plain_main,),
    ),
)  # fmt: skip
