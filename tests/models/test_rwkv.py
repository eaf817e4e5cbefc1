"""RWKV beyond the test models: tensor layouts of GGUFs, and RWKV-7 over several KV cache blocks against a short second
implementation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm.models import ModelError
from tests.models.kit import KIT, values
from tests.models.support import Driver, MemoryWeight, bind_reference, nmse, plan_of
from tests.models.tiny import Model


def logits(metadata: dict[str, Any], tensors: dict[str, MemoryWeight], tokens: list[int]) -> np.ndarray:
    driver = Driver(bind_reference(plan_of(metadata, tensors)))
    return np.concatenate([driver.step([(0, tokens[at : at + 50])]) for at in range(0, len(tokens), 50)])


def test_the_shares_of_the_shift_may_be_several_tensors() -> None:
    """GGUFs of 2024 have separate token-shift tensors for w, k, v, r and g."""
    metadata, tensors = KIT["rwkv6"].loaded()
    apart = dict(tensors)
    for layer in range(3):
        name = f"blk.{layer}.time_mix_lerp_"
        fused = apart.pop(name + "fused.weight").values().reshape(5, -1)
        apart |= {f"{name}{n}.weight": MemoryWeight.of(f"{name}{n}.weight", fused[i]) for i, n in enumerate("wkvrg")}
    tokens = KIT["rwkv6"].tokens
    np.testing.assert_array_equal(logits(metadata, apart, tokens), logits(metadata, tensors, tokens))


def test_rows_are_halved_after_every_other_layer() -> None:
    metadata, tensors = KIT["rwkv6"].loaded()
    tokens = KIT["rwkv6"].tokens
    never = logits(metadata | {"rwkv6.rescale_every_n_layers": 0}, tensors, tokens)
    assert nmse(never, logits(metadata, tensors, tokens)).max() > 1e-3


@pytest.mark.parametrize("head", [16, 32, 64])
@pytest.mark.parametrize("gated", [True, False])
def test_a_forward_in_a_few_lines(head: int, gated: bool) -> None:
    """The model is ARWKV with per-head norms and without a gate. llama.cpp reads out of bounds for heads of 32 with
    AVX-512.
    """
    metadata, tensors = variant(head, gated)
    tokens = [int(token) for token in np.random.RandomState(2).randint(0, 128, 150)]
    found, expected = logits(metadata, tensors, tokens), forward(tensors, tokens, head)
    assert nmse(found, expected).max() < 1e-9


def variant(head: int, gated: bool) -> Model:
    metadata, tensors = KIT["arwkv7"].loaded()
    for layer in range(3):
        name = f"blk.{layer}.time_mix_"
        for norm in ("ln.weight", "ln.bias"):
            tensors[name + norm] = MemoryWeight.of(name + norm, values(name + norm, (128,), "arwkv7"))
        if not gated:
            del tensors[name + "g1.weight"], tensors[name + "g2.weight"]
            lerps = tensors[name + "lerp_fused.weight"].values().reshape(6, 1, 1, 128)[:5]
            tensors[name + "lerp_fused.weight"] = MemoryWeight.of(name + "lerp_fused.weight", lerps)
    return metadata | {"arwkv7.wkv.head_size": head}, tensors


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight)


def forward(tensors: dict[str, MemoryWeight], tokens: list[int], head: int) -> np.ndarray:
    """Compute ARWKV in float64, all tokens of a layer at once, as arXiv:2503.14456 and arXiv:2501.15570 describe it."""
    x, first = tensors["token_embd.weight"].values().astype(np.float64)[tokens], None
    for layer in range(3):

        def w(name: str, layer: int = layer) -> np.ndarray:
            return tensors[f"blk.{layer}.{name}.weight"].values().astype(np.float64)

        normed = rms(x, w("attn_norm"))
        mixed, first = time_mix(normed, tensors, layer, head, first)
        x = x + mixed
        normed = rms(x, w("ffn_norm"))
        gate = normed @ w("ffn_gate").T
        x = x + (gate * sigmoid(gate) * (normed @ w("ffn_up").T)) @ w("ffn_down").T
    return np.asarray(rms(x, tensors["output_norm.weight"].values()) @ tensors["output.weight"].values().T)


def time_mix(
    x: np.ndarray, tensors: dict[str, MemoryWeight], layer: int, head: int, first: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    def w(name: str, what: str = "weight") -> np.ndarray:
        return tensors[f"blk.{layer}.time_mix_{name}.{what}"].values().astype(np.float64)

    def low_rank(name: str, rows: np.ndarray) -> np.ndarray:
        return np.asarray(
            w(name + "0") + (np.tanh if name == "w" else np.asarray)(rows @ w(name + "1").T) @ w(name + "2").T
        )

    shift = np.concatenate([np.zeros_like(x[:1]), x[:-1]]) - x
    r, decay, k, v, a, *g = (x + shift * lerp for lerp in w("lerp_fused").reshape(-1, x.shape[1]))
    rate, speed = sigmoid(low_rank("a", a)), sigmoid(low_rank("w", decay))
    share = None if first is None else sigmoid(low_rank("v", v))
    r, k, v = r @ w("receptance").T, k @ w("key").T, v @ w("value").T
    first = v if first is None else first
    v = v if share is None else v + (first - v) * share
    unit = (k * w("k_k")).reshape(len(x), -1, head)
    unit /= np.linalg.norm(unit, axis=2, keepdims=True)
    k = k * (1.0 + (rate - 1.0) * w("k_a"))
    r, k, v, rate, decay = (y.reshape(unit.shape) for y in (r, k, v, rate, np.exp(-np.exp(-0.5) * speed)))
    state, out = np.zeros((unit.shape[1], head, head)), np.empty_like(unit)  # (heads, values, keys)
    for t in range(len(x)):
        lost = np.einsum("hvk,hk->hv", state, unit[t])
        state = state * decay[t][:, None] - lost[:, :, None] * (unit[t] * rate[t])[:, None]
        state += v[t][:, :, None] * k[t][:, None]
        out[t] = np.einsum("hvk,hk->hv", state, r[t])
    centered = out - out.mean(axis=2, keepdims=True)
    normed = (centered / np.sqrt((centered**2).mean(axis=2, keepdims=True) + 64e-5)).reshape(x.shape)
    bonus = (r * k * w("r_k").reshape(unit.shape[1:])).sum(axis=2, keepdims=True) * v
    seen = normed * w("ln") + w("ln", "bias") + bonus.reshape(x.shape)
    if g:
        seen = seen * (sigmoid(g[0] @ w("g1").T) @ w("g2").T)
    return np.asarray(seen @ w("output").T), first


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("rwkv7", {"wkv.head_size": 48}, r"rwkv7\.wkv\.head_size: .* divides embedding_length 128, found 48"),
        ("rwkv7", {"wkv.head_size": 1}, r"rwkv7\.wkv\.head_size: expected an integer from 2"),
        ("rwkv7", {"token_shift_count": 1}, r"rwkv7\.token_shift_count: expected an integer from 2 to 2, found 1"),
        ("arwkv7", {"token_shift_count": 2}, r"arwkv7\.token_shift_count: expected an integer from 1 to 1, found 2"),
        ("rwkv6qwen2", {"attention.head_count_kv": 3}, r"rwkv6qwen2\.attention\.head_count_kv: 2 heads .* of 3"),
        ("rwkv6", {"rescale_every_n_layers": -1}, r"rwkv6\.rescale_every_n_layers: expected an integer from 0"),
    ],
)
def test_keys_that_no_model_has(name: str, changes: dict[str, Any], message: str) -> None:
    metadata, tensors = KIT[name].loaded()
    with pytest.raises(ModelError, match="^" + message):
        plan_of(metadata | {f"{name}.{key}": value for key, value in changes.items()}, tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("rwkv6", "time_mix_w1", r"time_mix_w1\.weight: expected a matrix of a multiple of 5 rows, found 0"),
        ("rwkv6", "time_mix_first", r"time_mix_first\.weight: this tensor is missing"),
        ("rwkv7", "time_mix_a1", r"time_mix_a1\.weight: this matrix is missing"),
        ("rwkv7", "time_mix_lerp_fused", r"time_mix_lerp_r\.weight: this tensor is missing"),
        ("rwkv7", "channel_mix_lerp_k", r"channel_mix_lerp_k\.weight: this tensor is missing"),
    ],
)
def test_tensors_that_are_missing(name: str, tensor: str, message: str) -> None:
    metadata, tensors = KIT[name].loaded()
    del tensors[f"blk.1.{tensor}.weight"]
    with pytest.raises(ModelError, match=r"^blk\.1\." + message):
        plan_of(metadata, tensors)
