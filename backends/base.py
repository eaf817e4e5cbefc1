"""The interfaces of backends.

A backend binds a plan to memory; the resulting executable runs the plan on every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localllm.base.notices import Notice, Setting, Span
from localllm.base.printable import printable
from localllm.plan import (
    BLOCK,
    F32,
    Batch,
    CacheLayer,
    Operation,
    Plan,
    RowLayer,
    ScanLayer,
    StateLayer,
    Store,
    Tensor,
    Value,
    Weight,
    WkvLayer,
    rows_of_block,
)

Progress = Callable[[str, int, int], None]  # arguments: phase, amount done, total


class BackendError(Exception):
    """Raised if the hardware, the driver or the plan does not support the request. The message says what to do next."""

    def __str__(self) -> str:
        return printable(super().__str__(), None)


class WrongResults(BackendError):
    """Raised if a device fails its conformance check. `reason` is the message without the advice."""

    def __init__(self, reason: str, *advice: Span) -> None:
        super().__init__(Notice(reason, "; ", *advice))
        self.reason = reason


class ExecutableLost(BackendError):
    """Raised if a part of the executable is gone. The cache is lost; see `RestorableExecutable`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes to allocate: the largest number of rows and logit rows in a batch, the cache blocks, and the positions.

    If `window_blocks` is set, sliding-window layers have this number of separate cache blocks, and `blocks` counts the
    blocks of the other layers.
    """

    rows: int
    logit_rows: int
    blocks: int
    positions: int
    window_blocks: int = 0

    def own_blocks(self, layer: Store) -> bool:
        """Return whether the layer uses sliding-window attention and has separate cache blocks."""
        return bool(layer.window and self.window_blocks)

    def blocks_of(self, layer: Store) -> int:
        """Return the number of cache blocks of one layer."""
        return self.window_blocks if self.own_blocks(layer) else self.blocks


@dataclass(frozen=True, slots=True)
class CacheTypes:
    """Formats of keys and values in the KV cache, under llama.cpp's names: f16, q8_0, ..."""

    keys: str = "f16"
    values: str = "f16"

    @property
    def settings(self) -> tuple[Setting, Setting]:
        """The options that choose these formats."""
        return Setting("cache_type_k", self.keys), Setting("cache_type_v", self.values)


F16_CACHE = CacheTypes()


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes that an executable allocates, and the bytes that a decode step reads."""

    weights: int
    cache: int
    scratch: int
    weights_per_token: int
    cache_per_token: int  # bytes in layers that attend to the whole context
    window_per_token: int = 0  # bytes in layers that attend to at most the last `window` tokens
    window: int = 0
    states: int = 0  # bytes of the cache that hold states of recurrent layers
    state_per_token: int = 0  # average bytes read in recurrent layers
    selected_per_token: int = 0  # bytes in layers with top-k attention, which read at most `selected` tokens
    selected: int = 0

    @property
    def bytes(self) -> int:
        return self.weights + self.cache + self.scratch

    def read_after(self, tokens: float) -> float:
        """Return the bytes that a decode step reads when the cache holds `tokens` tokens."""
        bounded = self.window_per_token * min(tokens, self.window) + self.selected_per_token * min(
            tokens, self.selected
        )
        return self.weights_per_token + self.state_per_token + self.cache_per_token * tokens + bounded


def cache_reads(layers: Sequence[Store], block_bytes: Sequence[int], limits: Limits) -> dict[str, int]:
    """Return the cache fields of `Memory`. `block_bytes` gives the size of a cache block in every layer."""
    pairs = list(zip(layers, block_bytes, strict=True))
    cached = [(layer, size // rows_of_block(layer.every)) for layer, size in pairs if isinstance(layer, CacheLayer)]
    of_token = [(layer, size // layer.every) for layer, size in cached]  # bytes per token; a pool has one row
    return {
        "cache_per_token": sum(size for layer, size in of_token if not layer.window and not layer.selected),
        "window_per_token": sum(size for layer, size in of_token if layer.window),
        "window": max((layer.window for layer, _ in of_token), default=0),
        "selected_per_token": sum(size for layer, size in of_token if layer.selected),
        "selected": max((layer.selected for layer, _ in of_token), default=0),
        "states": sum(limits.blocks_of(layer) * size for layer, size in pairs if not isinstance(layer, CacheLayer)),
        "state_per_token": sum(state_read(layer) for layer in layers if not isinstance(layer, CacheLayer)),
    }


def state_read(layer: RowLayer | StateLayer | ScanLayer | WkvLayer) -> int:
    """Return the average bytes of a recurrent layer that a token reads: the state, and half a block of rows."""
    match layer:
        case RowLayer(width, window, every):
            return 4 * width * window // every
        case StateLayer():
            return 4 * (layer.state + layer.row * BLOCK // 2)
        case ScanLayer(width, state_dim):
            return 4 * width * state_dim
        case WkvLayer(heads, key_dim, value_dim):
            return 4 * heads * key_dim * value_dim


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts selected for the tokens of a step. Pair (t, i) is the i-th expert of token t."""

    choices: NDArray[np.int32]  # (T, used): expert numbers
    hidden: F32  # (T, used, ffn): the input of each expert's down matrix


class TopK(NamedTuple):
    """The largest logits of some rows, in descending order. Equal logits are ordered by token id; NaN comes first."""

    ids: NDArray[np.int32]  # (L, count)
    logits: F32  # (L, count)


@runtime_checkable
class TopKExecutable(Protocol):
    """Optional interface of executables: top-k of the logits on the device."""

    max_top_k: int  # upper limit of `count`

    def step_top_k(self, batch: Batch, count: int) -> TopK:
        """Run a step like `Executable.step`, but return only the `count` largest logits of each row (at most all)."""
        ...

    def result_top_k(self, count: int) -> TopK:
        """Return the logits of `Executable.result`, reduced to the `count` largest of each row."""
        ...


@runtime_checkable
class PipelinedExecutable(Protocol):
    """Optional interface of executables: several steps in flight. They are executed in the order of `submit`."""

    depth: int  # number of steps that keep all parts of the executable busy

    def submit(self, batch: Batch, top_k: int, values: Sequence[Value]) -> object:
        """Start a step, and return its handle. `top_k` is the number of largest logits to return (0: all logits)."""
        ...

    def collect(self, handle: Any) -> F32 | TopK:
        """Wait for a step, and return what `Executable.step` or `step_top_k` does. `value` returns its `values`."""
        ...

    def abandon(self, handle: Any) -> None:
        """Discard the results of a step."""
        ...


@runtime_checkable
class RestorableExecutable(Protocol):
    """Optional interface of executables that can be lost (`ExecutableLost`)."""

    def restore(self) -> None:
        """Replace what was lost; the weights are then bound again, and the cache is empty. Blocks, and may be called in
        another thread. Raises BackendError or another error if that is not possible at present.
        """
        ...


@runtime_checkable
class DraftingExecutable(Protocol):
    """Optional interface of executables: a plan whose last stages are multi-token-prediction heads (`Plan.drafts`)."""

    def draft(self, batch: Batch, hidden: F32, head: int = 0) -> None:
        """Run a head on tokens and on the hidden states (T, width) of the tokens before them.

        `value` returns its logits and its hidden states.
        """
        ...


@runtime_checkable
class SharingExecutable(Protocol):
    """Optional interface of executables: a second one with the same weights, cache and kept values."""

    def interruptible(self) -> SlicedExecutable:
        """Return an executable with separate activations. Steps of this one may run between its slices.

        It uses memory from its first step on. Close it first.
        """
        ...


class Roofs(NamedTuple):
    """The roofline limits of a processor, measured per second with all threads."""

    bytes: float  # bytes read from the weights; 0 if the weights are too small to measure
    operations: float  # int8 multiply-adds
    cycles: float  # frequency in Hz of the clock that `Clocked.clocks` reads


@runtime_checkable
class Clocked(Protocol):
    """Optional interface of executables: cycle counts of every operation."""

    # the operation of each kernel call, in execution order; an operation may have several calls
    operations: tuple[Operation, ...]
    barriers: tuple[bool, ...]  # whether a barrier follows each call; only the times between barriers are exact

    def clocks(self) -> NDArray[np.int64]:
        """Return the cycles of each kernel call since bind (calls, 2): in total, and waiting for other threads."""
        ...

    def stored(self, weight: Weight) -> int:
        """Return the number of bytes that a matrix occupies in memory."""
        ...

    def roofs(self) -> Roofs: ...


class Executable(Protocol):
    """A plan bound to memory. Only one thread at a time may use it.

    `step` runs a whole plan. If a plan is split over devices, each device runs its part in stages: `begin`, then one
    `run` per stage in alternation with the other devices, then `result` on the device that computes the logits.
    """

    limits: Limits
    memory: Memory
    cache_layout: str  # describes the bytes of a cache block; executables with equal layouts may exchange blocks
    block_bytes: tuple[int, ...]  # size of a cache block, by layer

    def step(self, batch: Batch) -> F32:
        """Run the batch and return its logits (L, vocabulary) as a view that the next step overwrites."""
        ...

    def pieces(self, batch: Batch) -> list[NDArray[np.intp]]:
        """Return the pieces into which `begin` requires the batch to be split, in order.

        Each piece is an array of row indices.
        """
        ...

    def begin(self, batch: Batch) -> None:
        """Load one piece of a batch."""
        ...

    def run(self, received: Sequence[F32] = ()) -> list[F32]:
        """Run to the next stage boundary. `received` holds the values (T or L, width) from the other device.

        Return the values to send on, as views that the next stage overwrites.
        """
        ...

    def result(self) -> F32:
        """Return the logits (L, vocabulary) after the last stage, as `step` does."""
        ...

    def value(self, value: Value) -> F32:
        """Return a kept value (T or L, width) of the last step as a view that the next step overwrites."""
        ...

    def routing(self, out: Value) -> Routing:
        """Return the expert routing of the last step.

        `out` is a kept output of experts; the arrays are views, as in `value`.
        """
        ...

    def replace(self, weight: Tensor) -> None:
        """Overwrite the weights of the bound matrix that has the same name, format and shape."""
        ...

    def copy_blocks(self, source: np.ndarray, target: np.ndarray, windowed: bool = False) -> None:
        """Copy cache blocks source[i] -> target[i] (copy-on-write, int32 block numbers) in every layer.

        If sliding-window layers have separate blocks, copy only in these layers (`windowed`) or only in the others.
        """
        ...

    def read_blocks(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        """Return copies of some cache blocks of a layer, with keys and values, as uint8 (n, bytes per block)."""
        ...

    def write_blocks(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        """Write blocks that `read_blocks` returned.

        If the blocks contain infinity or NaN, raise BackendError and write nothing.
        """
        ...

    def read_bandwidth(self) -> float:
        """Measure the bandwidth of reading the bound weights in bytes per second, which limits decode speed."""
        ...

    def close(self) -> None: ...


class SlicedExecutable(Executable, Protocol):
    """An executable whose stages can run in slices of time."""

    def run_slice(self, seconds: float, received: Sequence[F32] = ()) -> list[F32] | None:
        """Run the next stage for about this time. Return its results, or None if another call must continue."""
        ...


class Backend(Protocol):
    """A compute backend, opened once per process and device."""

    name: str

    def describe(self) -> str:
        """Return one line with the device, the instruction set and the number of threads."""
        ...

    def bind(
        self,
        plan: Plan,
        limits: Limits,
        cache: CacheTypes = F16_CACHE,
        progress: Progress | None = None,
        keep: Collection[Value] = (),
    ) -> Executable:
        """Bind a plan to memory. The values in `keep` stay readable after a step; their buffers are not reused."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class DeviceBackend(Protocol):
    """Optional interface of backends: a device with separate memory."""

    def free_memory(self) -> int:
        """Return the free device memory in bytes, or the total if the driver does not report free memory."""
        ...

    def plan_memory(self, plan: Plan, limits: Limits, cache: CacheTypes) -> Memory:
        """Return the memory that binding a plan would allocate. Raises BackendError if the plan cannot be bound."""
        ...
