"""The recipes of models with sparse attention, where an indexer selects the positions: DeepSeek 3.2, GLM 5, dots3-note.
Models that also have hyper-connections are in `hyper_connections`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.changes import height, in_turn, layer_of, numbered, turned
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.latent import LATENT, ROUTED_KEYS, all_dimensions
from localllm.convert.recipe import Change, Keys, Layer, Recipe, Tensors, by_name, taken
from localllm.convert.recipes.gated_delta import is_kind
from localllm.convert.tensor import LazyTensor

_OWN, _SHARED = "full", "shared"  # kinds of indexers


def indexers(config: HfConfig) -> np.ndarray:
    """Return which layers have an indexer. The other layers reuse the selection of the previous indexer."""
    layers, kinds, pattern = (
        config.layers,
        config.get("indexer_types"),
        config.get("index_topk_pattern"),
    )
    if kinds is None and isinstance(pattern, str):
        kinds = [{"F": _OWN, "S": _SHARED}.get(letter, letter) for letter in pattern]
    elif kinds is None:
        kinds = pattern
    if kinds is None:
        every, first = config.integer("index_topk_freq") or 1, config.integer("index_skip_topk_offset")
        skipped = 1 if first is None else first - 1
        kinds = [_SHARED if max(layer - skipped, 0) % every else _OWN for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (_OWN, _SHARED) for kind in kinds):
        raise config.error("indexer_types", kinds, f"{_OWN} or {_SHARED}, {layers} times")
    return np.array([kind == _OWN for kind in kinds])


def rotated(groups: Reader[int], trailing: bool) -> Change:
    """Reorder the rotated rows of each group from transformers' convention to the GGUF convention. Trailing rotated
    rows change from half-split (i, i + n/2) to interleaved rope, leading ones from interleaved to half-split."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        rows, count, turned = height(parts[0]), groups(config), config.needed("qk_rope_head_dim")
        order = numbered(parts[0], rows, count, rows // count)
        plain, own = (order[:, :-turned], order[:, -turned:]) if trailing else (order[:, turned:], order[:, :turned])
        shape = (count, 2, -1) if trailing else (count, -1, 2)
        own = own.reshape(shape).swapaxes(1, 2).reshape(count, -1)
        return t.picked(parts[0], np.concatenate([plain, own] if trailing else [own, plain], axis=1).reshape(-1), rows)

    return change


def rotated_indexer(trailing: bool) -> dict[str, Change]:
    """Return the changes of an indexer, whose rotated rows are reordered."""
    queries = rotated(by_name("index_n_heads"), trailing)
    return {"indexer.attn_q_b": queries, **dict.fromkeys(("indexer.attn_k", "indexer.k_norm"), rotated(one, trailing))}


def one(config: HfConfig) -> int:
    return 1


_INDEXER_KEYS: Keys = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
_SPARSE_KEYS: Keys = {
    **ROUTED_KEYS,
    **_INDEXER_KEYS,
    "attention.head_count_kv": 1,
    "rope.scaling.attn_factor": None,
    "rope.scaling.yarn_log_multiplier": all_dimensions,
}
TYPED_KEYS: Keys = {**_SPARSE_KEYS, "attention.indexer.types": indexers}
ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False}  # fmt: skip


# -- dots3-note --------------------------------------------------------------------------------------------------------

_SLIDING = {  # transformers' default sizes for sliding-window layers
    "num_attention_heads": 64,
    "kv_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
    "head_dim": 256,
}


# Layers with sliding-window attention.
_slides = is_kind("sliding_attention", otherwise=lambda config: np.zeros(config.layers, bool))


def _dots_kinds(config: HfConfig) -> list[str]:
    """Return transformers' default kinds: full attention in the first two layers, then in every fourth."""
    layers = range(config.layers)
    return ["full_attention" if n < 2 or n % 4 == 1 else "sliding_attention" for n in layers]


def _in_window(name: str) -> Reader[int]:
    """Return a reader for a size of the sliding-window layers, under transformers' key or the key in published
    checkpoints."""

    def size(config: HfConfig) -> int:
        own = config.get("per_layer_config")
        if own is None:
            return config.integer(f"swa_{name}") or _SLIDING.get(name) or config.needed(name)
        layers = np.flatnonzero(_slides(config)).tolist()
        if not isinstance(own, dict) or sorted(own) != sorted(str(layer) for layer in layers):
            raise config.error("per_layer_config", own, "one object for each layer with a window, and none for others")
        if any(each != own[str(layers[0])] for each in own.values()):
            raise config.error("per_layer_config", own, "the same sizes for all layers with a window, as GGUF has it")
        first = config.below("per_layer_config", own[str(layers[0])] if layers else {})
        return first.integer(name) or config.needed(name)

    return size


def _kind_of(tensor: LazyTensor, config: HfConfig, name: str) -> int:
    """Return a size for the kind of layer (sliding-window or full attention) that a tensor belongs to."""
    return _in_window(name)(config) if _slides(config)[layer_of(tensor)] else config.needed(name)


def _part(which: int) -> Change:
    """Return a change that picks the rows of all heads' keys without rope, or of their values, as one matrix per
    head."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        names = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
        heads, plain, value = (_kind_of(parts[0], config, name) for name in names)
        numbered(parts[0], height(parts[0]), heads, plain + value)
        start, stop = ((0, plain), (plain, plain + value))[which]
        return t.strided(t.divided(parts[0], heads), start, stop)

    return change


def _rescaled(name: str) -> Change:
    """Return a change that multiplies a norm's weights by sqrt(width / norm width). The models apply this factor to the
    normalized values."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        width = config.width
        factor = np.float32(math.sqrt(width / _kind_of(parts[0], config, name)))
        return t.computed(parts[0], lambda values: values * factor)

    return change


def _one_rank(config: HfConfig) -> str | None:
    for name in ("q_lora_rank", "qk_rope_head_dim"):
        if _slides(config).any() and _in_window(name)(config) != config.needed(name):
            return f"{name} differs between layers with a window and without; the GGUF architecture has one for both"
    return None


_DOTS: Layer = {
    "attn_k_norm": "self_attn.k_rope_only_layernorm",
    "attn_k_b.weight": taken("self_attn.kv_b_proj.weight", in_turn(_part(0), turned)),
    "attn_v_b.weight": taken("self_attn.kv_b_proj.weight", _part(1)),
    "attn_gate": "self_attn.g_proj",
}
_DOTS_CHANGES = {
    **rotated_indexer(trailing=False),
    "attn_q_a_norm": _rescaled("q_lora_rank"),
    "attn_kv_a_norm": _rescaled("kv_lora_rank"),
}
_DOTS_KEYS: Keys = {
    **_SPARSE_KEYS,
    "attention.head_count": lambda config: np.where(
        _slides(config), _in_window("num_attention_heads")(config), config.heads
    ).astype(np.int32),
    "attention.kv_lora_rank_swa": _in_window("kv_lora_rank"),
    "attention.key_length_swa": lambda config: (
        _in_window("kv_lora_rank")(config) + _in_window("qk_rope_head_dim")(config)
    ),
    "attention.value_length_swa": _in_window("kv_lora_rank"),
    "attention.key_length_mla_swa": lambda config: (
        _in_window("qk_nope_head_dim")(config) + _in_window("qk_rope_head_dim")(config)
    ),
    "attention.value_length_mla_swa": _in_window("v_head_dim"),
    "attention.indexer.types": lambda config: ~_slides(config),
}


GLM_DEFAULTS: dict[str, Any] = {"first_k_dense_replace": 3, "rms_norm_eps": 1e-5, "norm_topk_prob": True}

ROWS = (
    Recipe(
        "deepseek32", ("DeepseekV32ForCausalLM",), LATENT, like="glm-dsa",
        keys={**_SPARSE_KEYS, "expert_gating_func": 2}, fixed=ROUTING,
        defaults={"first_k_dense_replace": 3, "norm_topk_prob": True},
    ),
    Recipe("glm-dsa", ("GlmMoeDsaForCausalLM",), LATENT, keys=TYPED_KEYS, fixed=ROUTING, defaults=GLM_DEFAULTS),
    Recipe(
        "dots3note", ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration", "Dots3NoteTextForCausalLM"), _DOTS,
        changes=_DOTS_CHANGES, like="glm-dsa", keys=_DOTS_KEYS,
        fixed={
            **ROUTING, "use_dsa": True, "normalization": "RMSNorm", "final_norm": "RMSNorm",
            "k_rope_only_layernorm": True, "n_group": 1, "use_dynamic_rsf": False, "attention_gate_type": "headwise",
            "swa_attention_gate_type": "headwise", "apply_mla_qkv_lora_rescale": True, "use_sliding_window": True,
            "shared_experts_intermediate_size": by_name("moe_intermediate_size"),
            "moe_shared_expert_intermediate_size": by_name("moe_intermediate_size"),
        },
        checks=(_one_rank,),
        defaults={
            "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "layer_types": _dots_kinds, "rope_theta": 8e7,
            "sliding_window": lambda config: config.integer("sliding_window_size") or 512,
            "rope_local_base_freq": lambda config: config.real("swa_rope_theta") or 5e4, "rms_norm_eps": 1e-5,
        },
    ),
)  # fmt: skip
