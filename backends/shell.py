"""The part of an executable that all backends share: checks, stages, RoPE tables and results, but no kernels.

Kernels do no bounds checks. The shell checks batches, cache blocks and replacement weights before they reach memory,
and rejects every call after `close`. It also counts stages, extends RoPE tables, and returns the kept values of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError, Limits, Memory, Routing
from localllm.backends.checks import (
    check_axes,
    check_batch,
    check_blocks,
    check_content,
    check_copy,
    check_histories,
    check_limits,
    check_media,
    check_replacement,
    check_spans,
    check_texts,
    not_finite,
)
from localllm.plan import F32, Batch, EmbedMedia, Plan, Rope, Rows, Tensor, Value

ROPE_STEP = 1024  # RoPE tables grow by this number of positions


class Blocks(Protocol):
    """The KV cache of an executable.

    Callers validate the arguments. `Executable` describes `layout` and `block_bytes`.
    """

    layout: str
    block_bytes: tuple[int, ...]

    def copy(self, layer: int, source: NDArray[np.int32], target: NDArray[np.int32]) -> None: ...

    def read(self, layer: int, numbers: NDArray[np.int32]) -> NDArray[np.uint8]: ...

    def write(self, layer: int, numbers: NDArray[np.int32], content: NDArray[np.uint8]) -> None: ...

    def finite(self, layer: int, content: NDArray[np.uint8]) -> bool:
        """Return whether the content (n, bytes per block) is free of infinity and NaN."""
        ...


class RopeTables:
    """RoPE tables of cosines and sines, filled on demand: most chats never reach the end of a long context.

    `fill(rope, start, stop)` computes and stores the rows of positions start to stop.
    """

    def __init__(self, ropes: Collection[Rope], positions: int, fill: Callable[[Rope, int, int], None]) -> None:
        self._ropes, self._positions, self._fill = ropes, positions, fill
        self._filled = 0

    def reach(self, positions: int) -> None:
        """Fill the tables for at least `positions` positions."""
        if positions > self._filled:
            stop = min(-(-positions // ROPE_STEP) * ROPE_STEP, self._positions)
            for rope in self._ropes:
                self._fill(rope, self._filled, stop)
            self._filled = stop


class Shell(ABC):
    """The base class of executables. Each backend's subclass adds kernels and memory."""

    limits: Limits
    memory: Memory
    cache_layout: str
    block_bytes: tuple[int, ...]
    _cache: Blocks

    def __init__(self, plan: Plan, limits: Limits) -> None:
        check_limits(limits)
        self._plan, self.limits = plan, limits
        self._is_open = True
        self._vocabulary_in, self._window = plan.input_vocabulary, plan.window
        self._looks_up, self._axes, self._spans = bool(plan.lookups), plan.axes, plan.spans
        self._media, self._embeds_media = plan.media, any(isinstance(op, EmbedMedia) for op in plan.operations)
        self._counts: dict[Rows, int] = {"batch": 0, "logits": 0}  # number of rows in the last batch
        self._last_position = 0  # largest position of the last batch
        self._stage, self._stage_count = 0, len(plan.stages)  # the stage to run next, and the number of stages
        self._ropes = RopeTables((), 0, lambda rope, start, stop: None)
        self._kept: dict[int, F32] = {}  # kept values by value index: (largest batch, width)
        self._routings: dict[int, Routing] = {}

    def _set_cache(self, blocks: Blocks) -> None:
        self._cache, self.cache_layout, self.block_bytes = blocks, blocks.layout, blocks.block_bytes

    # -- implemented by each backend -------------------------------------------------------------------------------

    @abstractmethod
    def _take_in(self, batch: Batch) -> None:
        """Copy a checked batch to the memory that the kernels read."""

    @abstractmethod
    def _run_stage(self, number: int, received: Sequence[F32]) -> list[F32]:
        """Run a stage of the plan on the batch; see `Executable.run`."""

    def _run_slice(self, number: int, seconds: float, received: Sequence[F32]) -> list[F32] | None:
        """Run a stage for about this time, or whole. Return its results, or None if it is not done."""
        return self._run_stage(number, received)

    @abstractmethod
    def result(self) -> F32: ...

    @abstractmethod
    def _fill(self, weight: Tensor) -> object:
        """Store the new weights of a matrix."""

    @abstractmethod
    def _free(self) -> None:
        """Free the memory. Logits already returned stay readable."""

    @abstractmethod
    def read_bandwidth(self) -> float: ...

    # -- stepping --------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> F32:
        """Run the batch and return its logits, float32 (L, vocabulary), as a view that the next step overwrites."""
        self._must_be_whole()
        for stage, part in self._turns(batch):
            self.begin(part)
            self._stage = stage
            self.run()
        return self.result() if self._counts["logits"] else np.empty((0, self._plan.logits.width), np.float32)

    def draft(self, batch: Batch, hidden: F32, head: int = 0) -> None:
        """Run a multi-token-prediction head of the plan; see `DraftingExecutable`."""
        heads = len(self._plan.drafts)
        assert head < heads, "the plan has no such head"
        self._check(batch, drafting=True)
        self._take_in(batch)
        self._stage = self._stage_count - heads + head
        self.run([hidden])

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self._stage_count

    def pieces(self, batch: Batch) -> list[NDArray[np.intp]]:
        return [np.arange(len(batch.tokens))]

    def begin(self, batch: Batch, stage: int = 0) -> None:
        self._check(batch)
        self._stage = stage
        self._take_in(batch)

    def _turns(self, batch: Batch) -> list[tuple[int, Batch]]:
        """Return the stages to run, each with its part of the batch: first the encoder texts, then the other rows."""
        if not self._plan.encodes:
            return [(0, batch)]
        check_texts(batch)
        return batch.turns()

    def _check(self, batch: Batch, drafting: bool = False) -> None:
        """Check the next batch, and prepare everything that is the same for all its pieces.

        A head for drafting (`drafting`) reads no embeddings of media tokens.
        """
        self._must_be_open()
        check_batch(batch, self.limits, self._vocabulary_in, self._window, self._media > 0)
        if self._embeds_media and not drafting:
            check_media(batch, self._media)
        if self._looks_up:
            check_histories(batch)
        if self._spans:
            check_spans(batch)
        positions = batch.positions
        self._last_position = int(positions.max() if len(positions) > 1 else positions[0])
        if batch.borders is not None:  # rows may see positions beyond their own
            self._last_position = max(self._last_position, int(batch.borders.max()) - 1)
        furthest = self._last_position
        if self._axes and batch.axes is not None:
            check_axes(batch.axes, len(positions), self._axes, self.limits)
            furthest = max(furthest, int(batch.axes.max()))
        self._ropes.reach(furthest + 1)
        self._counts = {"batch": len(batch.tokens), "logits": len(batch.logit_rows)}
        self._stage = 0

    def run(self, received: Sequence[F32] = ()) -> list[F32]:
        self._must_be_open()
        number, self._stage = self._stage, self._stage + 1
        return self._run_stage(number, received)

    def run_slice(self, seconds: float, received: Sequence[F32] = ()) -> list[F32] | None:
        """Run the next stage for about this time, if the backend can; otherwise whole. Return its results, or None if
        another call must continue.
        """
        self._must_be_open()
        found = self._run_slice(self._stage, seconds, received)
        self._stage += found is not None
        return found

    # -- the rest of the interface ---------------------------------------------------------------------------------

    def value(self, value: Value) -> F32:
        self._must_be_open()
        return self._kept[value.index][: self._counts[value.rows]]

    def routing(self, out: Value) -> Routing:
        self._must_be_open()
        found, count = self._routings[out.index], self._counts[out.rows]
        return Routing(found.choices[:count], found.hidden[:count])

    def replace(self, weight: Tensor) -> None:
        self._must_be_open()
        check_replacement(weight, self._plan.matrices)
        self._fill(weight)

    def copy_blocks(self, source: np.ndarray, target: np.ndarray, windowed: bool = False) -> None:
        self._must_be_open()
        check_copy(source, target, self.limits.window_blocks if windowed else self.limits.blocks)
        for number, layer in enumerate(self._plan.layers):
            if self.limits.own_blocks(layer) == windowed:
                self._cache.copy(number, source, target)

    def read_blocks(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        self._must_be_open()
        check_blocks("read_blocks: numbers", numbers, self.limits.blocks_of(self._plan.layers[layer]))
        return self._cache.read(layer, numbers)

    def write_blocks(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        self._must_be_open()
        check_blocks("write_blocks: numbers", numbers, self.limits.blocks_of(self._plan.layers[layer]))
        check_content(content, len(numbers), self.block_bytes[layer])
        if not self._cache.finite(layer, content):  # infinity and NaN corrupt a sum even at weight zero
            raise not_finite()
        self._cache.write(layer, numbers, content)

    def close(self) -> None:
        """Free the memory. Logits already returned stay readable."""
        if self._is_open:
            self._is_open = False
            self._kept, self._routings = {}, {}
            self._free()

    def _must_be_whole(self) -> None:
        whole = self._stage_count == 1 or self._plan.encodes or bool(self._plan.drafts)
        assert whole, "a split plan runs in stages"

    def _must_be_open(self) -> None:
        if not self._is_open:
            raise BackendError("this executable is closed; bind the plan again")
