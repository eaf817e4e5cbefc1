"""Tiny random models, equal on every machine. Each has one feature that a GGUF can require of the forward pass.

`data/tiny_llama_cpp.npz` holds llama.cpp's logits for them (written by `make_tiny_logits.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.models.support import MemoryWeight

Model = tuple[dict[str, Any], dict[str, MemoryWeight]]

WIDTH, FFN, VOCABULARY, CONTEXT = 32, 40, 29, 64
PROMPT = 16  # tokens evaluated in one batch; the others follow one by one
TOKENS = np.random.RandomState(7).randint(0, VOCABULARY, 24)


def make(
    architecture: str,
    *,
    seed: int,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    n_rot: int | None = None,
    keys: dict[str, Any] | None = None,
    extra: Callable[[np.random.RandomState], dict[str, np.ndarray]] | None = None,
    per_layer: tuple[str, ...] = (),
    tied: bool = False,
    format: str = "F32",
) -> Model:
    """Return a model with small random matrices. `per_layer` names optional tensors (attn_q.bias, ffn_up.scale,
    ...).
    """
    random = np.random.RandomState(seed)  # frozen by NumPy's policy, unlike default_rng
    q, kv = heads * head_dim, kv_heads * head_dim
    shapes = {
        "attn_q": (q, WIDTH),
        "attn_k": (kv, WIDTH),
        "attn_v": (kv, WIDTH),
        "attn_output": (WIDTH, q),
        "ffn_gate": (FFN, WIDTH),
        "ffn_up": (FFN, WIDTH),
        "ffn_down": (WIDTH, FFN),
    }
    gain = {"attn_q": 2.0, "attn_k": 2.0}  # attention to few positions
    values: dict[str, np.ndarray] = {"token_embd.weight": random.standard_normal((VOCABULARY, WIDTH))}
    for layer in range(layers):
        name = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            values[f"{name}{norm}.weight"] = 1.0 + 0.2 * random.standard_normal(WIDTH)
        for part, (rows, columns) in shapes.items():
            scale = gain.get(part, 1.0) / np.sqrt(columns)
            values[f"{name}{part}.weight"] = random.standard_normal((rows, columns)) * scale
        for optional in per_layer:
            part, kind = optional.split(".")
            if kind == "bias":
                values[name + optional] = 0.3 * random.standard_normal(shapes[part][0])
            elif kind == "scale":
                values[name + optional] = 0.6 + random.random_sample(1)
            else:
                values[name + optional] = 1.0 + 0.3 * random.standard_normal(head_dim)
    values["output_norm.weight"] = 1.0 + 0.2 * random.standard_normal(WIDTH)
    if not tied:
        values["output.weight"] = random.standard_normal((VOCABULARY, WIDTH)) / np.sqrt(WIDTH)
    values |= extra(random) if extra else {}
    metadata = {
        "general.architecture": architecture,
        "block_count": layers,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "vocab_size": VOCABULARY,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": n_rot or head_dim,
        **(keys or {}),
    }
    metadata = {k if k.startswith("general.") else f"{architecture}.{k}": v for k, v in metadata.items()}
    return metadata, {n: MemoryWeight.of(n, v, format if v.ndim == 2 else "F32") for n, v in values.items()}


QKV_BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
FFN_BIAS = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
SCALES = tuple(b.replace("bias", "scale") for b in (*QKV_BIAS, "attn_output.bias", *FFN_BIAS))
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}

VARIANTS: dict[str, Callable[[], Model]] = {
    "llama plain": lambda: make("llama", seed=1),
    "llama tied, biased": lambda: make(
        "llama", seed=2, tied=True, per_layer=(*QKV_BIAS, "attn_output.bias", *FFN_BIAS)
    ),
    "llama scales after biases": lambda: make("llama", seed=3, per_layer=(*QKV_BIAS, *FFN_BIAS, *SCALES)),
    "llama frequency factors": lambda: make(
        "llama", seed=4, extra=lambda r: {"rope_freqs.weight": 1.0 + 7.0 * r.random_sample(4)}
    ),
    "llama linear": lambda: make("llama", seed=5, keys={"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}),
    "llama factor of no scaling": lambda: make(
        "llama", seed=5, keys={"rope.scaling.type": "none", "rope.scaling.factor": 2.5}
    ),
    "llama yarn": lambda: make(
        "llama", seed=6, head_dim=16, heads=2, keys={**YARN, "rope.freq_base": 500.0, "rope.scaling.attn_factor": 1.3}
    ),
    "mistral3 temperature": lambda: make(
        "mistral3",
        seed=7,
        keys={
            **YARN,
            "rope.scaling.original_context_length": 5,
            "rope.scaling.yarn_log_multiplier": 0.7,
            "rope.scaling.yarn_beta_fast": 0.5,
            "rope.scaling.yarn_beta_slow": 0.1,
            "attention.temperature_scale": 0.4,
        },
    ),
    "qwen2": lambda: make(
        "qwen2",
        seed=8,
        per_layer=(*QKV_BIAS, *SCALES),
        extra=lambda r: {"output.bias": r.standard_normal(VOCABULARY)},
    ),
    "qwen3": lambda: make(
        "qwen3", seed=9, head_dim=16, kv_heads=1, per_layer=("attn_q_norm.weight", "attn_k_norm.weight")
    ),
    "smollm3": lambda: make("smollm3", seed=10, layers=8, tied=True),
}
