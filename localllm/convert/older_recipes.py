"""Families of 2022 and 2023, whose matrix for queries, keys and values goes head by head; and MiniCPM 3."""

from __future__ import annotations

from collections.abc import Callable

from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Key, Mapped, Recipe, must_be, of_groups

_NOT_ROTATED: dict[str, Key] = {"rope.dimension_count": None, "rope.freq_base": None}
_GELUS = ("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast")


def _number(*names: str) -> Callable[[HfConfig], int | None]:
    """Return the number under the first of the names that older files have."""
    return lambda config: config.integer(*names)


def _kv_heads(config: HfConfig) -> int:
    """Return Falcon's heads of keys and values."""
    heads = config.needed("num_attention_heads")
    if config.flag("new_decoder_architecture"):
        return config.integer("num_kv_heads") or heads
    return heads if config.flag("multi_query") is False else 1


def _falcon(config: HfConfig) -> tuple[int, tuple[int, ...]]:
    """Return Falcon's groups, and the rows of a group: the queries that share a key, the key and its value."""
    heads, groups = config.needed("num_attention_heads"), _kv_heads(config)
    width = config.needed("hidden_size") // heads
    return groups, (heads // groups * width, width, width)


def _by_head(config: HfConfig) -> tuple[int, tuple[int, ...]]:
    heads = config.needed("num_attention_heads")
    return heads, (config.needed("hidden_size") // heads,) * 3


def _apart(layout: Callable[[HfConfig], tuple[int, tuple[int, ...]]]) -> Mapped:
    """All queries, then all keys, then all values."""
    change = of_groups(layout, 0, 1, 2)
    return Mapped(changes={"attn_qkv.weight": change, "attn_qkv.bias": change})


def _inner(config: HfConfig) -> int:
    return config.integer("n_inner", "ffn_hidden_size") or 4 * config.needed("hidden_size")


def _key_width(config: HfConfig) -> int:
    return config.needed("qk_nope_head_dim") + config.needed("qk_rope_head_dim")


_BLOOM = _apart(_by_head)
ROWS = (
    Recipe(
        "bloom", ("BloomForCausalLM", "BloomModel"), {}, eps="layer_norm_epsilon",
        keys={**_NOT_ROTATED, "feed_forward_length": _inner, "attention.head_count_kv": "num_attention_heads"},
        checks=(must_be("apply_residual_connection_post_layernorm", False),),
        defaults={
            "num_attention_heads": _number("n_head"), "num_hidden_layers": _number("n_layer"),
            "hidden_size": _number("n_embed", "n_embd"), "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": lambda config: config.integer("seq_length") or 2048,
        },
        mapped=Mapped(("transformer.",), changes=_BLOOM.changes),
    ),
    Recipe(
        "falcon", ("FalconForCausalLM",), {}, eps="layer_norm_epsilon", mapped=_apart(_falcon),
        keys={"feed_forward_length": _inner, "attention.head_count_kv": _kv_heads},
        checks=(must_be("alibi", False), must_be("parallel_attn", True), must_be("activation", *_GELUS)),
        defaults={"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5},
    ),
    Recipe(
        "gptneox", ("GPTNeoXForCausalLM",), {}, eps="layer_norm_eps", mapped=_apart(_by_head),
        keys={
            "attention.head_count_kv": "num_attention_heads",
            "use_parallel_residual": lambda config: config.flag("use_parallel_residual") is not False,
        },
        defaults={"partial_rotary_factor": lambda config: config.real("rotary_pct") or 0.25, "layer_norm_eps": 1e-5},
    ),
    Recipe(
        "minicpm3", ("MiniCPM3ForCausalLM",), {}, mapped=Mapped(), rope_tensors=True,
        keys={
            "attention.head_count_kv": "num_attention_heads", "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank", "attention.key_length": _key_width,
            "attention.value_length": "v_head_dim", "rope.dimension_count": "qk_rope_head_dim",
        },
        checks=(must_be("scale_emb", 12), must_be("scale_depth", 1.4), must_be("dim_model_base", 256)),
        head_dim=lambda config: config.needed("qk_rope_head_dim"),
    ),
    Recipe(
        "starcoder", ("GPTBigCodeForCausalLM",), {}, eps="layer_norm_epsilon", mapped=Mapped(),
        keys={**_NOT_ROTATED, "feed_forward_length": _inner, "attention.head_count_kv": 1},
        checks=(
            must_be("multi_query", True), must_be("scale_attn_weights", True), must_be("activation_function", *_GELUS),
        ),
        defaults={
            "num_attention_heads": _number("n_head"), "num_hidden_layers": _number("n_layer"),
            "hidden_size": _number("n_embd"), "max_position_embeddings": _number("n_positions"),
            "layer_norm_epsilon": 1e-5,
        },
    ),
)  # fmt: skip
