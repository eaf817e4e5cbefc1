"""The memory of a bound program: weights, cache, activations, scratch, and the address of every place in them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localllm.backends.allocation import Buffer
from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cpu import budget, weights
from localllm.backends.cpu.arguments import SLOT, Place
from localllm.backends.cpu.inputs import Inputs
from localllm.backends.cpu.jit import Library
from localllm.backends.cpu.kernels.common import Step
from localllm.backends.cpu.memory import LINE, Arena, address, aligned
from localllm.backends.cpu.places import (
    BufferOf,
    CacheOf,
    CounterOf,
    CountOf,
    ExpertVectorsOf,
    ListOf,
    PanelsOf,
    Partials,
    RopeOf,
    ScratchOf,
    StepOf,
    VectorOf,
    WorkOf,
)  # fmt: skip
from localllm.backends.cpu.program import Program
from localllm.backends.cpu.sharing import Sharing
from localllm.plan import F32, Plan, Rope


class Storage:
    """Everything that the calls of a program name. `locate` gives a place's address."""

    def __init__(
        self, program: Program, plan: Plan, limits: Limits, threads: int, cache: CacheTypes, library: Library,
        progress: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        named = program.places
        self.weights, self.panels = weights.load(plan.matrices.values(), program.panels, library, threads, progress)
        self._buffers, self.activations = program.buffers, program.buffers.commit()
        self.cache, self._cached = _cache(plan, limits, cache)
        self.inputs = Inputs(limits, plan.window)
        self._vectors: dict[Place, NDArray[np.float32]] = {}
        for place in named:
            if isinstance(place, VectorOf):
                self._vectors[place] = weights.vector(place.weight, place.lanes)
            elif isinstance(place, ExpertVectorsOf):
                self._vectors[place] = weights.expert_vectors(place.weight, place.width)
        self._lists = {p.memory: np.zeros(p.bytes, np.uint8) for p in named if isinstance(p, ListOf)}
        self.sharing = {p: Sharing(p.shape, p.window, limits, threads) for p in named if isinstance(p, WorkOf)}
        self._partials = Arena(max((s.partial_bytes for s in self.sharing.values()), default=0), "attention")
        self._scratch = {what: Arena(threads * size, what) for what, size in program.scratch.items()}
        ropes = {place.rope: _row_bytes(place.rope) for place in named if isinstance(place, RopeOf)}
        self.ropes = {rope: (Arena(row * limits.positions, "the rope table"), row) for rope, row in ropes.items()}
        self.counters = np.zeros((len(program.calls), threads, LINE // SLOT), np.int64)

    def locate(self, place: Place, call: int) -> int:
        """The address of a place that the call with this number names."""
        match place:
            case BufferOf(buffer):
                return self._buffers.address(buffer)
            case CacheOf():
                return self._cached[place]
            case ListOf():
                return address(self._lists[place.memory]) + place.offset
            case Partials():
                return self._partials.address
            case ScratchOf(what):
                return self._scratch[what].address
            case PanelsOf(weight):
                return self.panels[weight.name].address
            case VectorOf() | ExpertVectorsOf():
                return address(self._vectors[place])
            case RopeOf(rope):
                return self.ropes[rope][0].address
            case StepOf(windowed):
                return address(self.inputs.window_step if windowed else self.inputs.step)
            case CountOf(rows):
                return address(self.inputs.step) + SLOT * (Step.rows if rows == "batch" else Step.logit_rows)
            case WorkOf():
                return address(self.sharing[place].work)
            case CounterOf():
                return address(self.counters[call])
        raise AssertionError(f"no memory for {place}")

    def rows(self, buffer: Buffer, rows: int, width: int) -> F32:
        """A buffer's float32 rows (rows, width)."""
        memory = self.activations.view(self._buffers.address(buffer), rows * buffer.stride)
        return memory.view(np.float32).reshape(rows, -1)[:, :width]

    def list(self, place: ListOf) -> NDArray[np.uint8]:
        return self._lists[place]

    def free(self) -> None:
        """Let the memory go. Views of it that others hold stay readable."""
        nothing = Arena(0, "nothing")
        self.weights = self.activations = self._partials = nothing
        self.cache, self._scratch, self.ropes = [], {}, {}


def _row_bytes(rope: Rope) -> int:
    """Bytes of a rope table per position."""
    return 8 * (rope.n_rot // 2)


def _cache(plan: Plan, limits: Limits, cache: CacheTypes) -> tuple[list[NDArray[np.uint8]], dict[CacheOf, int]]:
    """Per layer, keys then values: uint8 (blocks, bytes per block); and their addresses."""
    parts = [
        (place, limits.blocks_of(layer), size)
        for number, (layer, sizes) in enumerate(zip(plan.layers, budget.block_bytes(plan, cache), strict=True))
        for place, size in zip((CacheOf(number, "keys"), CacheOf(number, "values")), sizes, strict=True)
    ]
    arena = Arena(sum(aligned(blocks * size) for _, blocks, size in parts), "the cache")
    arrays, addresses = [], {}
    for place, blocks, size in parts:
        addresses[place] = at = arena.take(blocks * size)
        arrays.append(arena.view(at, blocks * size).reshape(blocks, size))
    return arrays, addresses
