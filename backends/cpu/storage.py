"""The memory of a bound program: weights, cache, activations and scratch, and the address of every place in it.

A step that others interrupt shares only weights, cache and tables with them (`Storage.interruptible`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import numpy as np
from numpy.typing import NDArray

from localllm.backends.allocation import Buffer
from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cpu import weights
from localllm.backends.cpu.arguments import SLOT, Place
from localllm.backends.cpu.cache_blocks import CacheBlocks
from localllm.backends.cpu.inputs import Inputs
from localllm.backends.cpu.jit import Library
from localllm.backends.cpu.kernels.common import Step
from localllm.backends.cpu.memory import LINE, Arena, address
from localllm.backends.cpu.places import (
    AxesOf,
    BufferOf,
    CacheOf,
    ColumnsOf,
    Counter,
    CountOf,
    EdgedOf,
    ExpertVectorsOf,
    ListOf,
    Partials,
    RepackedOf,
    RopeOf,
    ScoresOf,
    ScratchOf,
    StepOf,
    VectorOf,
    WorkOf,
)  # fmt: skip
from localllm.backends.cpu.program import Program
from localllm.backends.cpu.rope import rope_rows
from localllm.backends.cpu.sharing import Sharing
from localllm.plan import F32, Plan, Rope


class Storage:
    """The memory that a program's calls use. `locate` returns the address of a place."""

    def __init__(
        self, program: Program, plan: Plan, limits: Limits, threads: int, cache: CacheTypes, library: Library,
        progress: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        self.weights, self.panels = weights.load_weight(
            plan.matrices.values(), program.panels, library, threads, progress
        )
        self.cache = CacheBlocks(plan, limits, cache)
        self._vectors: dict[Place, NDArray[np.float32]] = {}
        for place in program.places:
            if isinstance(place, VectorOf):
                self._vectors[place] = weights.dense_vector(place.weight, place.lanes)
            elif isinstance(place, ColumnsOf):
                self._vectors[place] = weights.column_bytes(place.weight, place.lanes)
            elif isinstance(place, ExpertVectorsOf):
                self._vectors[place] = weights.expert_vectors(place.weight, place.width)
            elif isinstance(place, EdgedOf):
                self._vectors[place] = weights.edged(place.weight, place.more)
            elif isinstance(place, AxesOf):
                self._vectors[place] = np.array(place.rope.axes, np.int32).view(np.float32)
        ropes = [place.rope for place in program.places if isinstance(place, RopeOf)]
        self.ropes = {rope: Arena(_rope_row(rope) * limits.positions, "the rope table") for rope in ropes}
        self._take_working_memory(program, plan, limits, threads)

    def _take_working_memory(self, program: Program, plan: Plan, limits: Limits, threads: int) -> None:
        """Allocate the memory that belongs to a step."""
        named = program.places
        self._buffers = program.buffers
        self.activations = Arena(program.buffers.size, "the activations")
        self.inputs = Inputs(
            limits, any(isinstance(p, StepOf) and p.rows == "logits" for p in named), plan.causal, plan.axes, plan.spans
        )
        self._lists = {p.memory: np.zeros(p.bytes, np.uint8) for p in named if isinstance(p, ListOf)}
        self.sharing = {p: Sharing(p.shape, p.window, limits, threads, p.rows) for p in named if isinstance(p, WorkOf)}
        self._partials = Arena(max((s.partial_bytes for s in self.sharing.values()), default=0), "attention")
        self._scores = Arena(max((p.bytes for p in named if isinstance(p, ScoresOf)), default=0), "an indexer")
        self._scratch = {what: Arena(threads * size, what) for what, size in program.scratch.items()}
        self.counters = np.zeros((len(program.calls), threads, LINE // SLOT), np.int64)

    def interruptible(self, program: Program, plan: Plan, limits: Limits, threads: int) -> Storage:
        """Return the memory of a second step of the same program, which shares weights, cache and tables with this
        one. Its pages are used once a step touches them.
        """
        other = copy(self)
        other._take_working_memory(program, plan, limits, threads)
        return other

    def locate(self, place: Place, call: int) -> int:
        """Return the address of a place for the call with this number."""
        match place:
            case BufferOf(buffer):
                return self.address_of(buffer)
            case CacheOf():
                return self.cache.addresses[place]
            case ListOf():
                return address(self._lists[place.memory]) + place.offset
            case Partials():
                return self._partials.address
            case ScoresOf():
                return self._scores.address
            case ScratchOf(what):
                return self._scratch[what].address
            case RepackedOf(weight):
                return self.panels[weight.name].address
            case VectorOf() | ColumnsOf() | ExpertVectorsOf() | EdgedOf() | AxesOf():
                return address(self._vectors[place])
            case RopeOf(rope):
                return self.ropes[rope].address
            case StepOf(windowed, rows):
                return address(self.inputs.step(rows, windowed))
            case CountOf(rows):
                return address(self.inputs.step()) + SLOT * (Step.rows if rows == "batch" else Step.logit_rows)
            case WorkOf():
                return address(self.sharing[place].work)
            case Counter():
                return address(self.counters[call])
        raise AssertionError(f"no memory for {place}")

    def address_of(self, buffer: Buffer) -> int:
        return self.activations.address + self._buffers.offset(buffer)

    def rows(self, buffer: Buffer, rows: int, width: int) -> F32:
        """Return the float32 contents (rows, width) of a buffer."""
        memory = self.activations.view(self.address_of(buffer), rows * buffer.stride)
        return memory.view(np.float32).reshape(rows, -1)[:, :width]

    def list(self, place: ListOf) -> NDArray[np.uint8]:
        return self._lists[place]

    def fill_rope(self, rope: Rope, start: int, stop: int) -> None:
        """Fill the RoPE tables for positions start to stop."""
        values, arena = rope_rows(rope, start, stop), self.ropes[rope]
        arena.view(arena.address + start * _rope_row(rope), values.nbytes)[:] = values.reshape(-1).view(np.uint8)

    def free(self) -> None:
        """Release the memory. Existing views stay readable."""
        self.free_working_memory()
        self.cache.free()
        self.ropes.clear()

    def free_working_memory(self) -> None:
        """Release this storage's memory for steps, and its references to the rest."""
        nothing = Arena(0, "nothing")
        self.weights = self.activations = self._partials = self._scores = nothing
        self._scratch = {}


def _rope_row(rope: Rope) -> int:
    """Return the bytes of one row of a RoPE table."""
    return 8 * (rope.n_rot // 2)
