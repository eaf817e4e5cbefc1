"""The recipes of Llama and similar models: Arcee, pruned Llamas (DeciLM), SmolLM 3, Seed-OSS, Apertus, AFMoE.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert.changes import PERMUTED, in_turn, kv_heads, layer_of, permuted, share, turned
from localllm.convert.hf_config import HfConfig, is_count
from localllm.convert.recipe import Recipe, Take, Tensors, number, taken
from localllm.convert.recipes.shared import head_width
from localllm.convert.tensor import LazyTensor


def _every_fourth(config: HfConfig) -> str | None:
    layers = config.layers
    rotated = config.get("no_rope_layers") or [int((i + 1) % (config.get("no_rope_layer_interval") or 4) != 0)
                                               for i in range(layers)]  # fmt: skip
    if rotated == [int((i + 1) % 4 != 0) for i in range(layers)]:
        return None
    return "no_rope_layers does not select every fourth layer, as the GGUF architecture requires"


def _experts_by_step(config: HfConfig) -> str | None:
    """Require Llama 4's experts in every n-th layer."""
    step, given = config.integer("interleave_moe_layer_step") or 1, config.get("moe_layers")
    if not given or given == list(range(step - 1, config.layers, step)):
        return None
    return f"moe_layers does not select every layer of {step}, as the GGUF architecture requires"


def _blocks(config: HfConfig, part: str, name: str) -> list[object] | None:
    """Return the settings of one part of each layer from `block_configs`, or None if config.json has no such list."""
    found, layers = config.get("block_configs"), config.layers
    if found is None:
        return None
    right = isinstance(found, list) and len(found) == layers and all(isinstance(block, dict) for block in found)
    parts = [block.get(part) for block in found] if right else []
    if not right or not all(isinstance(own, dict) for own in parts):
        raise config.error("block_configs", "something else", f"{part} of {layers} layers")
    return [own.get(name) for own in parts]


def _deci_kv_heads(config: HfConfig) -> list[int]:
    """Return the number of KV heads by layer."""
    heads, layers = config.heads, config.layers
    groups = _blocks(config, "attention", "n_heads_in_group")
    if groups is not None:
        if not all(type(n) is int and n > 0 and heads % n == 0 for n in groups):
            raise config.error(
                "block_configs", "a layer without attention", "attention in all layers; others are not supported"
            )
        return [heads // n for n in groups if type(n) is int]
    if config.get("num_key_value_heads_per_layer") is None:
        return [kv_heads(config)] * layers
    return config.per_layer("num_key_value_heads_per_layer", "{} numbers of heads", is_count)


def _deci_ffn(config: HfConfig) -> NDArray[np.int32] | int:
    """Return the feed-forward widths: two thirds of the model width times a factor, rounded up to a multiple of 256."""
    factors = _blocks(config, "ffn", "ffn_mult")
    if factors is None:
        return config.needed("intermediate_size")
    widths = []
    for factor in factors:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1000:
            raise config.error("block_configs", f"ffn_mult {factor}", "a feed-forward in all layers")
        widths.append(-(-int(2 * factor * config.width / 3) // 256) * 256)
    return np.array(widths, np.int32)


def _by_own_heads(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Reorder the rows of the keys, using this layer's number of KV heads."""
    heads = _deci_kv_heads(config)[layer_of(parts[0])]
    return permuted(lambda _: heads)(parts, config)


_LLAMA4 = {
    "ffn_gate_exps.weight": taken("feed_forward.experts.gate_up_proj", in_turn(turned, share(0))),
    "ffn_up_exps.weight": taken("feed_forward.experts.gate_up_proj", in_turn(turned, share(1))),
    "ffn_down_exps.weight": taken("feed_forward.experts.down_proj", turned),
}


def _xielu(take: Take, config: HfConfig) -> dict[str, Any]:
    """Return the learned numbers of each layer's activation."""
    parts, layers = ("alpha_p", "alpha_n", "beta", "eps"), range(config.layers)
    return {f"xielu.{x}": np.array([number(take, f"model.layers.{n}.mlp.act_fn.{x}") for n in layers], np.float32)
            for x in parts}  # fmt: skip


ROWS = (
    Recipe(
        "llama",
        (
            "LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM",
            "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "LlamaModel",
        ),
        changes=PERMUTED, rope_tensors=True,
    ),
    Recipe(
        "afmoe", ("AfmoeForCausalLM",), keys={"expert_weights_norm": True, "expert_shared_count": "num_shared_experts"},
        fixed={"mup_enabled": True},
    ),
    Recipe("apertus", ("ApertusForCausalLM",), rope_tensors=True, defaults={"rope_theta": 12e6}, values=_xielu),
    Recipe("arcee", ("ArceeForCausalLM",), changes=PERMUTED, rope_tensors=True),
    Recipe(
        "llama4", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), _LLAMA4, rope_tensors=True,
        keys={
            "feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "attention_chunk_size",
            "interleave_moe_layer_step": lambda config: config.integer("interleave_moe_layer_step") or 1,
        },
        fixed={"attn_scale": 0.1, "floor_scale": 8192}, checks=(_every_fourth, _experts_by_step),
    ),
    Recipe("seed_oss", ("SeedOssForCausalLM",)),
    Recipe("smollm3", ("SmolLM3ForCausalLM",), changes=PERMUTED, checks=(_every_fourth,)),
    Recipe(
        "deci", ("DeciLMForCausalLM",), changes={**PERMUTED, "attn_k": _by_own_heads}, rope_tensors=True,
        keys={
            "attention.head_count_kv": lambda config: np.array(_deci_kv_heads(config), np.int32),
            "feed_forward_length": _deci_ffn, "attention.key_length": head_width, "attention.value_length": head_width,
        },
    ),
    Recipe(
        "nanbeige", ("NanbeigeForCausalLM",), changes=PERMUTED, rope_tensors=True,
        keys={
            "num_loops": lambda config: config.integer("num_loops") or 1,
            "skip_loop_final_norm": lambda config: config.flag("skip_loop_final_norm") is True,
        },
    ),
    Recipe("llama-embed", ("LlamaBidirectionalModel",), changes=PERMUTED, rope_tensors=True),
)  # fmt: skip
