"""The recipes of Gemma 1 to 4; Gemma 3n and 4 also have per-layer embeddings."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.recipe import Keys, Recipe, Tensors, integer
from localllm.convert.tensor import LazyTensor


def padded_vocabulary(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Append zero rows for the image and audio tokens, which the embedding table lacks."""
    return t.padded_rows(parts[0], max(parts[0].shape[0], config.integer("vocab_size") or 0))


GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
_PADDED = {"token_embd": padded_vocabulary, "per_layer_token_embd": padded_vocabulary}
_GEMMA4 = {
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
}
_PER_LAYER_KEYS: Keys = {
    "embedding_length_per_layer_input": lambda config: config.integer("hidden_size_per_layer_input") or 0,
    "attention.shared_kv_layers": lambda config: config.integer("num_kv_shared_layers") or 0,
}


def score_scale(wide_layers: int) -> dict[str, Reader[int]]:
    """Require attention scores scaled by 1/sqrt(head width) or, in models with `wide_layers` layers, by
    1/sqrt(width/heads)."""

    def fixed(config: HfConfig) -> int:
        own = None if config.layers == wide_layers else config.integer("head_dim")
        return own or config.width // config.heads

    return {"query_pre_attn_scalar": fixed}


def _by_layer(config: HfConfig, name: str) -> np.ndarray:
    """Return one value per layer. A single value in config.json applies to all layers."""
    found, layers = config.get(name), config.layers
    values = found if isinstance(found, list) else [found] * layers
    if len(values) != layers or not all(type(value) in (int, float) and 0 <= value < 1 << 31 for value in values):
        raise config.error(name, found, f"{layers} numbers")
    return np.array(values)


def _widths(config: HfConfig) -> np.ndarray:
    """Return the feed-forward width of each layer. Layers that share a KV cache may have twice the width."""
    widths = _by_layer(config, "intermediate_size").astype(np.int32)
    own = len(widths) - (config.integer("num_kv_shared_layers") or 0)
    if config.flag("use_double_wide_mlp"):
        widths[own:] *= 2
    return widths


def _sparsity(config: HfConfig) -> np.ndarray:
    """Return the activation cutoff of each layer, in standard deviations above the mean, from its share of zeroed
    activations."""
    shares = _by_layer(config, "activation_sparsity_pattern")
    if (shares >= 1).any():
        raise config.error("activation_sparsity_pattern", max(shares), "shares below 1")
    return np.array([NormalDist().inv_cdf(x) if x > 0 else -math.inf for x in shares.tolist()], np.float32)


def _of_full(name: str, older: str) -> Reader[int]:
    """Return a reader of a size of the full-attention layers, which may differ from the other layers."""

    def number(config: HfConfig) -> int:
        if config.integer(older):
            return config.needed(older)
        kinds = config.get("layer_types")
        for layer, kind in enumerate(kinds if isinstance(kinds, list) else []):
            own = config.table("per_layer_config").get(str(layer)) if kind == "full_attention" else None
            if isinstance(own, dict) and own.get(name) is not None:
                return config.below(f"per_layer_config {layer}", own).needed(name)
        return config.needed(name)

    return number


_full_width = _of_full("head_dim", "global_head_dim")


def _kv_heads(config: HfConfig) -> np.ndarray:
    """Return the number of KV heads of each layer."""
    few = config.needed("num_key_value_heads")
    full = _of_full("num_key_value_heads", "num_global_key_value_heads")(config)
    kinds = config.per_layer("layer_types", "the kinds of the layers", lambda kind: True)
    return np.array([full if kind == "full_attention" else few for kind in kinds], np.int32)


ROWS = (
    Recipe("gemma", ("GemmaForCausalLM",), norm_offset=1.0),
    Recipe("gemma2", ("Gemma2ForCausalLM",), norm_offset=1.0, fixed=score_scale(46)),
    Recipe(
        "gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), norm_offset=1.0, defaults=GEMMA3_DEFAULTS,
        fixed={"use_bidirectional_attention": False, **score_scale(62)},
    ),
    Recipe(
        "gemma3n", ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), changes=_PADDED,
        keys={
            **_PER_LAYER_KEYS, "feed_forward_length": _widths,
            "altup.active_idx": lambda config: config.integer("altup_active_idx") or 0,
            "altup.num_inputs": "altup_num_inputs", "activation_sparsity_scale": _sparsity,
        },
    ),
    Recipe(
        "gemma4", ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
        _GEMMA4, changes=_PADDED, rope_tensors=True, head_dim=_full_width, tokenizer="gemma4",
        fixed={"use_bidirectional_attention": (False, "vision")},
        keys={
            **_PER_LAYER_KEYS, "feed_forward_length": _widths, "attention.head_count_kv": _kv_heads,
            "attention.key_length": _full_width, "attention.value_length": _full_width,
            "attention.key_length_swa": "head_dim", "attention.value_length_swa": "head_dim",
            "rope.dimension_count": _full_width, "rope.dimension_count_swa": "head_dim",
            "expert_used_count": integer("top_k_experts", "num_experts_per_tok"),
        },
    ),
)  # fmt: skip
