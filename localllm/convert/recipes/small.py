"""The recipes of small dense families: Baichuan, BitNet, InternLM 2, Nemotron, OpenELM, Orion, StableLM and others.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localllm.convert import sources as of
from localllm.convert import tensor as t
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import From, Layer, Recipe, Sizes, by_name, must_be, take_half, taken
from localllm.convert.recipes.shared import as_many_keys, head_width, kv_heads, neighbours, one_after_other
from localllm.convert.tensor import LazyTensor


def _one_table(config: HfConfig) -> str | None:
    """Require a tied output matrix."""
    if config.flag("tie_word_embeddings"):
        return None
    return "tie_word_embeddings is not true, and there is no other output matrix"


BAICHUAN_2 = 125696  # Baichuan 2's vocabulary size, the only difference from Baichuan 1 in config.json


def _unit_rows(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Return Baichuan 2's output matrix with normalized rows, as in the reference implementation. Leave Baichuan 1's
    unchanged."""
    if sizes.config.integer("vocab_size") != BAICHUAN_2:
        return parts[0]
    return t.computed(parts[0], _unit)


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.sqrt(np.square(rows).sum(axis=-1, keepdims=True))
    unit: NDArray[np.float32] = rows / np.maximum(lengths, np.float32(1e-12))
    return unit


def _known_depth(config: HfConfig) -> str | None:
    """Require a known number of layers. The depth determines the position encoding, which config.json lacks: 7B has
    rope, 13B ALiBi.
    """
    layers = config.needed("num_hidden_layers")
    if layers in (32, 40):
        return None
    return f"num_hidden_layers is {layers}; the GGUF architecture has 32 (rotated) or 40 (ALiBi)"


def _per_layer(name: str) -> Callable[[HfConfig], NDArray[np.int32]]:
    """Return a reader for a list with one value per layer."""

    def numbers(config: HfConfig) -> NDArray[np.int32]:
        found, layers = config.get(name), config.needed("num_hidden_layers")
        right = isinstance(found, list) and len(found) == layers
        if not right or not all(type(n) is int and 0 < n < 1 << 16 for n in found):
            raise config.error(name, found, f"{layers} numbers from 1 up")
        return np.array(found, np.int32)

    return numbers


def _most_heads(config: HfConfig) -> int | None:
    found = config.get("num_query_heads")
    return max((n for n in found if type(n) is int), default=None) if isinstance(found, list) else None


def _openelm_ffn(config: HfConfig) -> NDArray[np.int32]:
    """Return the feed-forward widths: the model width times a factor, rounded to a multiple."""
    factors, layers = config.get("ffn_multipliers"), config.needed("num_hidden_layers")
    divisor, width = config.integer("ffn_dim_divisor") or 256, config.needed("hidden_size")
    right = isinstance(factors, list) and len(factors) == layers
    if not right or not all(type(x) in (int, float) and 0 < x < 1000 for x in factors):
        raise config.error("ffn_multipliers", factors, f"{layers} positive numbers")
    rounded = [max(divisor, int(x * width + divisor / 2) // divisor * divisor) for x in factors]
    return np.array(
        [n + divisor * (n < 0.9 * x * width) for n, x in zip(rounded, factors, strict=True)], np.int32
    )  # fmt: skip


_INTERNLM2: Layer = {
    "attn_norm": taken("attention_norm"),
    "ffn_norm": taken("ffn_norm"),
    **neighbours(
        "attention.wqkv",
        lambda config: (  # queries that share a key, the key, and the value
            kv_heads(config),
            (config.needed("num_attention_heads") // kv_heads(config) * head_width(config), *(head_width(config),) * 2),
        ),
    ),
    "attn_output": taken("attention.wo"),
    **{f"ffn_{x}": taken(f"feed_forward.{name}") for x, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
}
_BAICHUAN: Layer = {**of.NORMS, **neighbours("self_attn.W_pack", one_after_other), **of.OUT, **of.GATED}
_PLM: Layer = {
    **of.NORMS, **of.OUT, **of.UP_DOWN, "attn_q": taken("self_attn.q_proj"),
    "attn_kv_a_mqa": taken("self_attn.kv_a_proj_with_mqa"), "attn_kv_a_norm": taken("self_attn.kv_a_layernorm"),
    "attn_kv_b": taken("self_attn.kv_b_proj"),
}  # fmt: skip
_OPENELM: Layer = {
    "attn_norm": taken("attn_norm"),
    "ffn_norm": taken("ffn_norm"),
    "attn_qkv": taken("attn.qkv_proj"),
    **{f"attn_{x}_norm": taken(f"attn.{x}_norm") for x in "qk"},
    "attn_output": taken("attn.out_proj"),
    "ffn_gate": taken("ffn.proj_1", take_half(0)),
    "ffn_up": taken("ffn.proj_1", take_half(1)),
    "ffn_down": taken("ffn.proj_2"),
}


ROWS = (
    Recipe(
        "bitnet", ("BitNetForCausalLM",), of.BITNET, checks=(must_be("attention_bias", False), _one_table),
        defaults={"rope_theta": 5e5},
    ),
    Recipe(
        "nemotron", ("NemotronForCausalLM",), {**of.NORMS, **of.QKV, **of.OUT, **of.UP_DOWN}, norm_offset=1.0,
        eps="norm_eps", defaults={"partial_rotary_factor": 0.5},
    ),
    Recipe(
        "stablelm", ("StableLmForCausalLM", "StableLMEpochForCausalLM", "LlavaStableLMEpochForCausalLM"), of.STABLELM,
        eps="layer_norm_eps", defaults={"partial_rotary_factor": 0.25},
        checks=(must_be("use_parallel_residual", False),),
    ),
    Recipe(
        "baichuan", ("BaichuanForCausalLM", "BaiChuanForCausalLM"), _BAICHUAN,
        top={"output": From(("lm_head",), _unit_rows)}, checks=(_known_depth,),
        defaults={"max_position_embeddings": lambda config: config.integer("model_max_length")},
    ),
    Recipe(
        "internlm2", ("InternLM2ForCausalLM",), _INTERNLM2,
        top={"token_embd": From(("model.tok_embeddings",)), "output": From(("output",))},
    ),
    Recipe("maincoder", ("MaincoderForCausalLM",), {**of.QWEN, **of.HEAD_NORMS}),
    Recipe(
        "openelm", ("OpenELMForCausalLM",), _OPENELM, eps="rms_norm_eps",
        top={"token_embd": From(("model.token_embeddings",))},
        keys={
            "attention.head_count": _per_layer("num_query_heads"),
            "attention.head_count_kv": _per_layer("num_kv_heads"), "feed_forward_length": _openelm_ffn,
        },
        checks=(
            must_be("ffn_with_glu", True), must_be("activation_fn_name", "swish", "silu"),
            must_be("normalization_layer_name", "rms_norm"), must_be("normalize_qk_projections", True),
        ),
        defaults={
            "num_hidden_layers": by_name("num_transformer_layers"), "hidden_size": by_name("model_dim"),
            "num_attention_heads": _most_heads, "max_position_embeddings": by_name("max_context_length"),
            "rope_theta": lambda config: config.real("rope_freq_constant"), "rms_norm_eps": 1e-6,
        },
    ),
    Recipe("orion", ("OrionForCausalLM",), of.QWEN),
    Recipe(
        "pangu-embedded", ("PanguEmbeddedForCausalLM",), of.QWEN,
        keys={"attention.key_length": head_width, "attention.value_length": head_width},
    ),
    Recipe(
        "plm", ("PLMForCausalLM",), _PLM,
        keys={
            "attention.head_count_kv": "num_attention_heads", "attention.kv_lora_rank": "kv_lora_rank",
            "attention.key_length": lambda config: (
                config.needed("qk_nope_head_dim") + config.needed("qk_rope_head_dim")
            ),
            "attention.value_length": "v_head_dim",
        },
        checks=(must_be("q_lora_rank", None), must_be("attention_bias", False)),
        head_dim=lambda config: config.needed("qk_rope_head_dim"),
    ),
    Recipe("xverse", ("XverseForCausalLM",), of.LLAMA, checks=(as_many_keys,)),
)  # fmt: skip
