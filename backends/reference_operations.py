"""Reference implementations of a plan's operations in plain NumPy. All backends must match them.

Weights and values are float32. Every operation computes in float64 and rounds its result once. No sum spans batch rows
(each row has its own matrix-vector product), so a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Routing
from localllm.backends.reference_attention import append, attention, indexer_top_k
from localllm.backends.reference_media import embed_media, splice
from localllm.backends.reference_ngrams import embed_ngrams
from localllm.backends.reference_recurrence import convolve, linear_attention, pool, selective_scan, wkv
from localllm.backends.reference_state import ReferenceState
from localllm.backends.reference_streams import blend, gaussian_top_k, hyper_connection, match, mix, mul
from localllm.plan import (
    Activate,
    Add,
    Append,
    Attention,
    Blend,
    Clamp,
    Concat,
    Convolve,
    Embed,
    EmbedMedia,
    EmbedNgrams,
    Experts,
    GaussianTopK,
    Glu,
    HeadLinear,
    HyperConnection,
    IndexerTopK,
    Linear,
    LinearAttention,
    Match,
    Mix,
    Mul,
    Norm,
    Pool,
    Receive,
    Rotate,
    Scale,
    SelectiveScan,
    SelectRows,
    Send,
    Slice,
    Softcap,
    Splice,
    Stack,
    Wkv,
    Xielu,
    rope_table,
)

F64 = NDArray[np.float64]
_ERF = np.vectorize(math.erf, otypes=[np.float64])


def _embed(state: ReferenceState, op: Embed) -> None:
    table = state.weights[op.table.name]
    tokens = np.maximum(state.batch.tokens, 0)
    rows = np.minimum(state.batch.positions, len(table) - 1) if op.positions else tokens
    state.write(op.out, table[rows])


def _norm(state: ReferenceState, op: Norm) -> None:
    x = state.read(op.x)
    x = x.reshape(len(x), op.groups, -1)  # (rows, groups, width of a group)
    if op.kind == "layer":
        x = x - x.mean(axis=2, keepdims=True)
    scale = 1.0 if op.kind == "none" else 1.0 / np.sqrt((x * x).mean(axis=2, keepdims=True) + op.eps)
    y = x * scale * state.weight(op.weight)
    if op.bias is not None:
        y = y + state.weight(op.bias)
    state.write(op.out, y.reshape(len(x), -1))


def _linear(state: ReferenceState, op: Linear) -> None:
    x, weight = state.read(op.x), state.weight(op.weight)
    y = np.empty((len(x), len(weight)))
    for row in range(len(x)):
        y[row] = weight @ x[row]  # one product per row: the summation order must not depend on the batch
    y *= op.scale
    if op.bias is not None:
        y += state.weight(op.bias)
    state.write(op.out, y)


def _head_linear(state: ReferenceState, op: HeadLinear) -> None:
    weight = state.weight(op.weight)
    x = state.read(op.x).reshape(-1, len(weight), weight.shape[2])  # (rows, heads, columns)
    y = np.empty((len(x), op.out.width))
    for row in range(len(x)):  # one product per row, as in `_linear`
        y[row] = np.concatenate([matrix @ own for matrix, own in zip(weight, x[row], strict=True)])
    state.write(op.out, y)


def _rotate(state: ReferenceState, op: Rotate) -> None:
    x = state.read(op.x)
    heads = x.reshape(len(x), -1, op.head_dim)
    batch = state.rows(op.x)
    positions = batch.positions
    if op.rope.axes and batch.axes is not None:
        positions = batch.axes[:, op.rope.axes]  # (T, n_rot/2)
    cos, sin = (table[:, None, :] for table in rope_table(op.rope, positions))  # (T, 1, n_rot/2)
    n = op.rope.n_rot
    first, second = (
        (slice(0, n, 2), slice(1, n, 2)) if op.rope.style == "interleaved" else (slice(n // 2), slice(n // 2, n))
    )
    out = heads.copy()
    out[:, :, first] = heads[:, :, first] * cos - heads[:, :, second] * sin
    out[:, :, second] = heads[:, :, first] * sin + heads[:, :, second] * cos
    state.write(op.out, out.reshape(x.shape))


def _silu(x: F64) -> F64:
    return x * _sigmoid(x)


def _gelu(x: F64) -> F64:
    """Return GELU in its tanh form, which ggml uses and with which GELU models are trained."""
    return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * x * (1.0 + 0.044715 * x * x))))


def _gelu_erf(x: F64) -> F64:
    return np.asarray(0.5 * x * (1.0 + _ERF(x / math.sqrt(2.0))))


def _gelu_quick(x: F64) -> F64:
    return x * _sigmoid(1.702 * x)


def _sigmoid(x: F64) -> F64:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def _swiglu_oai(gate: F64, up: F64) -> F64:
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return gate * _sigmoid(1.702 * gate) * (up + 1.0)


def _relu(x: F64) -> F64:
    return np.maximum(x, 0.0)


def _softplus(x: F64) -> F64:
    return np.logaddexp(0.0, x)


_ACTIVATIONS: dict[str, Callable[[F64], F64]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_erf": _gelu_erf,
    "gelu_quick": _gelu_quick,
    "sigmoid": _sigmoid,
    "relu": _relu,
    "relu2": lambda x: _relu(x) ** 2,
    "softplus": _softplus,
    "exp": np.exp,
    "signed_root": lambda x: np.sign(x) * np.sqrt(np.maximum(np.abs(x), 1e-6)),
}
_GLU: dict[str, Callable[[F64, F64, float], F64]] = {
    "silu": lambda gate, up, limit: _silu(gate) * up,
    "gelu": lambda gate, up, limit: _gelu(gate) * up,
    "gelu_erf": lambda gate, up, limit: _gelu_erf(gate) * up,
    "gelu_quick": lambda gate, up, limit: _gelu_quick(gate) * up,
    "sigmoid": lambda gate, up, limit: _sigmoid(gate) * up,
    "relu": lambda gate, up, limit: _relu(gate) * up,
    "relu2": lambda gate, up, limit: _relu(gate) ** 2 * up,
    "softplus": lambda gate, up, limit: _softplus(gate) * up,
    "identity": lambda gate, up, limit: gate * up,
    "gelu_alone": lambda gate, up, limit: _gelu(gate),
    "swiglu_oai": lambda gate, up, limit: _swiglu_oai(gate, up),
    "swiglu_clamp": lambda gate, up, limit: _silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit),
    "situ": lambda gate, up, limit: limit**2 * np.tanh(gate / limit) * _sigmoid(gate) * np.tanh(up / limit),
    "silu_clamp": lambda gate, up, limit: np.minimum(_silu(gate), limit) * np.clip(up, -limit, limit),
}


def _glu(state: ReferenceState, op: Glu) -> None:
    gate, up = state.read(op.gate), state.read(op.up)
    slices = up.reshape(len(up), gate.shape[1], -1)
    y = _GLU[op.activation](gate[:, :, None], slices, op.limit)
    state.write(op.out, y.reshape(up.shape))


def _activate(state: ReferenceState, op: Activate) -> None:
    state.write(op.out, _ACTIVATIONS[op.activation](state.read(op.x)))


def _xielu(state: ReferenceState, op: Xielu) -> None:
    x = state.read(op.x)
    above = op.positive * x * x
    below = op.negative * (np.expm1(np.minimum(x, op.eps)) - x)
    state.write(op.out, np.where(x > 0.0, above, below) + op.beta * x)


def _clamp(state: ReferenceState, op: Clamp) -> None:
    state.write(op.out, np.clip(state.read(op.x), op.low, op.high))


def _softcap(state: ReferenceState, op: Softcap) -> None:
    state.write(op.out, op.cap * np.tanh(state.read(op.x) / op.cap))


def _experts(state: ReferenceState, op: Experts) -> None:
    x, router = state.read(op.x), state.read(op.router)
    given = None if op.choices is None else state.values[op.choices.index].astype(np.intp)
    out = np.zeros((len(x), op.out.width))
    choices = np.empty((len(x), op.used), np.int32)
    hidden = np.empty((len(x), op.used, op.down.weight.shape[2]), np.float32)
    for row in range(len(x)):
        own = None if given is None else given[row]
        choices[row], weights = _choose(state, op, router[row], own)
        for i, (expert, weight) in enumerate(zip(choices[row], weights, strict=True)):
            gate, up = _expert(state, op.gate, expert, x[row]), _expert(state, op.up, expert, x[row])
            if op.weighted_input:
                gate, up, weight = weight * gate, weight * up, 1.0
            inner = _GLU[op.activation](gate, up, op.limit)
            hidden[row, i] = inner
            out[row] += weight * _expert(state, op.down, expert, inner)
    state.routings[op.out.index] = Routing(choices, hidden)
    state.write(op.out, out)


def _choose(
    state: ReferenceState, op: Experts, logits: F64, given: NDArray[np.intp] | None
) -> tuple[NDArray[np.intp], F64]:  # fmt: skip
    """Return the selected experts (used,), best first, with their weights (used,)."""
    scores = logits
    if op.gating == "softmax":
        scores = _softmax(logits)
    elif op.gating == "sigmoid":
        scores = _sigmoid(logits)
    elif op.gating == "sqrt_softplus":
        scores = np.sqrt(_softplus(logits))
    ranked = scores if op.choice_bias is None else scores + state.weight(op.choice_bias)
    if op.groups > 1:
        ranked = _within_groups(ranked, op)
    chosen = np.argsort(-ranked, kind="stable")[: op.used] if given is None else given
    weights = scores[chosen]
    if op.gating == "softmax_of_chosen":
        weights = _softmax(weights)
    elif op.gating == "sigmoid_of_chosen":
        weights = _sigmoid(weights)
    elif op.gating == "sparse_mixer":
        weights = _sparse_mixer(scores, ranked, chosen)
    if op.normalize:
        weights = weights / max(weights.sum(), 2.0**-14)
    return chosen, weights * op.scale


def _sparse_mixer(scores: F64, ranked: F64, chosen: NDArray[np.intp]) -> F64:
    """Return the weight of every selected expert: its softmax over those remaining experts whose logits are close."""
    left, weights = ranked > -np.inf, np.empty(len(chosen))
    for i, expert in enumerate(chosen):
        best = scores[expert]
        close = best - scores <= 0.02 * np.maximum(np.abs(scores), best)
        left[expert] = False
        weights[i] = 1.0 / (np.exp(best - best) + np.exp(scores[left & close] - best).sum())
    return weights


def _within_groups(ranked: F64, op: Experts) -> F64:
    """Return the scores (experts,), set to -infinity outside the best groups."""
    groups = ranked.reshape(op.groups, -1)
    best = np.sort(groups, axis=1)[:, -1:] if op.gating == "softmax" else np.sort(groups, axis=1)[:, -2:]
    kept = np.argsort(-best.sum(axis=1), kind="stable")[: op.groups_used]
    found = np.full_like(groups, -np.inf)
    found[kept] = groups[kept]
    return found.reshape(-1)


def _softmax(x: F64) -> F64:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def _expert(state: ReferenceState, stack: Stack, expert: int, x: F64) -> F64:
    y: F64 = state.weights[stack.weight.name][expert].astype(np.float64) @ x
    if stack.scale is not None:
        y *= state.weight(stack.scale)[expert]
    if stack.bias is not None:
        y += state.weight(stack.bias)[expert]
    return y


def _add(state: ReferenceState, op: Add) -> None:
    state.write(op.out, state.read(op.a) + state.read(op.b))


def _scale(state: ReferenceState, op: Scale) -> None:
    state.write(op.out, state.read(op.x) * op.factor)


def _columns(state: ReferenceState, op: Slice) -> None:
    x = state.values[op.x.index]
    state.write(op.out, x.reshape(len(x), op.groups, -1)[:, :, op.start : op.stop].reshape(len(x), -1))


def _join(state: ReferenceState, op: Concat) -> None:
    a, b = (state.values[value.index] for value in (op.a, op.b))
    slices = [x.reshape(len(x), op.groups, -1) for x in (a, b)]
    state.write(op.out, np.concatenate(slices, axis=2).reshape(len(a), -1))


def _select_rows(state: ReferenceState, op: SelectRows) -> None:
    state.write(op.out, state.values[op.x.index][state.batch.logit_rows])


def _receive(state: ReferenceState, op: Receive) -> None:
    for value, rows in zip(op.values, state.crossing, strict=True):
        state.write(value, rows)
    state.crossing.clear()


def _send(state: ReferenceState, op: Send) -> None:
    state.crossing[:] = [state.values[value.index] for value in op.values]


OPERATIONS: dict[type[Any], Callable[[ReferenceState, Any], None]] = {
    Embed: _embed,
    EmbedMedia: embed_media,
    EmbedNgrams: embed_ngrams,
    Norm: _norm,
    Linear: _linear,
    HeadLinear: _head_linear,
    Rotate: _rotate,
    Append: append,
    IndexerTopK: indexer_top_k,
    Attention: attention,
    Convolve: convolve,
    LinearAttention: linear_attention,
    SelectiveScan: selective_scan,
    Wkv: wkv,
    Pool: pool,
    Glu: _glu,
    Experts: _experts,
    Activate: _activate,
    Xielu: _xielu,
    Clamp: _clamp,
    Softcap: _softcap,
    Splice: splice,
    Add: _add,
    Scale: _scale,
    Slice: _columns,
    Mul: mul,
    Mix: mix,
    Blend: blend,
    HyperConnection: hyper_connection,
    Match: match,
    GaussianTopK: gaussian_top_k,
    Concat: _join,
    SelectRows: _select_rows,
    Receive: _receive,
    Send: _send,
}
