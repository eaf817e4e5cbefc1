"""Float64 reference implementations of NeoBERT, PLaMo 1 and Talkie, over checkpoint tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Tensors = Mapping[str, F64]
FLOAT32_EPS = 2.0**-23


def rms(x: F64, eps: float) -> F64:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)


def silu(x: F64) -> F64:
    return x / (1.0 + np.exp(-x))


def turns(count: int, width: int, base: float) -> F64:
    """Return the RoPE angles (T, 1, width / 2) of positions 0 to T - 1."""
    frequencies = base ** (-np.arange(0, width, 2) / width)
    return (np.arange(count)[:, None] * frequencies)[:, None]


def rotated_halves(x: F64, angles: F64) -> F64:
    """Apply RoPE to (T, H, D), pairing dimension i with i + D / 2."""
    one, other = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)


def rotated_neighbours(x: F64, angles: F64) -> F64:
    """Apply RoPE to (T, H, D), pairing adjacent dimensions as complex numbers."""
    numbers = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([numbers.real, numbers.imag], axis=-1).reshape(x.shape)


def attended(q: F64, k: F64, v: F64, causal: bool) -> F64:
    """Return the attention output (T, H D) of queries, keys and values (T, H, D)."""
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)


def neo_bert(w: Tensors, ids: Sequence[int], layers: int, heads: int, eps: float) -> F64:
    """Return NeoBERT's last hidden states.

    The fused projection interleaves queries, keys and values per head: (T, heads, 3 D).
    """
    x = w["model.encoder.weight"][list(ids)]
    angles = turns(len(ids), x.shape[1] // heads, 10000.0)
    for n in range(layers):
        of = {name.split(f"encoder.{n}.")[1]: x for name, x in w.items() if f"transformer_encoder.{n}." in name}
        normed = rms(x, eps) * of["attention_norm.weight"]
        q, k, v = np.split((normed @ of["qkv.weight"].T).reshape(len(ids), heads, -1), 3, axis=-1)
        seen = attended(rotated_neighbours(q, angles), rotated_neighbours(k, angles), v, causal=False)
        x = x + seen @ of["wo.weight"].T
        gate, up = np.split((rms(x, eps) * of["ffn_norm.weight"]) @ of["ffn.w12.weight"].T, 2, axis=-1)
        x = x + (silu(gate) * up) @ of["ffn.w3.weight"].T
    return rms(x, eps) * w["model.layer_norm.weight"]


def plamo(w: Tensors, ids: Sequence[int], layers: int, heads: int, shared: int, eps: float) -> F64:
    """Return PLaMo's logits. The KV heads are tiled, not interleaved, to one per query head."""
    x = w["model.embed_tokens.weight"][list(ids)]
    angles = turns(len(ids), x.shape[1] // heads, 10000.0)
    for n in range(layers):
        of = {name.removeprefix(f"model.layers.layers.{n}."): x for name, x in w.items()}
        normed = rms(x, eps) * of["norm.weight"]
        q = (normed @ of["self_attn.q_proj.weight"].T).reshape(len(ids), heads, -1)
        k, v = ((normed @ of[f"self_attn.{y}_proj.weight"].T).reshape(len(ids), -1, q.shape[-1]) for y in "kv")
        k, v = np.tile(rotated_halves(k, angles), (1, shared, 1)), np.tile(v, (1, shared, 1))
        seen = attended(rotated_halves(q, angles), k, v, causal=True) @ of["self_attn.o_proj.weight"].T
        inner = silu(normed @ of["mlp.gate_proj.weight"].T) * (normed @ of["mlp.up_proj.weight"].T)
        x = x + seen + inner @ of["mlp.down_proj.weight"].T
    return (rms(x, eps) * w["model.norm.weight"]) @ w["lm_head.weight"].T


def talkie(w: Tensors, ids: Sequence[int], layers: int, heads: int) -> F64:
    """Return Talkie's logits.

    RoPE rotates in the opposite direction, norms have no weights, and each query head has a gain.
    """
    start = x = rms(w["model.embed.weight"][list(ids)], FLOAT32_EPS)
    angles = -turns(len(ids), x.shape[1] // heads, 1e6)
    for n in range(layers):
        of = {name.removeprefix(f"model.blocks.{n}."): x for name, x in w.items()}
        normed = rms(x, FLOAT32_EPS)
        q, k, v = (
            (normed @ of[f"attn.attn_{y}.weight"].T).reshape(len(ids), heads, -1) for y in ("query", "key", "value")
        )
        q, k = (rms(rotated_halves(y, angles), FLOAT32_EPS) for y in (q, k))
        seen = attended(q * of["attn.head_gain.head_g"][:, None], k, v, causal=True)
        x = x + of["attn_gain.a_g"] * (seen @ of["attn.attn_resid.weight"].T)
        normed = rms(x, FLOAT32_EPS)
        inner = silu(normed @ of["mlp.mlp_gate.weight"].T) * (normed @ of["mlp.mlp_linear.weight"].T)
        x = x + of["mlp_gain.a_g"] * (inner @ of["mlp.mlp_resid.weight"].T) + of["embed_skip.a_g"] * start
    return rms(x, FLOAT32_EPS) @ (w["lm_head"] * w["lm_head_gain.w_g"]).T
