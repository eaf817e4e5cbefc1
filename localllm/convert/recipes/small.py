"""The recipes of small dense families: Baichuan, BitNet, InternLM 2, Nemotron, OpenELM, Orion, StableLM and others.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localllm.convert import tensor as t
from localllm.convert.changes import PERMUTED, halves, heads, kv_heads, stacked
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig, is_count, is_number
from localllm.convert.recipe import Raw, Recipe, Tensors, by_name, real, taken
from localllm.convert.recipes.shared import head_width, neighbours, one_after_other
from localllm.convert.tensor import LazyTensor

# Baichuan 2's vocabulary size, the only difference from Baichuan 1 in config.json.
BAICHUAN_2 = 125696


def _unit_rows(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return Baichuan 2's output matrix with normalized rows, as in the reference implementation. Leave Baichuan 1's
    unchanged."""
    if config.integer("vocab_size") != BAICHUAN_2:
        return parts[0]
    return t.computed(parts[0], _unit)


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.sqrt(np.square(rows).sum(axis=-1, keepdims=True))
    unit: NDArray[np.float32] = rows / np.maximum(lengths, np.float32(1e-12))
    return unit


def _per_layer(name: str) -> Callable[[HfConfig], NDArray[np.int32]]:
    """Return a reader for a list with one value per layer."""
    return lambda config: np.array(config.per_layer(name, "{} numbers from 1 up", is_count), np.int32)


def _most_heads(config: HfConfig) -> int | None:
    found = config.get("num_query_heads")
    return max((n for n in found if type(n) is int), default=None) if isinstance(found, list) else None


def _openelm_ffn(config: HfConfig) -> NDArray[np.int32]:
    """Return the feed-forward widths: the model width times a factor, rounded to a multiple."""
    factors = config.per_layer("ffn_multipliers", "{} positive numbers", lambda x: is_number(x) and 0 < x < 1000)
    divisor, width = config.integer("ffn_dim_divisor") or 256, config.width
    rounded = [max(divisor, int(x * width + divisor / 2) // divisor * divisor) for x in factors]
    return np.array(
        [n + divisor * (n < 0.9 * x * width) for n, x in zip(rounded, factors, strict=True)], np.int32
    )  # fmt: skip


_INTERNLM2 = neighbours(
    "attention.wqkv",
    lambda config: (  # queries that share a key, the key, and the value
        kv_heads(config),
        (config.heads // kv_heads(config) * head_width(config), *(head_width(config),) * 2),
    ),
)


def _as_parallel_as_said(raw: Raw, config: HfConfig) -> Raw:
    """Require norms before the feed-forward, unless config.json makes the layers parallel (StableLM 2 12B)."""
    parallel = bool(config.flag("use_parallel_residual"))
    if parallel == any(".post_attention_layernorm." in name for name in raw):
        problem = f"use_parallel_residual is {parallel}, but the tensors of post_attention_layernorm say otherwise"
        raise ConvertError(f"{config.path}: {problem}; config.json does not match these weights")
    return raw


_STABLELM = {f"attn_{x}_norm": taken(f"self_attn.{x}_layernorm.norms.{{}}", stacked) for x in "qk"}


ROWS = (
    Recipe(
        "bitnet", ("BitNetForCausalLM",),
        {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
        fixed={"attention_bias": False, "tie_word_embeddings": True},
        defaults={"rope_theta": 5e5, "tie_word_embeddings": False},
    ),
    Recipe("nemotron", ("NemotronForCausalLM",), norm_offset=1.0, defaults={"partial_rotary_factor": 0.5}),
    Recipe(
        "stablelm", ("StableLmForCausalLM", "StableLMEpochForCausalLM", "LlavaStableLMEpochForCausalLM"), _STABLELM,
        defaults={"partial_rotary_factor": 0.25}, raw=_as_parallel_as_said,
    ),
    Recipe(
        "baichuan", ("BaichuanForCausalLM", "BaiChuanForCausalLM"), neighbours("self_attn.W_pack", one_after_other),
        changes={"output": _unit_rows}, fixed={"num_hidden_layers": (32, 40)},
    ),
    Recipe("internlm2", ("InternLM2ForCausalLM",), _INTERNLM2),
    Recipe("maincoder", ("MaincoderForCausalLM",)),
    Recipe(
        "openelm", ("OpenELMForCausalLM",), halves("ffn.proj_1"), {"token_embd": "model.token_embeddings"},
        keys={
            "attention.head_count": _per_layer("num_query_heads"),
            "attention.head_count_kv": _per_layer("num_kv_heads"), "feed_forward_length": _openelm_ffn,
        },
        fixed={
            "ffn_with_glu": True, "activation_fn_name": ("swish", "silu"), "normalization_layer_name": "rms_norm",
            "normalize_qk_projections": True,
        },
        defaults={"num_attention_heads": _most_heads, "rope_theta": real("rope_freq_constant"), "rms_norm_eps": 1e-6},
    ),
    Recipe("orion", ("OrionForCausalLM",)),
    Recipe(
        "pangu-embedded", ("PanguEmbeddedForCausalLM",),
        keys={"attention.key_length": head_width, "attention.value_length": head_width},
    ),
    Recipe(
        "plm", ("PLMForCausalLM",),
        keys={
            "attention.head_count_kv": "num_attention_heads", "attention.kv_lora_rank": "kv_lora_rank",
            "attention.key_length": lambda config: (
                config.needed("qk_nope_head_dim") + config.needed("qk_rope_head_dim")
            ),
            "attention.value_length": "v_head_dim",
        },
        fixed={"q_lora_rank": None, "attention_bias": False}, head_dim=by_name("qk_rope_head_dim"),
    ),
    Recipe("xverse", ("XverseForCausalLM",), changes=PERMUTED, fixed={"num_key_value_heads": heads}),
)  # fmt: skip
