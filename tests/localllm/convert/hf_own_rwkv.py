"""Tiny RWKV checkpoints for `hf_own`, with the tensor names of RWKV's code."""

from __future__ import annotations

from typing import Any

from tests.localllm.convert.hf_tokenizers import VOCABULARY

Shapes = dict[str, list[int]]
WIDTH, HEAD, KV, FFN, LAYERS = 128, 64, 1, 96, 3  # llama.cpp computes RWKV-7 incorrectly with a head size of 32
_VECTOR = [1, 1, WIDTH]
_SQUARE = [WIDTH, WIDTH]
_CONFIG = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
_QWEN = {
    **_CONFIG, "intermediate_size": FFN, "num_attention_heads": 2, "num_key_value_heads": KV, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MLP = {"mlp.gate_proj.weight": [FFN, WIDTH], "mlp.up_proj.weight": [FFN, WIDTH], "mlp.down_proj.weight": [WIDTH, FFN]}
_NORMS = {"input_layernorm.weight": [WIDTH], "post_attention_layernorm.weight": [WIDTH]}
_TOP = {"model.embed_tokens.weight": [VOCABULARY, WIDTH], "model.norm.weight": [WIDTH]}


def _norm(name: str) -> Shapes:
    return {f"{name}.{kind}": [WIDTH] for kind in ("weight", "bias")}


def _mix6(rank: int, decay: int) -> Shapes:
    return {
        **{f"time_maa_{x}": _VECTOR for x in "xwkvrg"}, "time_maa_w1": [WIDTH, 5 * rank],
        "time_maa_w2": [5, rank, WIDTH], "time_decay": _VECTOR, "time_decay_w1": [WIDTH, decay],
        "time_decay_w2": [decay, WIDTH],
    }  # fmt: skip


def _below(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


_RWKV6: Shapes = {
    **_norm("ln1"), **_norm("ln2"), **_below("attention.", _mix6(32, 64)),
    "attention.time_faaaa": [WIDTH // HEAD, HEAD],
    **{f"attention.{x}.weight": _SQUARE for x in ("receptance", "key", "value", "gate", "output")},
    **_norm("attention.ln_x"), "feed_forward.time_maa_k": _VECTOR, "feed_forward.time_maa_r": _VECTOR,
    "feed_forward.key.weight": [FFN, WIDTH], "feed_forward.receptance.weight": _SQUARE,
    "feed_forward.value.weight": [WIDTH, FFN],
}  # fmt: skip
_QWEN6: Shapes = {
    **_NORMS, **_below("self_attn.", _mix6(24, 40)), "self_attn.q_proj.weight": _SQUARE,
    "self_attn.q_proj.bias": [WIDTH], "self_attn.k_proj.weight": [KV * HEAD, WIDTH],
    "self_attn.k_proj.bias": [KV * HEAD], "self_attn.v_proj.weight": [KV * HEAD, WIDTH],
    "self_attn.v_proj.bias": [KV * HEAD], "self_attn.gate.weight": _SQUARE, "self_attn.o_proj.weight": _SQUARE, **_MLP,
}  # fmt: skip


def _flash(letter: str, rank: int, bias: bool = True) -> Shapes:
    name = f"attn.{letter}_lora.lora"
    found = {f"{name}.0.weight": [rank, WIDTH], f"{name}.2.weight": [WIDTH, rank]}
    return found | ({f"{name}.2.bias": [WIDTH]} if bias else {})


_RWKV7: Shapes = {
    **_norm("attn_norm"), **_norm("ffn_norm"), **{f"attn.x_{x}": _VECTOR for x in "rwkvag"},
    **_flash("w", 32), **_flash("a", 32), **_flash("v", 16), **_flash("g", 24, bias=False),
    "attn.k_k": [WIDTH], "attn.k_a": [WIDTH], "attn.r_k": [WIDTH // HEAD, HEAD],
    **{f"attn.{x}_proj.weight": _SQUARE for x in "rkvo"}, **_norm("attn.g_norm"), "ffn.x_k": [WIDTH],
    "ffn.key.weight": [FFN, WIDTH], "ffn.value.weight": [WIDTH, FFN],
}  # fmt: skip


def _program(letter: str, rank: int) -> Shapes:
    return {f"{letter}0": _VECTOR, f"{letter}1": [WIDTH, rank], f"{letter}2": [rank, WIDTH]}


_QWEN7: Shapes = {
    **_NORMS, **_below("self_attn.time_mixer.", {
        **{f"x_{x}": _VECTOR for x in "rwkva"}, **_program("w", 64), **_program("a", 64), **_program("v", 32),
        "k_k": _VECTOR, "k_a": _VECTOR, "r_k": [WIDTH // HEAD, HEAD],
        **{f"{x}.weight": _SQUARE for x in ("receptance", "key", "value", "output")},
    }), **_MLP,
}  # fmt: skip


def _tensors(top: Shapes, layer: Shapes, prefix: str, but: tuple[str, ...] = ()) -> list[Any]:
    """Return (name, shape, mean of the random values) of each tensor. Layer 0 skips names with a prefix in `but`."""
    whole = dict(top)
    for n in range(LAYERS):
        own = {name: shape for name, shape in layer.items() if n or not name.startswith(but or "?")}
        whole |= _below(prefix.format(n), own)
    return [
        (name, shape, float("ln" in name or "norm" in name) * name.endswith("weight")) for name, shape in whole.items()
    ]


RWKV: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "rwkv6": (
        {**_CONFIG, "architectures": ["Rwkv6ForCausalLM"], "model_type": "rwkv6", "head_size": HEAD,
         "intermediate_size": FFN, "layer_norm_epsilon": 1e-5, "rescale_every": 2, "bos_token_id": 0,
         "eos_token_id": 0},
        _tensors({"rwkv.embeddings.weight": [VOCABULARY, WIDTH], **_norm("rwkv.blocks.0.pre_ln"),
                  **_norm("rwkv.ln_out"), "head.weight": [VOCABULARY, WIDTH]}, _RWKV6, "rwkv.blocks.{}."),
        "world",
    ),
    "rwkv6qwen2": (
        {**_QWEN, "architectures": ["RWKV6Qwen2ForCausalLM"], "model_type": "rwkv6qwen2", "lora_rank_tokenshift": 24,
         "lora_rank_decay": 40},
        _tensors({**_TOP, "lm_head.weight": [VOCABULARY, WIDTH]}, _QWEN6, "model.layers.{}."), "qwen2",
    ),
    "rwkv7": (
        {**_CONFIG, "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "head_dim": HEAD,
         "intermediate_size": FFN, "norm_eps": 1e-5, "hidden_act": "sqrelu", "decay_low_rank_dim": 32,
         "a_low_rank_dim": 32, "v_low_rank_dim": 16, "gate_low_rank_dim": 24, "attn": None, "bos_token_id": 1,
         "eos_token_id": 2},
        _tensors({"model.embeddings.weight": [VOCABULARY, WIDTH], **_norm("model.layers.0.pre_norm"),
                  **_norm("model.norm"), "lm_head.weight": [VOCABULARY, WIDTH]}, _RWKV7, "model.layers.{}.",
                 ("attn.v_lora",)),
        "world",
    ),
    "arwkv7": (
        {**_QWEN, "architectures": ["RwkvHybridForCausalLM"], "model_type": "rwkv_hybrid", "head_size": HEAD,
         "wkv_has_gate": False, "wkv_version": 7},
        _tensors({**_TOP, "lm_head.weight": [VOCABULARY, WIDTH]}, _QWEN7, "model.layers.{}."), "qwen2",
    ),
}  # fmt: skip
