"""QFormers: queries of a window that attend to each other, then to the window's rows of an encoder."""

from __future__ import annotations

from localllm.models.encoders.network import Network
from localllm.models.errors import ModelError
from localllm.plan import F32, Activation, Value
from localllm.plan.runs import Encoding, Layout, Run

EPS = 1e-12


def attended_to_each_other(network: Network, x: Value, name: str, heads: int) -> Value:
    """Return the queries after the attention to each other."""
    _check(x.width, heads, name)
    q, k, v = (network.linear(x, f"{name}self_attn_{of}", x.width) for of in "qkv")
    layer = network.recorder.append(k, v, heads)
    y = network.recorder.attention(q, layer, heads, (x.width // heads) ** -0.5, causal=False)
    y = network.linear(y, name + "self_attn_out", x.width)
    return network.norm(network.recorder.add(y, x), name + "self_attn_norm", "layer", EPS)


def stored(network: Network, x: Value, name: str, width: int, heads: int) -> int:
    """Store keys and values of a window's rows, and return the cache layer. The next stage has the queries."""
    _check(width, heads, name)
    k, v = (network.linear(x, f"{name}cross_attn_{of}", width) for of in "kv")
    return network.recorder.append(k, v, heads)


def attended_to_rows(network: Network, x: Value, name: str, layer: int, heads: int, activation: Activation) -> Value:
    """Return the queries after the attention to the stored rows and the feed-forward."""
    recorder, q = network.recorder, network.linear(x, name + "cross_attn_q", x.width)
    y = recorder.attention(q, layer, heads, (x.width // heads) ** -0.5, causal=False)
    y = recorder.add(network.linear(y, name + "cross_attn_out", x.width), x)
    y = network.norm(y, name + "cross_attn_norm", "layer", EPS)
    z = recorder.add(network.mlp(y, name + "ffn_up", name + "ffn_down", activation), y)
    return network.norm(z, name + "ffn_norm", "layer", EPS)


def _check(width: int, heads: int, name: str) -> None:
    if width % heads or width // heads % 2:
        raise ModelError(f"{name}self_attn_q.weight: {heads} heads do not divide {width} values into even parts")


def cross_runs(part: str, rows: tuple[F32, ...], queries: tuple[F32, ...], windows: int = 1) -> Encoding:
    """Yield the run of a part whose first stage stores rows, and whose second stage has the queries of each window."""
    each, count = (len(inputs[0]) // windows for inputs in (rows, queries))
    layouts = Layout((each,) * windows, border=each), Layout((count,) * windows, border=each)
    (y,) = yield Run(part, rows, layouts, queries)
    return y
