"""Reference implementations of operations on slices and streams of hidden states in plain NumPy.

All backends must match them.
"""

from __future__ import annotations

import numpy as np

from localllm.backends.reference_state import ReferenceState
from localllm.plan import Blend, GaussianTopK, HyperConnection, Match, Mix, Mul, Value


def mul(state: ReferenceState, op: Mul) -> None:
    state.write(op.out, state.read(op.x) * state.weight(op.weight))


def mix(state: ReferenceState, op: Mix) -> None:
    x = state.read(op.x)
    slices = x.reshape(len(x), op.slices, -1)  # (rows, slices, slice width)
    own = op.coefficients
    coefficients = state.read(own) if isinstance(own, Value) else np.tile(state.weight(own), (len(x), 1))
    coefficients = coefficients.reshape(len(x), -1, op.slices)
    y = np.zeros((len(x), op.out.width)) if op.base is None else state.read(op.base)
    terms = coefficients[:, :, :, None] * slices[:, None]  # (rows, slices of out, slices, slice width)
    state.write(op.out, y + terms.sum(axis=2).reshape(y.shape))


def blend(state: ReferenceState, op: Blend) -> None:
    last = state.read(op.last)
    slices = np.concatenate([state.read(op.x), last], axis=1).reshape(len(last), -1, op.last.width)
    size = np.sqrt((slices**2).mean(axis=2) + op.eps)
    scores = (slices * state.weight(op.weight)).sum(axis=2) / size  # (T, slices)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    state.write(op.out, np.einsum("tn,tnd->td", weights, slices))


def hyper_connection(state: ReferenceState, op: HyperConnection) -> None:
    n, z = op.streams, state.read(op.x)
    widths = (n, n, n * n)[: op.parts]
    z = z * np.repeat(state.weight(op.scale), widths) + state.weight(op.bias)
    found = [1.0 / (1.0 + np.exp(-z[:, :n])) + op.eps]
    if op.parts > 1:
        found.append(op.magnitude / (1.0 + np.exp(-z[:, n : 2 * n])) + op.written_eps)
    if op.parts > 2:
        mixing = z[:, 2 * n :].reshape(-1, n, n)  # (rows, source stream, target stream)
        mixing = np.exp(mixing - mixing.max(axis=2, keepdims=True))
        mixing = mixing / mixing.sum(axis=2, keepdims=True) + op.eps
        for number in range(op.iterations):
            if number:
                mixing = mixing / (mixing.sum(axis=2, keepdims=True) + op.eps)
            mixing = mixing / (mixing.sum(axis=1, keepdims=True) + op.eps)
        found.append(mixing.transpose(0, 2, 1).reshape(len(z), -1))
    state.write(op.out, np.concatenate(found, axis=1))


def match(state: ReferenceState, op: Match) -> None:
    x, like = state.read(op.x), state.read(op.like)
    slices = x.reshape(len(x), op.groups, -1)
    own = np.maximum((slices * slices).mean(axis=2, keepdims=True), op.eps)
    wanted = (like * like).mean(axis=1)[:, None, None]
    state.write(op.out, (slices * np.sqrt(wanted / own)).reshape(x.shape))


def gaussian_top_k(state: ReferenceState, op: GaussianTopK) -> None:
    x = state.read(op.x)
    cutoff = x.mean(axis=1, keepdims=True) + op.deviations * x.std(axis=1, keepdims=True, ddof=1)
    state.write(op.out, np.maximum(x - cutoff, 0.0))
