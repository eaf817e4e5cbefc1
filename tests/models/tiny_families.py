"""Tiny random models of other families: sparse experts, sliding windows shorter than the text, multipliers.

The models have the same sizes as in `tests.models.tiny`. A model is defined by its tensor shapes. A tensor's
name determines the distribution of its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.models.support import MemoryWeight
from tests.models.tiny import CONTEXT, FFN, VOCABULARY, WIDTH, YARN, Model

Shapes = dict[str, tuple[int, ...]]

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


def family(
    architecture: str,
    seed: int,
    shapes: Shapes | Callable[[int], Shapes],
    *,
    layers: int = 2,
    top: Shapes | None = None,
    tied: bool = False,
    **keys: Any,
) -> Model:
    """Return a model whose layers have the tensors `shapes`, and which has the other tensors `top`. A double
    underscore in a key means a dot.
    """
    random = np.random.RandomState(seed)
    all_shapes: Shapes = {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,), **(top or {})}
    if not tied:
        all_shapes["output.weight"] = (VOCABULARY, WIDTH)
    for layer in range(layers):
        of_layer = shapes(layer) if callable(shapes) else shapes
        all_shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    metadata = {
        "block_count": layers,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "vocab_size": VOCABULARY,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": HEAD_DIM,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    metadata = {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in metadata.items()}
    return metadata, {n: MemoryWeight.of(n, values(n, shape, random)) for n, shape in all_shapes.items()}


def values(name: str, shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    part, kind = name.rsplit(".", 2)[-2:]
    if kind == "scale":
        return 0.6 + random.random_sample(shape)
    if "factors" in part:
        return 1.0 + 7.0 * random.random_sample(shape)
    noise = random.standard_normal(shape)
    if kind == "bias" or "sinks" in part:
        return 0.3 * noise
    if "norm" in part:
        return 1.0 + 0.3 * noise
    gain = 2.0 if part in ("attn_q", "attn_k", "attn_qkv") else 1.0  # attention to few positions
    return noise if part == "token_embd" else gain * noise / np.sqrt(shape[-1])


def biased(shapes: Shapes) -> Shapes:
    """Return the shapes, and for each of them the shape of a bias."""
    biases = {n.replace(".weight", ".bias"): s[:-1] if len(s) > 1 else s for n, s in shapes.items()}
    return shapes | biases


def experts(count: int, inner: int) -> Shapes:
    return {
        "ffn_gate_inp.weight": (count, WIDTH),
        "ffn_gate_exps.weight": (count, inner, WIDTH),
        "ffn_up_exps.weight": (count, inner, WIDTH),
        "ffn_down_exps.weight": (count, WIDTH, inner),
    }


def shared(inner: int) -> Shapes:
    return {
        "ffn_gate_shexp.weight": (inner, WIDTH),
        "ffn_up_shexp.weight": (inner, WIDTH),
        "ffn_down_shexp.weight": (WIDTH, inner),
    }


QKV: Shapes = {"attn_q.weight": (Q, WIDTH), "attn_k.weight": (KV, WIDTH), "attn_v.weight": (KV, WIDTH)}
FUSED_QKV: Shapes = {"attn_qkv.weight": (Q + 2 * KV, WIDTH)}
OUT: Shapes = {"attn_output.weight": (WIDTH, Q)}
HEAD_NORMS: Shapes = {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
NORMS: Shapes = {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)}
POST_NORMS: Shapes = {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
GATED: Shapes = {"ffn_gate.weight": (FFN, WIDTH), "ffn_up.weight": (FFN, WIDTH), "ffn_down.weight": (WIDTH, FFN)}
FUSED: Shapes = {"ffn_up.weight": (2 * FFN, WIDTH), "ffn_down.weight": (WIDTH, FFN)}
EXPERT_SCALES: Shapes = {f"ffn_{part}_exps.scale": (8,) for part in ("gate", "up", "down")}
LONG_ROPE: Shapes = {"rope_factors_long.weight": (HEAD_DIM // 2,), "rope_factors_short.weight": (HEAD_DIM // 2,)}


def glm4moe(layer: int) -> Shapes:
    mixed = experts(8, 24) | shared(24) | {"exp_probs_b.bias": (8,)}
    attention = biased(QKV) | OUT | HEAD_NORMS | {"attn_norm.weight": (WIDTH,), "post_attention_norm.weight": (WIDTH,)}
    return attention | (mixed if layer else GATED)


def gpt_oss(layer: int) -> Shapes:
    norms: Shapes = {"attn_norm.weight": (WIDTH,), "post_attention_norm.weight": (WIDTH,)}
    return norms | biased(QKV | OUT | experts(8, 24)) | {"attn_sinks.weight": (HEADS,)}


OLMO: Shapes = QKV | OUT | POST_NORMS | GATED | {"attn_q_norm.weight": (Q,), "attn_k_norm.weight": (KV,)}
YARN_KEYS = {key.replace(".", "__"): value for key, value in YARN.items()}
GRANITE = {"embedding_scale": 3.0, "residual_scale": 0.4, "attention__scale": 0.2, "logit_scale": 2.5}

FAMILIES: dict[str, Callable[[], Model]] = {
    "llama fused qkv": lambda: family("llama", 101, NORMS | biased(FUSED_QKV) | OUT | GATED),
    "llama experts": lambda: family(
        "llama", 102, NORMS | QKV | OUT | experts(8, FFN) | EXPERT_SCALES, expert_count=8, expert_used_count=2
    ),
    "qwen2moe": lambda: family(
        "qwen2moe", 103,
        NORMS | biased(QKV) | OUT | experts(8, 24) | shared(16) | {"ffn_gate_inp_shexp.weight": (WIDTH,)},
        expert_count=8, expert_used_count=3, expert_feed_forward_length=24, expert_shared_feed_forward_length=16,
    ),
    "qwen3moe": lambda: family(
        "qwen3moe", 104, NORMS | QKV | OUT | HEAD_NORMS | experts(6, 24),
        expert_count=6, expert_used_count=2, expert_feed_forward_length=24,
    ),
    "glm4moe": lambda: family(
        "glm4moe", 105, glm4moe, rope__dimension_count=4, leading_dense_block_count=1,
        expert_count=8, expert_used_count=3, expert_shared_count=1, expert_feed_forward_length=24,
        expert_gating_func=2, expert_weights_norm=True, expert_weights_scale=2.5,
    ),
    "gpt-oss": lambda: family(
        "gpt-oss", 106, gpt_oss, layers=3, attention__sliding_window=5,
        expert_count=8, expert_used_count=2, expert_feed_forward_length=24, **YARN_KEYS,
    ),
    "gemma": lambda: family("gemma", 107, NORMS | QKV | OUT | GATED, tied=True),
    "gemma2": lambda: family(
        "gemma2", 108, NORMS | QKV | OUT | POST_NORMS | GATED, layers=3, tied=True, attention__sliding_window=5,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: family(
        "gemma3", 109, NORMS | QKV | OUT | POST_NORMS | GATED | HEAD_NORMS, layers=7, tied=True,
        attention__sliding_window=5, rope__freq_base=1e5, rope__scaling__type="linear", rope__scaling__factor=8.0,
    ),
    "gemma3 pattern": lambda: family(
        "gemma3", 110, NORMS | QKV | OUT | POST_NORMS | GATED | HEAD_NORMS, layers=3, tied=True,
        attention__sliding_window=5, attention__sliding_window_pattern=[False, True, True], rope__freq_base_swa=777.0,
    ),
    "olmo2": lambda: family("olmo2", 111, OLMO),
    "olmo3": lambda: family("olmo2", 112, OLMO, layers=5, attention__sliding_window=5, **YARN_KEYS),
    "phi3": lambda: family("phi3", 113, NORMS | FUSED_QKV | OUT | FUSED, rope__dimension_count=4),
    "phi3 long": lambda: family(
        "phi3", 114, NORMS | FUSED_QKV | OUT | FUSED, top=LONG_ROPE,
        rope__scaling__original_context_length=16, rope__scaling__attn_factor=1.2,
    ),
    "phi3 short": lambda: family(
        "phi3", 114, NORMS | FUSED_QKV | OUT | FUSED, top=LONG_ROPE,
        rope__scaling__original_context_length=256, rope__scaling__attn_factor=1.2,  # the smallest context of llama.cpp
    ),
    "glm4": lambda: family("glm4", 115, NORMS | biased(QKV) | OUT | POST_NORMS | FUSED, rope__dimension_count=4),
    "granite": lambda: family("granite", 116, NORMS | QKV | OUT | GATED, **GRANITE),
    "granite without rope": lambda: family(
        "granite", 117, NORMS | QKV | OUT | GATED, logit_scale=1.0, rope__scaling__finetuned=False
    ),
    "granitemoe": lambda: family(
        "granitemoe", 118, NORMS | QKV | OUT | experts(8, FFN) | shared(16),
        expert_count=8, expert_used_count=3, expert_shared_feed_forward_length=16, **GRANITE,
    ),
    "stablelm": lambda: family(
        "stablelm", 119, biased(NORMS) | QKV | OUT | GATED, top={"output_norm.bias": (WIDTH,)}, rope__dimension_count=4
    ),
    "stablelm head norms": lambda: family(
        "stablelm", 120,
        biased(NORMS) | QKV | OUT | GATED
        | {"attn_q_norm.weight": (HEADS, HEAD_DIM), "attn_k_norm.weight": (KV_HEADS, HEAD_DIM)},
        top={"output_norm.bias": (WIDTH,)}, rope__dimension_count=4,
    ),
    "starcoder2": lambda: family(
        "starcoder2", 121,
        biased(NORMS | QKV | OUT | {"ffn_up.weight": (FFN, WIDTH), "ffn_down.weight": (WIDTH, FFN)}),
        top={"output_norm.bias": (WIDTH,)}, tied=True,
    ),
}  # fmt: skip
