"""The reference backend: every operation of a plan said plainly in NumPy. It defines what the others must compute.

Weights and values are float32; every operation computes in float64 and rounds its result once. Sums never span batch
rows (one matrix-vector product per row), so the result of a row does not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import quant
from backends.base import BackendError, Limits, Memory, Progress
from backends.checks import check_batch, check_limits, within
from backends.plan import (
    BLOCK,
    F32,
    Add,
    Append,
    Attention,
    Batch,
    Embed,
    Glu,
    Linear,
    Norm,
    Operation,
    Plan,
    Rotate,
    Scale,
    SelectRows,
    Value,
    Weight,
    rope_table,
)

F64 = NDArray[np.float64]

CACHE_TYPES: dict[str, type[np.floating[Any]]] = {"f16": np.float16, "f32": np.float32}


class ReferenceBackend:
    """NumPy on the CPU: slow, and the oracle of the test suite."""

    name = "reference"

    def describe(self) -> str:
        return f"reference: NumPy {np.__version__}, float64 arithmetic, one operation at a time"

    def bind(
        self, plan: Plan, limits: Limits, cache_type: str = "f16", progress: Progress | None = None
    ) -> ReferenceExecutable:
        """Dequantizes every weight and allocates the cache; BackendError for what cannot be bound."""
        try:
            return ReferenceExecutable(plan, limits, cache_type, progress or (lambda what, done, total: None))
        except MemoryError:
            raise BackendError(
                "not enough memory: the reference backend keeps every weight as float32; use the cpu backend, or a "
                "smaller model or context (-c)"
            ) from None

    def close(self) -> None: ...


class ReferenceExecutable:
    """A plan with its weights (float32) and its paged cache: per layer, keys and values (slots, kv_heads, head_dim)."""

    def __init__(self, plan: Plan, limits: Limits, cache_type: str, progress: Progress) -> None:
        check_limits(limits)
        if cache_type not in CACHE_TYPES:
            raise BackendError(f"cache type {cache_type!r} is not supported; supported: {', '.join(CACHE_TYPES)}")
        dtype = CACHE_TYPES[cache_type]
        shapes = [(limits.blocks * BLOCK, layer.kv_heads, layer.head_dim) for layer in plan.layers]
        self.limits = limits
        self._plan = plan
        self._weights = _dequantize(plan, progress)
        self._keys = [np.zeros(shape, dtype) for shape in shapes]
        self._values = [np.zeros(shape, dtype) for shape in shapes]
        self.memory = self._memory()

    def step(self, batch: Batch) -> F32:
        """Logits float32 (L, vocabulary) of the batch."""
        if not self._weights:
            raise BackendError("this executable is closed; bind the plan again")
        check_batch(batch, self.limits, self._weights[_embedding(self._plan).name].shape[0])
        state = _State(batch, {}, self._weights, self._keys, self._values)
        with np.errstate(over="ignore", invalid="ignore"):  # a bad weight gives infinity or NaN, as on every backend
            for operation in self._plan.operations:
                _OPERATIONS[type(operation)](state, operation)
        return state.values[self._plan.logits.index]

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        """Cache blocks source[i] -> target[i] in every layer."""
        source, target = np.asarray(source), np.asarray(target)
        for name, blocks in (("source", source), ("target", target)):
            if blocks.shape != source.shape or blocks.ndim != 1 or not within(blocks, self.limits.blocks):
                raise BackendError(f"copy_blocks: {name} must list block numbers below {self.limits.blocks}")
        offsets = np.arange(BLOCK)
        read = (source[:, None] * BLOCK + offsets).ravel()
        write = (target[:, None] * BLOCK + offsets).ravel()
        for layer in (*self._keys, *self._values):
            layer[write] = layer[read]

    def read_bandwidth(self) -> float:
        """Bytes a second of one NumPy pass over the weights."""
        start = perf_counter()
        for weight in self._weights.values():
            weight.max()
        return sum(w.nbytes for w in self._weights.values()) / max(perf_counter() - start, 1e-9)

    def close(self) -> None:
        self._weights = {}
        self._keys, self._values = [], []

    def _memory(self) -> Memory:
        table = _embedding(self._plan)
        read = {w.name for op in self._plan.operations if not isinstance(op, Embed) for w in _weights_of(op)}
        per_token = sum(self._weights[name].nbytes for name in read) + 4 * table.shape[1]
        cache = sum(layer.nbytes for layer in (*self._keys, *self._values))
        rows = {"batch": self.limits.rows, "logits": self.limits.logit_rows}
        return Memory(
            weights=sum(w.nbytes for w in self._weights.values()),
            cache=cache,
            scratch=sum(4 * v.width * rows[v.rows] for v in self._plan.values),
            weights_per_token=per_token,
            cache_per_token=cache // (self.limits.blocks * BLOCK),
        )


@dataclass(frozen=True, slots=True)
class _State:
    """One step: the batch, the values made so far by index, dequantized weights by name, the cache by layer."""

    batch: Batch
    values: dict[int, F32]
    weights: dict[str, F32]
    cache_keys: list[NDArray[Any]]  # each (slots, kv_heads, head_dim)
    cache_values: list[NDArray[Any]]

    def read(self, value: Value) -> F64:
        return self.values[value.index].astype(np.float64)

    def weight(self, weight: Weight) -> F64:
        return self.weights[weight.name].astype(np.float64)

    def write(self, out: Value, result: NDArray[Any]) -> None:
        rows = len(self.batch.tokens if out.rows == "batch" else self.batch.logit_rows)
        assert result.shape == (rows, out.width), f"{out.name}: {result.shape} instead of {(rows, out.width)}"
        self.values[out.index] = result.astype(np.float32)


def _embed(state: _State, op: Embed) -> None:
    state.write(op.out, state.weights[op.table.name][state.batch.tokens])


def _norm(state: _State, op: Norm) -> None:
    x = state.read(op.x)
    x = x.reshape(len(x), op.groups, -1)  # (rows, groups, width of a group)
    if op.kind == "layer":
        x = x - x.mean(axis=2, keepdims=True)
    y = x / np.sqrt((x * x).mean(axis=2, keepdims=True) + op.eps) * state.weight(op.weight)
    if op.bias is not None:
        y = y + state.weight(op.bias)
    state.write(op.out, y.reshape(len(x), -1))


def _linear(state: _State, op: Linear) -> None:
    x, weight = state.read(op.x), state.weight(op.weight)
    y = np.empty((len(x), len(weight)))
    for row in range(len(x)):
        y[row] = weight @ x[row]  # one product per row: the order of the sum cannot depend on the batch
    y *= op.scale
    if op.bias is not None:
        y += state.weight(op.bias)
    state.write(op.out, y)


def _rotate(state: _State, op: Rotate) -> None:
    x = state.read(op.x)
    heads = x.reshape(len(x), -1, op.head_dim)
    cos, sin = (table[:, None, :] for table in rope_table(op.rope, state.batch.positions))  # (T, 1, n_rot/2)
    n = op.rope.n_rot
    first, second = (slice(0, n, 2), slice(1, n, 2)) if op.rope.style == "norm" else (slice(n // 2), slice(n // 2, n))
    out = heads.copy()
    out[:, :, first] = heads[:, :, first] * cos - heads[:, :, second] * sin
    out[:, :, second] = heads[:, :, first] * sin + heads[:, :, second] * cos
    state.write(op.out, out.reshape(x.shape))


def _append(state: _State, op: Append) -> None:
    for cache, value in ((state.cache_keys, op.k), (state.cache_values, op.v)):
        rows = state.values[value.index]
        cache[op.layer][state.batch.slots] = rows.reshape(len(rows), *cache[op.layer].shape[1:])


def _attention(state: _State, op: Attention) -> None:
    batch, q = state.batch, state.read(op.q)
    out = np.empty_like(q)
    kv_heads, head_dim = state.cache_keys[op.layer].shape[1:]
    for row in range(len(q)):
        seen = np.arange(batch.positions[row] + 1)  # (P,) positions 0 .. its own
        slots = batch.tables[batch.sequence[row], seen // BLOCK] * BLOCK + seen % BLOCK
        keys = state.cache_keys[op.layer][slots].astype(np.float64).transpose(1, 2, 0)  # (kv_heads, D, P)
        values = state.cache_values[op.layer][slots].astype(np.float64).transpose(1, 0, 2)  # (kv_heads, P, D)
        queries = q[row].reshape(kv_heads, op.heads // kv_heads, head_dim)  # (kv_heads, heads that share, D)
        scores = queries @ keys * op.scale
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        mixed = weights @ values / weights.sum(axis=2, keepdims=True)
        out[row] = mixed.reshape(-1)
    state.write(op.out, out)


def _silu(x: F64) -> F64:
    return np.asarray(x / (1.0 + np.exp(-x)))


def _gelu(x: F64) -> F64:
    """The tanh form, which is what ggml computes and what models with gelu were trained with."""
    return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * x * (1.0 + 0.044715 * x * x))))


_ACTIVATIONS: dict[str, Callable[[F64], F64]] = {"silu": _silu, "gelu": _gelu}


def _glu(state: _State, op: Glu) -> None:
    state.write(op.out, _ACTIVATIONS[op.activation](state.read(op.gate)) * state.read(op.up))


def _add(state: _State, op: Add) -> None:
    state.write(op.out, state.read(op.a) + state.read(op.b))


def _scale(state: _State, op: Scale) -> None:
    state.write(op.out, state.read(op.x) * op.factor)


def _select_rows(state: _State, op: SelectRows) -> None:
    state.write(op.out, state.values[op.x.index][state.batch.logit_rows])


_OPERATIONS: dict[type[Any], Callable[[_State, Any], None]] = {
    Embed: _embed,
    Norm: _norm,
    Linear: _linear,
    Rotate: _rotate,
    Append: _append,
    Attention: _attention,
    Glu: _glu,
    Add: _add,
    Scale: _scale,
    SelectRows: _select_rows,
}


def _weights_of(operation: Operation) -> Iterator[Weight]:
    for field in ("table", "weight", "bias"):
        weight = getattr(operation, field, None)
        if weight is not None:
            yield weight


def _embedding(plan: Plan) -> Weight:
    return next(op.table for op in plan.operations if isinstance(op, Embed))


def _dequantize(plan: Plan, progress: Progress) -> dict[str, F32]:
    """float32 values of every weight by name."""
    for operation in plan.operations:
        if type(operation) not in _OPERATIONS:
            raise BackendError(f"the reference backend has no operation {type(operation).__name__}")
    found = {weight.name: weight for operation in plan.operations for weight in _weights_of(operation)}
    weights: dict[str, F32] = {}
    for done, weight in enumerate(found.values(), 1):
        try:
            rows = quant.dequantize(weight.read(0, math.prod(weight.shape[:-1])), weight.format)
        except quant.QuantError as error:
            raise BackendError(f"{weight.name}: {error}") from None
        weights[weight.name] = rows.reshape(weight.shape)
        progress("loading weights", done, len(found))
    return weights
