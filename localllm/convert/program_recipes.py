"""The recipes of dense models that transformers does not support. The tensor names come from the models' own code.
Mixture-of-experts models are in `program_expert_recipes`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert import sources as of
from localllm.convert import tensor as t
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import (
    Change,
    Check,
    From,
    Key,
    Layer,
    Recipe,
    Sizes,
    by_name,
    in_turn,
    must_be,
    of_groups,
    only,
    permuted,
    take_half,
    taken,
    turned,
)
from localllm.convert.tensor import LazyTensor

BAICHUAN_2 = 125696  # Baichuan 2's vocabulary size; nothing else in config.json distinguishes it from Baichuan 1
_LN: Layer = {"attn_norm": taken("ln_1"), "ffn_norm": taken("ln_2")}
_WTE = {"token_embd": From(("model.wte",)), "output_norm": From(("model.ln_f",))}
_NOT_ROTATED: dict[str, Key] = {"rope.dimension_count": None, "rope.freq_base": None}


def head_width(config: HfConfig) -> int:
    return config.integer("head_dim") or config.needed("hidden_size") // config.needed("num_attention_heads")


def kv_heads(config: HfConfig) -> int:
    return config.integer("num_key_value_heads") or config.needed("num_attention_heads")


def one_after_other(config: HfConfig) -> tuple[int, tuple[int, ...]]:
    """Return one group: the rows of all queries, all keys and all values."""
    width, keys = head_width(config), kv_heads(config)
    return 1, (config.needed("num_attention_heads") * width, keys * width, keys * width)


def neighbours(name: str, layout: Callable[[HfConfig], tuple[int, tuple[int, ...]]]) -> Layer:
    """Return the sources of Q, K and V in one fused matrix, reordered from half-split to interleaved rope."""
    heads: tuple[Callable[[Sizes], int], ...] = (lambda sizes: sizes.heads, lambda sizes: kv_heads(sizes.config))
    changes: list[Change] = [in_turn(of_groups(layout, which), permuted(each)) for which, each in enumerate(heads)]
    changes.append(of_groups(layout, 2))
    return {f"attn_{x}": taken(name, change) for x, change in zip("qkv", changes, strict=True)}


def ratio(name: str) -> Callable[[HfConfig], float]:
    """Return a reader for a factor that config.json or the defaults must give."""

    def value(config: HfConfig) -> float:
        found = config.real(name)
        if not found:
            raise config.error(name, found, "a number other than 0")
        return found

    return value


def as_many_keys(config: HfConfig) -> str | None:
    """Require one KV head per query head: the original code supports nothing else."""
    heads, keys = config.needed("num_attention_heads"), kv_heads(config)
    return None if heads == keys else f"num_key_value_heads is {keys} of {heads} heads; the model's program has all"


def _as_wide(config: HfConfig) -> str | None:
    """Require heads whose widths add up to the model's width: llama.cpp loads no others."""
    width, heads, each = config.needed("hidden_size"), config.needed("num_attention_heads"), head_width(config)
    if heads * each == width:
        return None
    return f"{heads} heads of {each} are not {width} together, which the GGUF architecture has fixed so"


# -- Baichuan ----------------------------------------------------------------------------------------------------------


def _unit_rows(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Return Baichuan 2's output matrix with normalized rows, as in the original code; leave Baichuan 1's unchanged."""
    if sizes.config.integer("vocab_size") != BAICHUAN_2:
        return parts[0]
    return t.computed(parts[0], _unit)


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.sqrt(np.square(rows).sum(axis=-1, keepdims=True))
    unit: NDArray[np.float32] = rows / np.maximum(lengths, np.float32(1e-12))
    return unit


def _known_depth(config: HfConfig) -> str | None:
    """Require a known depth. It decides the position encoding, which config.json lacks: 7B has rope, 13B ALiBi."""
    layers = config.needed("num_hidden_layers")
    if layers in (32, 40):
        return None
    return f"num_hidden_layers is {layers}; the GGUF architecture has 32 (rotated) or 40 (ALiBi)"


# -- OpenELM -----------------------------------------------------------------------------------------------------------


def _per_layer(name: str) -> Callable[[HfConfig], NDArray[np.int32]]:
    """Return a reader for a list with one number per layer."""

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
    """Return the feed-forward widths: the model's width times a factor, rounded to a multiple."""
    factors, layers = config.get("ffn_multipliers"), config.needed("num_hidden_layers")
    divisor, width = config.integer("ffn_dim_divisor") or 256, config.needed("hidden_size")
    right = isinstance(factors, list) and len(factors) == layers
    if not right or not all(type(x) in (int, float) and 0 < x < 1000 for x in factors):
        raise config.error("ffn_multipliers", factors, f"{layers} positive numbers")
    rounded = [max(divisor, int(x * width + divisor / 2) // divisor * divisor) for x in factors]
    return np.array(
        [n + divisor * (n < 0.9 * x * width) for n, x in zip(rounded, factors, strict=True)], np.int32
    )  # fmt: skip


# -- Refact, Jais ------------------------------------------------------------------------------------------------------


def _refact_ffn(config: HfConfig) -> int:
    """Return two thirds of four times the width, rounded up to a multiple of 256."""
    return -(-(8 * config.needed("hidden_size") // 3) // 256) * 256


def _key_and_value(which: int) -> Change:
    """Return the rows of the single key head, or of the value head."""
    return of_groups(lambda config: (1, (head_width(config),) * 2), which)


def _times(*names: str) -> Change:
    """Multiply by a factor of config.json, the first that is present. "a*b" names a product."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        config = sizes.config
        for name in names:
            factors = [config.real(part) for part in name.split("*")]
            if all(factor is not None for factor in factors):
                product = np.float32(math.prod(factor for factor in factors if factor is not None))
                return t.scaled(parts[0], np.full(parts[0].rows, product, np.float32))
        raise config.error(names[-1], None, "a number")

    return change


_JAIS: Layer = {
    **_LN,
    **{
        f"{key}.{suffix}": taken(f"{name}.{suffix}", turned if suffix == "weight" else only)
        for key, name in (
            ("attn_qkv", "attn.c_attn"), ("attn_output", "attn.c_proj"), ("ffn_up", "mlp.c_fc"),
            ("ffn_gate", "mlp.c_fc2"), ("ffn_down", "mlp.c_proj"),
        )
        for suffix in ("weight", "bias")
    },
}  # fmt: skip

# -- the table ---------------------------------------------------------------------------------------------------------

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
_EXAONE: Layer = {
    **_LN,
    **{f"attn_{x}": taken(f"attn.attention.{x}_proj") for x in "qkv"},
    "attn_output": taken("attn.attention.out_proj"),
    **{f"ffn_{x}": taken(f"mlp.{name}") for x, name in (("gate", "c_fc_0"), ("up", "c_fc_1"), ("down", "c_proj"))},
}
_CHATGLM: Layer = {
    **of.NORMS,
    "attn_qkv": taken("self_attention.query_key_value"),
    "attn_output": taken("self_attention.dense"),
    "ffn_up": taken("mlp.dense_h_to_4h"),  # gate and up in one matrix
    "ffn_down": taken("mlp.dense_4h_to_h"),
}
_BAICHUAN: Layer = {**of.NORMS, **neighbours("self_attn.W_pack", one_after_other), **of.OUT, **of.GATED}
_GPT: Layer = {**_LN, "attn_qkv": taken("attn.c_attn"), "attn_output": taken("attn.c_proj")}
_QWEN: Layer = {**_GPT, "ffn_up": taken("mlp.w1"), "ffn_gate": taken("mlp.w2"), "ffn_down": taken("mlp.c_proj")}
_CODESHELL: Layer = {**_GPT, "ffn_up": taken("mlp.c_fc"), "ffn_down": taken("mlp.c_proj")}
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
_REFACT: Layer = {
    **_LN,
    "attn_q": taken("attn.q"),
    "attn_k": taken("attn.kv", _key_and_value(0)),
    "attn_v": taken("attn.kv", _key_and_value(1)),
    "attn_output": taken("attn.c_proj"),
    "ffn_gate": taken("mlp.gate_up_proj", take_half(0)),
    "ffn_up": taken("mlp.gate_up_proj", take_half(1)),
    "ffn_down": taken("mlp.c_proj"),
}
_NAMES_OF_GPT: dict[str, Any] = {
    "num_hidden_layers": by_name("n_layer"), "hidden_size": by_name("n_embd"), "num_attention_heads": by_name("n_head"),
    "max_position_embeddings": by_name("n_positions"), "layer_norm_epsilon": 1e-5,
}  # fmt: skip
_ALL_NORMED: tuple[Check, ...] = (
    must_be("rmsnorm", True), must_be("post_layer_norm", True), must_be("add_bias_linear", False),
    must_be("apply_residual_connection_post_layernorm", False), must_be("original_rope", True),
    must_be("position_encoding_2d", False),
)  # fmt: skip

ROWS = (
    Recipe(
        "baichuan", ("BaichuanForCausalLM", "BaiChuanForCausalLM"), _BAICHUAN,
        top={"output": From(("lm_head",), _unit_rows)}, checks=(_known_depth,),
        defaults={"max_position_embeddings": lambda config: config.integer("model_max_length")},
    ),
    Recipe(
        "chatglm", ("ChatGLMModel", "ChatGLMForConditionalGeneration"), _CHATGLM, eps="layernorm_epsilon",
        layers=lambda config: [f"model.encoder.layers.{n}." for n in range(config.needed("num_hidden_layers"))],
        top={
            "token_embd": From(("model.embedding.word_embeddings",)),
            "output_norm": From(("model.encoder.final_layernorm",)), "output": From(("model.output_layer",)),
        },
        checks=(*_ALL_NORMED, _as_wide),
        defaults={
            "num_hidden_layers": by_name("num_layers"), "max_position_embeddings": by_name("seq_length"),
            "intermediate_size": by_name("ffn_hidden_size"), "head_dim": by_name("kv_channels"),
            "num_key_value_heads": lambda config: (
                config.needed("multi_query_group_num") if config.flag("multi_query_attention") else None
            ),
            "partial_rotary_factor": 0.5, "layernorm_epsilon": 1e-5,
            "rope_theta": lambda config: 10000.0 * (config.real("rope_ratio") or 1.0),
        },
    ),
    Recipe(
        "chatglm", ("GlmForCausalLM",), {**of.NORMS, **of.QKV, **of.OUT, **of.FUSED}, checks=(_as_wide,),
        defaults={"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-07},
    ),
    Recipe(
        "codeshell", ("CodeShellForCausalLM",), _CODESHELL, eps="layer_norm_epsilon", top=_WTE,
        keys={
            "attention.head_count_kv": lambda config: config.integer("num_query_groups") or 1,
            "feed_forward_length": lambda config: config.integer("n_inner") or 4 * config.needed("hidden_size"),
        },
        checks=(
            must_be("position_embedding_type", "rope"), must_be("activation_function", *("gelu_pytorch_tanh", "gelu")),
            must_be("scale_attn_weights", True), must_be("group_query_attention", True),
        ),
        defaults=_NAMES_OF_GPT,
    ),
    Recipe(
        "exaone", ("ExaoneForCausalLM",), _EXAONE, eps="layer_norm_epsilon", top=_WTE, rope_tensors=True,
        defaults={
            "num_hidden_layers": by_name("num_layers"), "layer_norm_epsilon": 1e-5,
            "hidden_act": lambda config: config.get("activation_function"),
        },
    ),
    Recipe(
        "internlm2", ("InternLM2ForCausalLM",), _INTERNLM2,
        top={"token_embd": From(("model.tok_embeddings",)), "output": From(("output",))},
    ),
    Recipe(
        "jais", ("JAISLMHeadModel",), _JAIS, eps="layer_norm_epsilon",
        top={
            **_WTE, "token_embd": From(("model.wte",), _times("mup_embeddings_scale", "embeddings_scale")),
            "output": From(("lm_head",), _times("mup_output_alpha*mup_width_scale", "width_scale")),
        },
        keys={
            **_NOT_ROTATED, "attention.head_count_kv": "num_attention_heads", "attention.max_alibi_bias": 8.0,
            "feed_forward_length": lambda config: config.integer("n_inner") or 4 * config.needed("hidden_size"),
        },
        checks=(
            must_be("activation_function", "swiglu"), must_be("position_embedding_type", "alibi"),
            must_be("scale_attn_weights", True), must_be("scale_qk_dot_by_d", True),
            must_be("mup_scale_qk_dot_by_d", True), must_be("alibi_scaling", None),
        ),
        defaults=_NAMES_OF_GPT,
    ),
    Recipe("maincoder", ("MaincoderForCausalLM",), {**of.QWEN, **of.HEAD_NORMS}),
    Recipe(
        "minicpm", ("MiniCPMForCausalLM",), of.LLAMA, rope_tensors=True,
        keys={
            "embedding_scale": ratio("scale_emb"),
            "residual_scale": lambda config: (
                ratio("scale_depth")(config) / math.sqrt(config.needed("num_hidden_layers"))
            ),
            "logit_scale": lambda config: config.needed("hidden_size") / ratio("dim_model_base")(config),
        },
        checks=(must_be("num_experts", 0),),
        defaults={"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1},
    ),
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
    Recipe(
        "qwen", ("QWenLMHeadModel",), _QWEN, eps="layer_norm_epsilon", top=_WTE,
        keys={"context_length": by_name("seq_length", "max_position_embeddings")},
        checks=(must_be("rotary_pct", 1.0), must_be("scale_attn_weights", True)),
        defaults={"head_dim": lambda config: config.integer("kv_channels"), "layer_norm_epsilon": 1e-6},
    ),
    Recipe(
        "refact", ("GPTRefactForCausalLM",), _REFACT, eps="layer_norm_epsilon", top=_WTE,
        keys={**_NOT_ROTATED, "attention.head_count_kv": 1, "feed_forward_length": _refact_ffn},
        checks=(must_be("multi_query", True), must_be("scale_attn_weights", True)),
        whole_keys={f"tokenizer.ggml.fim_{x}_token_id": i for x, i in (("pre", 1), ("mid", 2), ("suf", 3))},
        defaults=_NAMES_OF_GPT,
    ),
    Recipe("xverse", ("XverseForCausalLM",), of.LLAMA, checks=(as_many_keys,)),
)  # fmt: skip
