"""The reference backend: binds a plan to dequantized weights and a paged cache, and runs one operation at a time.

`backends.reference_operations` says what an operation computes; the oracle of the test suite is made of these two.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.backends.base import F16_CACHE, BackendError, CacheTypes, Limits, Memory, Progress, Routing, cache_reads
from localllm.backends.cache import CACHE_TYPES, EXACT, load
from localllm.backends.checks import (
    check_batch,
    check_blocks,
    check_cache,
    check_content,
    check_copy,
    check_limits,
    check_replacement,
    not_finite,
)
from localllm.backends.reference_operations import OPERATIONS, State
from localllm.notice import Notice, Setting
from localllm.plan import BLOCK, F32, Batch, CacheLayer, Plan, Tensor, Value

HELD = CACHE_TYPES | {EXACT.name: EXACT}


class ReferenceBackend:
    """NumPy on the CPU: slow, and the oracle of the test suite."""

    name = "reference"

    def describe(self) -> str:
        return f"reference: NumPy {np.__version__}, float64 arithmetic, one operation at a time"

    def bind(
        self,
        plan: Plan,
        limits: Limits,
        cache: CacheTypes = F16_CACHE,
        progress: Progress | None = None,
        keep: Collection[Value] = (),
    ) -> ReferenceExecutable:
        """Dequantizes every weight and allocates the cache; BackendError for what cannot be bound.

        Every value of a step is kept anyway, so `keep` changes nothing here.
        """
        try:
            return ReferenceExecutable(plan, limits, cache, progress or (lambda what, done, total: None))
        except MemoryError:
            problem = "not enough memory: the reference backend keeps every weight as float32"
            advice = ("use the cpu backend, or a smaller model or context (", Setting("ctx_size"), ")")
            raise BackendError(Notice(problem, "; ", *advice)) from None

    def close(self) -> None: ...


class ReferenceExecutable:
    """A plan with its weights (float32) and its paged cache: per layer, keys and values as they are stored, uint8
    (slots, kv_heads, bytes of a head)."""

    def __init__(self, plan: Plan, limits: Limits, cache: CacheTypes, progress: Progress) -> None:
        check_limits(limits)
        check_cache(cache, HELD)
        self._types = HELD[cache.keys], HELD[cache.values]
        self.limits = limits
        self._plan = plan
        self._weights = _dequantize(plan, progress)
        self._keys, self._values = (
            [self._empty(layer, type_.head_bytes(layer.head_dim)) for layer in plan.layers] for type_ in self._types
        )
        self.cache_layout = f"reference {cache.keys} {cache.values}"
        pairs = zip(self._keys, self._values, strict=True)
        self.block_bytes = tuple(BLOCK * (k[0].nbytes + v[0].nbytes) for k, v in pairs)
        self.memory = self._memory()
        self._windowed = frozenset(n for n, layer in enumerate(plan.layers) if layer.window and limits.window_blocks)
        self._last: State | None = None

    def _empty(self, layer: CacheLayer, head_bytes: int) -> NDArray[np.uint8]:
        return np.zeros((self.limits.blocks_of(layer) * BLOCK, layer.kv_heads, head_bytes), np.uint8)

    def step(self, batch: Batch) -> F32:
        """Logits float32 (L, vocabulary) of the batch."""
        if not self._weights:
            raise BackendError("this executable is closed; bind the plan again")
        check_batch(batch, self.limits, self._plan.input_vocabulary, self._plan.window)
        state = self._last = State(batch, {}, self._weights, self._keys, self._values, *self._types, self._windowed)
        with np.errstate(over="ignore", invalid="ignore"):  # a bad weight gives infinity or NaN, as on every backend
            for operation in self._plan.operations:
                OPERATIONS[type(operation)](state, operation)
        return state.values[self._plan.logits.index]

    def value(self, value: Value) -> F32:
        assert self._last is not None, "no step has been made"
        return self._last.values[value.index]

    def routing(self, out: Value) -> Routing:
        assert self._last is not None, "no step has been made"
        return self._last.routings[out.index]

    def replace(self, weight: Tensor) -> None:
        check_replacement(weight, self._plan.weights)
        self._weights[weight.name] = _values(weight)

    def copy_blocks(self, source: np.ndarray, target: np.ndarray, windowed: bool = False) -> None:
        check_copy(source, target, self.limits.window_blocks if windowed else self.limits.blocks)
        for part in (self._keys, self._values):
            for number, layer in enumerate(part):
                if (number in self._windowed) == windowed:
                    blocks = _blocks(layer)
                    blocks[target] = blocks[source]

    def read_blocks(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        check_blocks("read_blocks: numbers", numbers, self.limits.blocks_of(self._plan.layers[layer]))
        both = [_blocks(part[layer])[numbers].reshape(len(numbers), -1) for part in (self._keys, self._values)]
        return np.concatenate(both, axis=1)

    def write_blocks(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        check_blocks("write_blocks: numbers", numbers, self.limits.blocks_of(self._plan.layers[layer]))
        check_content(content, len(numbers), self.block_bytes[layer])
        keys, values = _blocks(self._keys[layer]), _blocks(self._values[layer])
        size = keys[0].nbytes
        new = [content[:, :size].reshape(-1, *keys.shape[1:]), content[:, size:].reshape(-1, *values.shape[1:])]
        head_dim = self._plan.layers[layer].head_dim
        if not all(
            np.isfinite(load(part, head_dim, type_)).all() for part, type_ in zip(new, self._types, strict=True)
        ):
            raise not_finite()
        keys[numbers], values[numbers] = new

    def read_bandwidth(self) -> float:
        """Bytes a second of one NumPy pass over the weights."""
        start = perf_counter()
        for weight in self._weights.values():
            weight.max()
        return sum(w.nbytes for w in self._weights.values()) / max(perf_counter() - start, 1e-9)

    def close(self) -> None:
        self._weights = {}
        self._keys, self._values = [], []
        self._last = None

    def _memory(self) -> Memory:
        cache = sum(layer.nbytes for layer in (*self._keys, *self._values))
        rows = {"batch": self.limits.rows, "logits": self.limits.logit_rows}
        return Memory(
            weights=sum(w.nbytes for w in self._weights.values()),
            cache=cache,
            scratch=sum(4 * v.width * rows[v.rows] for v in self._plan.values),
            weights_per_token=sum(read.share(self._weights[read.weight.name].nbytes) for read in self._plan.reads),
            **cache_reads(self._plan.layers, self.block_bytes),
        )


def _blocks(layer: NDArray[Any]) -> NDArray[Any]:
    """A cache (slots, kv_heads, bytes) by blocks: (blocks, BLOCK, kv_heads, bytes)."""
    return layer.reshape(-1, BLOCK, *layer.shape[1:])


def _dequantize(plan: Plan, progress: Progress) -> dict[str, F32]:
    """float32 values of every weight by name."""
    for operation in plan.operations:
        if type(operation) not in OPERATIONS:
            raise BackendError(f"the reference backend has no operation {type(operation).__name__}")
    found = plan.weights
    weights: dict[str, F32] = {}
    for done, (name, weight) in enumerate(found.items(), 1):
        weights[name] = _values(weight)
        progress("loading weights", done, len(found))
    return weights


def _values(weight: Tensor) -> F32:
    try:
        rows = quant.dequantize(weight.read(0, math.prod(weight.shape[:-1])), weight.format)
    except quant.QuantError as error:
        raise BackendError(f"{weight.name}: {error}") from None
    return rows.reshape(weight.shape)
