"""The recipes of models with GPT-2's names: CodeShell, Jais, Refact, StarCoder, BLOOM, Falcon, GPT-NeoX.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from localllm.convert.changes import Groups, Layout, halves, of_groups, times
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Change, Layer, Recipe, integer, taken
from localllm.convert.recipes.openai import TURNED
from localllm.convert.recipes.shared import NOT_ROTATED, by_head, head_width

_GELUS = ("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast")


def _kv_heads(config: HfConfig) -> int:
    """Return Falcon's number of KV heads."""
    heads = config.heads
    if config.flag("new_decoder_architecture"):
        return config.integer("num_kv_heads") or heads
    return heads if config.flag("multi_query") is False else 1


def _falcon(config: HfConfig) -> Groups:
    """Return Falcon's number of groups and the rows of a group: the queries that share a key, the key, and the
    value."""
    heads, groups = config.heads, _kv_heads(config)
    width = config.width // heads
    return groups, (heads // groups * width, width, width)


def _apart(layout: Layout) -> Mapping[str, Change]:
    """Reorder a fused QKV matrix to all queries, then all keys, then all values."""
    return {"attn_qkv": of_groups(layout, 0, 1, 2)}


def _inner(config: HfConfig) -> int:
    return config.integer("n_inner", "ffn_hidden_size") or 4 * config.width


def _refact_ffn(config: HfConfig) -> int:
    """Return two thirds of four times the width, rounded up to a multiple of 256."""
    return -(-(8 * config.width // 3) // 256) * 256


def _key_and_value(which: int) -> Change:
    """Return a change that picks the rows of the single key head, or of the single value head."""
    return of_groups(lambda config: (1, (head_width(config),) * 2), which)


def _times(*names: str) -> Change:
    """Return a change that multiplies by the first factor that config.json has. "a*b" is a product of two factors."""

    def factor(config: HfConfig) -> float:
        for name in names:
            factors = [config.real(part) for part in name.split("*")]
            if None not in factors:
                return math.prod(factor for factor in factors if factor is not None)
        raise config.error(names[-1], None, "a number")

    return times(factor)


_REFACT: Layer = {
    "attn_q": "attn.q",
    "attn_k": taken("attn.kv", _key_and_value(0)),
    "attn_v": taken("attn.kv", _key_and_value(1)),
    **halves("mlp.gate_up_proj"),
}


ROWS = (
    Recipe("jais2", ("Jais2ForCausalLM",)),
    Recipe("starcoder2", ("Starcoder2ForCausalLM",)),
    Recipe(
        "bloom", ("BloomForCausalLM", "BloomModel"),
        keys={**NOT_ROTATED, "feed_forward_length": _inner, "attention.head_count_kv": "num_attention_heads"},
        fixed={"apply_residual_connection_post_layernorm": False}, defaults={"max_position_embeddings": 2048},
        changes=_apart(by_head),
    ),
    Recipe(
        "falcon", ("FalconForCausalLM", "RWForCausalLM"), changes=_apart(_falcon),
        keys={"feed_forward_length": _inner, "attention.head_count_kv": _kv_heads},
        fixed={"alibi": False, "parallel_attn": True, "activation": _GELUS},
        defaults={
            "max_position_embeddings": 2048,
            # checkpoints of 2023 (RWForCausalLM)
            "num_kv_heads": integer("n_head_kv"),
            "new_decoder_architecture": lambda config: config.integer("n_head_kv") is not None,
        },
    ),
    Recipe(
        "gptneox", ("GPTNeoXForCausalLM",), changes=_apart(by_head),
        keys={
            "attention.head_count_kv": "num_attention_heads",
            "use_parallel_residual": lambda config: config.flag("use_parallel_residual") is not False,
        },
        defaults={"partial_rotary_factor": lambda config: config.real("rotary_pct") or 0.25},
    ),
    Recipe(
        "starcoder", ("GPTBigCodeForCausalLM",),
        keys={**NOT_ROTATED, "feed_forward_length": _inner, "attention.head_count_kv": 1},
        fixed={"multi_query": True, "scale_attn_weights": True, "activation_function": _GELUS},
    ),
    Recipe(
        "codeshell", ("CodeShellForCausalLM",),
        keys={
            "attention.head_count_kv": lambda config: config.integer("num_query_groups") or 1,
            "feed_forward_length": _inner,
        },
        fixed={
            "position_embedding_type": "rope", "activation_function": ("gelu_pytorch_tanh", "gelu"),
            "scale_attn_weights": True, "group_query_attention": True,
        },
    ),
    Recipe(
        "jais", ("JAISLMHeadModel",),
        changes={
            **TURNED, "token_embd": _times("mup_embeddings_scale", "embeddings_scale"),
            "output": _times("mup_output_alpha*mup_width_scale", "width_scale"),
        },
        keys={
            **NOT_ROTATED, "attention.head_count_kv": "num_attention_heads", "attention.max_alibi_bias": 8.0,
            "feed_forward_length": _inner,
        },
        fixed={
            "activation_function": "swiglu", "position_embedding_type": "alibi", "scale_attn_weights": True,
            "scale_qk_dot_by_d": True, "mup_scale_qk_dot_by_d": True, "alibi_scaling": None,
        },
    ),
    Recipe(
        "refact", ("GPTRefactForCausalLM",), _REFACT,
        keys={**NOT_ROTATED, "attention.head_count_kv": 1, "feed_forward_length": _refact_ffn},
        fixed={"multi_query": True, "scale_attn_weights": True},
        whole_keys={f"tokenizer.ggml.fim_{x}_token_id": i for x, i in (("pre", 1), ("mid", 2), ("suf", 3))},
        defaults={"layer_norm_epsilon": 1e-5},
    ),
)  # fmt: skip
