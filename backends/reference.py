"""The reference backend: binds a plan to dequantized weights and a paged cache, and runs one operation at a time.

`backends.reference_operations` defines the operations. The tests compare every other backend with the reference.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.backends.base import F16_CACHE, BackendError, CacheTypes, Limits, Memory, Progress, Routing, cache_reads
from localllm.backends.cache import CACHE_TYPES, CacheType, load_rows
from localllm.backends.checks import check_cache
from localllm.backends.reference_operations import OPERATIONS
from localllm.backends.reference_state import ReferenceState
from localllm.backends.shell import Shell
from localllm.base.notices import Notice, Setting
from localllm.plan import BLOCK, F32, Batch, CacheLayer, Plan, Store, Tensor, Value, flattened, rows_of_block


class ReferenceBackend:
    """The NumPy backend. It is slow, and serves as the reference in tests of the other backends."""

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
        """Dequantize every weight and allocate the cache. Raises BackendError if the plan cannot be bound.

        Every value of a step is kept, so `keep` has no effect.
        """
        try:
            return ReferenceExecutable(plan, limits, cache, progress or (lambda what, done, total: None))
        except MemoryError:
            problem = "not enough memory: the reference backend keeps every weight as float32"
            advice = ("use the cpu backend, or a smaller model or context (", Setting("ctx_size"), ")")
            raise BackendError(Notice(problem, "; ", *advice)) from None

    def close(self) -> None: ...


class ReferenceExecutable(Shell):
    """A plan with its float32 weights and its paged cache."""

    _cache: _Cache

    def __init__(self, plan: Plan, limits: Limits, cache: CacheTypes, progress: Progress) -> None:
        super().__init__(plan, limits)
        check_cache(cache, CACHE_TYPES)
        self._weights = _dequantize(plan, progress)
        self._set_cache(_Cache(plan, limits, cache))
        self.memory = self._memory()
        self._windowed = frozenset(number for number, layer in enumerate(plan.layers) if limits.own_blocks(layer))
        self._last: ReferenceState | None = None

    def _take_in(self, batch: Batch) -> None:
        cache = self._cache
        every = [layer.every if isinstance(layer, CacheLayer) else 1 for layer in self._plan.layers]
        values = self._last.values if self._stage and self._last is not None else {}
        self._last = ReferenceState(
            batch, values, self._weights, cache.keys, cache.values, *cache.types, cache.stores, self._windowed, every
        )

    def _run_stage(self, number: int, received: Sequence[F32]) -> list[F32]:
        state = self._state
        state.crossing[:] = received
        operations = [self._plan.operations[n] for n in self._plan.stages[number]]
        with np.errstate(over="ignore", invalid="ignore"):  # corrupt weights give infinity or NaN, as on every backend
            for operation in flattened(operations):
                OPERATIONS[type(operation)](state, operation)
        return list(state.crossing)

    def result(self) -> F32:
        return self._state.values[self._plan.logits.index]

    @property
    def _state(self) -> ReferenceState:
        self._must_be_open()
        assert self._last is not None, "no step has run"
        return self._last

    def value(self, value: Value) -> F32:
        return self._state.values[value.index]

    def routing(self, out: Value) -> Routing:
        return self._state.routings[out.index]

    def _fill(self, weight: Tensor) -> None:
        self._weights[weight.name] = _values(weight)

    def read_bandwidth(self) -> float:
        """Measure the bandwidth of one NumPy pass over the weights in bytes per second."""
        self._must_be_open()
        start = perf_counter()
        for weight in self._weights.values():
            weight.max()
        return sum(w.nbytes for w in self._weights.values()) / max(perf_counter() - start, 1e-9)

    def _free(self) -> None:
        self._weights = {}
        self._cache.free()
        self._last = None

    def _memory(self) -> Memory:
        cache = self._cache.nbytes
        rows = {"batch": self.limits.rows, "logits": self.limits.logit_rows}
        return Memory(
            weights=sum(w.nbytes for w in self._weights.values()),
            cache=cache,
            scratch=sum(4 * v.width * rows[v.rows] for v in self._plan.values),
            weights_per_token=sum(read.share(self._weights[read.weight.name].nbytes) for read in self._plan.reads),
            **cache_reads(self._plan.layers, self.block_bytes, self.limits),
        )


class _Cache:
    """Stored keys and values by layer, uint8 (slots, kv_heads, bytes per head).

    Recurrent layers hold float32 states instead.
    """

    def __init__(self, plan: Plan, limits: Limits, cache: CacheTypes) -> None:
        self.types = CACHE_TYPES[cache.keys], CACHE_TYPES[cache.values]
        self._layers = plan.layers
        self.keys, self.values = (
            [_slots(own, limits.blocks_of(own), type_, part) for own in plan.layers]
            for type_, part in zip(self.types, ("head_dim", "value_dim"), strict=True)
        )
        self.stores: list[F32] = [_numbers(own, limits.blocks_of(own)) for own in plan.layers]
        self.layout = f"reference {cache.keys} {cache.values}"
        self.block_bytes = tuple(sum(part[0].nbytes for part in self._blocks(n)) for n in range(len(plan.layers)))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in (self.keys, self.values) for part in parts) + sum(
            s.nbytes for s in self.stores
        )

    def copy(self, layer: int, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        for blocks in self._blocks(layer):
            blocks[target] = blocks[source]

    def read(self, layer: int, numbers: NDArray[np.int32]) -> NDArray[np.uint8]:
        parts = [blocks[numbers].reshape(len(numbers), -1) for blocks in self._blocks(layer)]
        return np.concatenate(parts, axis=1)

    def write(self, layer: int, numbers: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        for blocks, new in zip(self._blocks(layer), self._parts(layer, content), strict=True):
            blocks[numbers] = new

    def finite(self, layer: int, content: NDArray[np.uint8]) -> bool:
        own = self._layers[layer]
        if not isinstance(own, CacheLayer):
            return bool(np.isfinite(np.ascontiguousarray(content).view(np.float32)).all())
        parts = zip(self._parts(layer, content), (own.head_dim, own.value_dim), self.types, strict=True)
        with np.errstate(invalid="ignore"):  # content may contain NaN
            return all(np.isfinite(load_rows(part, width, type_)).all() for part, width, type_ in parts if width)

    def free(self) -> None:
        self.keys, self.values, self.stores = [], [], []

    def _blocks(self, layer: int) -> list[NDArray[np.uint8]]:
        """Return views of a layer by block: keys and values (blocks, BLOCK, kv_heads, bytes), or a store's floats."""
        if not isinstance(self._layers[layer], CacheLayer):
            return [self.stores[layer].view(np.uint8)]
        own = self._layers[layer]
        assert isinstance(own, CacheLayer)
        slots, rows = [part[layer] for part in (self.keys, self.values)], rows_of_block(own.every)
        return [part.reshape(len(part) // rows, rows, *part.shape[1:]) for part in slots]

    def _parts(self, layer: int, content: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Split block contents (n, bytes) into the same parts as `_blocks`."""
        blocks = self._blocks(layer)
        ends = np.cumsum([part[0].nbytes for part in blocks])[:-1]
        split = np.split(content, ends, axis=1)
        return [part.reshape(len(part), *own.shape[1:]) for part, own in zip(split, blocks, strict=True)]


def _slots(own: Store, blocks: int, type_: CacheType, width: str) -> NDArray[np.uint8]:
    """Allocate the keys or the values of a layer. `width` names the field that holds the head dimension."""
    if not isinstance(own, CacheLayer):
        return np.zeros((0, 0, 0), np.uint8)
    return np.zeros((blocks * rows_of_block(own.every), own.kv_heads, type_.head_bytes(getattr(own, width))), np.uint8)


def _numbers(own: Store, blocks: int) -> F32:
    """Allocate the rows and the states of a recurrent layer, (blocks, floats per block)."""
    return np.zeros((0, 0) if isinstance(own, CacheLayer) else (blocks, BLOCK * own.row + own.state), np.float32)


def _dequantize(plan: Plan, progress: Progress) -> dict[str, F32]:
    """Dequantize every weight to float32; return the values by weight name."""
    for operation in flattened(plan.operations):
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
