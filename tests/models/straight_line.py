"""A second implementation of a dense transformer, written from the papers: straight-line float64 code over whole texts.

It shares no code with `models` or `backends`. Both implementations must agree.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# (weights, tensor prefix, normalized hidden states) -> output.
FeedForward = Callable[[dict[str, np.ndarray], str, np.ndarray], np.ndarray]


def forward(
    tensors: dict[str, np.ndarray],
    tokens: np.ndarray,
    *,
    layers: int,
    heads: int,
    kv_heads: list[int],
    head_dim: int,
    n_rot: int,
    neox: bool,
    eps: float = 1e-5,
    base: float = 10000.0,
    fed: FeedForward | None = None,
    states: list[np.ndarray] | None = None,
) -> np.ndarray:
    """Return float64 logits (T, vocabulary) of one sequence. `fed` computes a layer's feed-forward, by default gated
    SiLU. `states` receives the input of each layer.
    """
    w = {name: values.astype(np.float64) for name, values in tensors.items()}
    x = w["token_embd.weight"][tokens]
    for i in range(layers):
        if states is not None:
            states.append(x)
        h = rms(x, w[f"blk.{i}.attn_norm.weight"], eps)
        x = x + attended(w, i, h, heads, kv_heads[i], head_dim, n_rot, neox, eps, base)
        h = rms(x, w[f"blk.{i}.ffn_norm.weight"], eps)
        x = x + (fed or dense)(w, f"blk.{i}.ffn_", h)
    x = rms(x, w["output_norm.weight"], eps)
    return x @ w.get("output.weight", w["token_embd.weight"]).T + w.get("output.bias", 0.0)


def attended(
    w: dict[str, np.ndarray], i: int, h: np.ndarray, heads: int, kv_heads: int, head_dim: int, n_rot: int, neox: bool,
    eps: float, base: float,
) -> np.ndarray:  # fmt: skip
    """Return causal attention of layer i to normalized hidden states h, after the output projection."""
    n = len(h)
    q, k, v = (
        (h @ w[f"blk.{i}.attn_{m}.weight"].T + w.get(f"blk.{i}.attn_{m}.bias", 0.0)).reshape(n, -1, head_dim)
        for m in "qkv"
    )
    if f"blk.{i}.attn_q_norm.weight" in w:
        q = rms(q, w[f"blk.{i}.attn_q_norm.weight"], eps)
        k = rms(k, w[f"blk.{i}.attn_k_norm.weight"], eps)
    q, k = rope(q, n_rot, neox, base), rope(k, n_rot, neox, base)
    mixed = np.zeros((n, heads, head_dim))
    for head in range(heads):
        shared = head * kv_heads // heads
        scores = q[:, head] @ k[:, shared].T / head_dim**0.5
        scores[np.triu_indices(n, 1)] = -np.inf  # causal mask
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed[:, head] = (p / p.sum(axis=1, keepdims=True)) @ v[:, shared]
    return mixed.reshape(n, -1) @ w[f"blk.{i}.attn_output.weight"].T + w.get(f"blk.{i}.attn_output.bias", 0.0)


def dense(w: dict[str, np.ndarray], name: str, h: np.ndarray) -> np.ndarray:
    gate = h @ w[f"{name}gate.weight"].T + w.get(f"{name}gate.bias", 0.0)
    up = h @ w[f"{name}up.weight"].T + w.get(f"{name}up.bias", 0.0)
    hidden = gate / (1.0 + np.exp(-gate)) * up
    return hidden @ w[f"{name}down.weight"].T + w.get(f"{name}down.bias", 0.0)


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def rope(x: np.ndarray, n_rot: int, neox: bool, base: float) -> np.ndarray:
    """Rotate pairs of dimensions as complex numbers: multiply by exp(i * position * base ** (-2 * pair / n_rot))."""
    half = n_rot // 2
    turn = np.exp(1j * np.outer(np.arange(len(x)), base ** (-2.0 * np.arange(half) / n_rot)))[:, None, :]
    a, b = (x[..., :half], x[..., half:n_rot]) if neox else (x[..., 0:n_rot:2], x[..., 1:n_rot:2])
    turned = (a + 1j * b) * turn
    y = x.copy()
    if neox:
        y[..., :half], y[..., half:n_rot] = turned.real, turned.imag
    else:
        y[..., 0:n_rot:2], y[..., 1:n_rot:2] = turned.real, turned.imag
    return y
