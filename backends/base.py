"""What a backend is: something that binds a plan to memory and replays it for every batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localllm.plan import BLOCK, F32, Batch, CacheLayer, Plan, Tensor, Value
from localllm.printable import printable

Progress = Callable[[str, int, int], None]  # (what is being done, how far, of how much)


class BackendError(Exception):
    """The hardware, the driver or the plan does not allow what was asked; the message says what to do next."""

    def __str__(self) -> str:
        return printable(super().__str__(), None)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is allocated at bind: rows of the largest batch, rows of logits in one batch, cache blocks, positions.

    With `window_blocks` the layers that have a window keep that many blocks of their own, and `blocks` are the others'.
    """

    rows: int
    logit_rows: int
    blocks: int
    positions: int
    window_blocks: int = 0

    def blocks_of(self, layer: CacheLayer) -> int:
        """Cache blocks of one layer."""
        return self.window_blocks if layer.window and self.window_blocks else self.blocks


@dataclass(frozen=True, slots=True)
class CacheTypes:
    """Formats of the keys and of the values in the cache, by llama.cpp's names: f16, q8_0, ..."""

    keys: str = "f16"
    values: str = "f16"


F16_CACHE = CacheTypes()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes allocated, and the bytes a decode step reads from the weights."""

    weights: int
    cache: int
    scratch: int
    weights_per_token: int
    cache_per_token: int  # in the layers that see everything
    window_per_token: int = 0  # in those that see the last `window` tokens at most
    window: int = 0

    def read_after(self, tokens: float) -> float:
        """Bytes that a decode step reads with so many tokens in the cache."""
        seen = min(tokens, self.window)
        return self.weights_per_token + self.cache_per_token * tokens + self.window_per_token * seen


def cache_reads(layers: Sequence[CacheLayer], block_bytes: Sequence[int]) -> dict[str, int]:
    """What `Memory` says of the cache a token reads, from the bytes of a block in every layer."""
    of_token = [(layer.window, size // BLOCK) for layer, size in zip(layers, block_bytes, strict=True)]
    return {
        "cache_per_token": sum(size for window, size in of_token if not window),
        "window_per_token": sum(size for window, size in of_token if window),
        "window": max((window for window, _ in of_token), default=0),
    }


@dataclass(frozen=True, slots=True)
class Routing:
    """What the rows of a step did among experts; pair (t, i) is the i-th choice of row t."""

    choices: NDArray[np.int32]  # (T, used): numbers of experts
    hidden: F32  # (T, used, ffn): what each gave to the down matrix of its expert


class Largest(NamedTuple):
    """The largest logits of some rows, largest first: equal ones by id, a NaN before all."""

    ids: NDArray[np.int32]  # (L, count)
    logits: F32  # (L, count)


@runtime_checkable
class Picks(Protocol):
    """What an executable has besides where it finds the largest logits quicker than it hands over all of them."""

    most_picked: int  # that can be asked for

    def step_largest(self, batch: Batch, count: int) -> Largest:
        """As `step`, for the `count` largest logits of each row, or for all where there are not so many."""
        ...


@runtime_checkable
class Parts(Protocol):
    """What an executable has besides whose plan may be of several parts, between which something else computes."""

    def pieces(self, batch: Batch) -> list[NDArray[np.intp]]:
        """Rows of the batch that it can take in at a time, in order."""
        ...

    def begin(self, batch: Batch) -> None:
        """Take in the batch, one piece, that is run next."""
        ...

    def run(self, part: int, entering: Sequence[F32]) -> list[F32]:
        """Run a part of the plan, all in turn, with the values that enter it (T or L, width).

        What leaves it: views that the next part overwrites.
        """
        ...

    def result(self) -> F32:
        """Logits (L, vocabulary) after the last part, as of `Executable.step`."""
        ...


@runtime_checkable
class PicksOfParts(Protocol):
    """As `Picks`, after the last part."""

    most_picked: int

    def result_largest(self, count: int) -> Largest: ...


class Executable(Protocol):
    """A bound plan. Not for use by several threads at once."""

    limits: Limits
    memory: Memory
    cache_layout: str  # what the bytes of a cache block mean; blocks may move between executables of equal layouts
    block_bytes: tuple[int, ...]  # of one cache block, by layer

    def step(self, batch: Batch) -> F32:
        """Logits (L, vocabulary) of the batch; a view that the next step overwrites."""
        ...

    def value(self, value: Value) -> F32:
        """What the last step left in a value that was to be kept: (T or L, width), a view that the next overwrites."""
        ...

    def routing(self, out: Value) -> Routing:
        """How the last step came to `out`, the result of experts, which was to be kept; views as of `value`."""
        ...

    def replace(self, weight: Tensor) -> None:
        """Other numbers for a bound matrix of the same name, format and shape."""
        ...

    def copy_blocks(self, source: np.ndarray, target: np.ndarray, windowed: bool = False) -> None:
        """Copy cache blocks source[i] -> target[i] (copy-on-write, int32 block numbers) in every layer.

        Where layers with a window have blocks of their own: in these alone, or in the others.
        """
        ...

    def read_blocks(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        """Content of cache blocks of a layer, keys and values, copied: uint8 (n, bytes of a block)."""
        ...

    def write_blocks(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        """Put back what `read_blocks` gave; BackendError, and nothing changed, where it is not finite numbers."""
        ...

    def read_bandwidth(self) -> float:
        """Bytes a second at which this machine now reads the bound weights doing nothing else: the roof of decoding."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """Opened once per process and device."""

    name: str

    def describe(self) -> str:
        """One line: device, instruction set, threads."""
        ...

    def bind(
        self,
        plan: Plan,
        limits: Limits,
        cache: CacheTypes = F16_CACHE,
        progress: Progress | None = None,
        keep: Collection[Value] = (),
    ) -> Executable:
        """`keep` names values that can be read after a step; they take memory of their own."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Card(Protocol):
    """What a backend has besides whose device has memory of its own."""

    def free_memory(self) -> int:
        """Bytes that can be taken; all of the device's where the driver does not say what is taken already."""
        ...

    def plan_memory(self, plan: Plan, limits: Limits, cache: CacheTypes) -> Memory:
        """What binding a plan takes, told without taking it; BackendError for what cannot be bound."""
        ...
