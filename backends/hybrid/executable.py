"""A plan bound to two backends: parts in turn on the one and on the other, behind the interface of one executable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError, Executable, Largest, Limits, Memory, Parts, PicksOfParts
from localllm.backends.hybrid.cut import Cut, Side
from localllm.plan import F32, Batch, Tensor, Value

ONE_PLACE = (
    "weights and their inputs can be measured only where all layers run in one place; leave -ngl and -ncmoe out, or "
    "use --backend cpu"
)


class HybridExecutable:
    """Takes the executables of both sides over, and closes them. The pieces of a batch are those of the card."""

    def __init__(self, cut: Cut, bound: Mapping[Side, Executable], limits: Limits) -> None:
        self._cut, self._bound, self.limits = cut, dict(bound), limits
        self._parts: dict[Side, Parts] = {}
        for side, executable in bound.items():
            assert isinstance(executable, Parts)
            self._parts[side] = executable
        self._last = self._parts[cut.order[-1]]
        self._order = _numbered(cut.order)
        self.sides = {side: executable.memory for side, executable in bound.items()}
        self.memory = sum_of(list(self.sides.values()))
        self.block_bytes = tuple(bound[side].block_bytes[number] for side, number in cut.layers)
        runs = [(side, len(list(group))) for side, group in groupby(side for side, _ in cut.layers)]
        self.cache_layout = ", ".join(f"{count} of {bound[side].cache_layout}" for side, count in runs)
        self.most_picked = self._last.most_picked if isinstance(self._last, PicksOfParts) else 0

    # -- stepping --------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> F32:
        """Logits float32 (L, vocabulary); a view that the next step overwrites."""
        found: F32 | None = None
        for wanted in self._pieces(batch):
            logits = self._last.result()
            if len(logits) == len(batch.logit_rows):
                found = logits
            elif len(wanted):
                found = np.empty((len(batch.logit_rows), logits.shape[1]), np.float32) if found is None else found
                found[wanted] = logits
        assert found is not None, "a batch has rows"
        return found

    def step_largest(self, batch: Batch, count: int) -> Largest:
        """The `count` largest logits of each row."""
        last, rows = self._last, len(batch.logit_rows)
        assert isinstance(last, PicksOfParts), "most_picked says so"
        found: Largest | None = None
        for wanted in self._pieces(batch):
            largest = last.result_largest(count)
            if len(largest.ids) == rows:
                found = largest
            elif len(wanted):
                if found is None:
                    shape = rows, largest.ids.shape[1]
                    found = Largest(np.empty(shape, np.int32), np.empty(shape, np.float32))
                found.ids[wanted], found.logits[wanted] = largest
        assert found is not None, "a batch has rows"
        return found

    def _pieces(self, batch: Batch) -> Iterator[NDArray[np.intp]]:
        """Run the batch a piece at a time; where among `logit_rows` those of each stand, which are then there."""
        for rows in self._parts["card"].pieces(batch):
            piece, wanted = _piece(batch, rows)
            for executable in self._parts.values():
                executable.begin(piece)
            crossing: list[F32] = []
            for side, part in self._order:
                crossing = self._parts[side].run(part, crossing)
            yield wanted

    # -- what else an executable does ---------------------------------------------------------------------------------

    def value(self, value: Value) -> NoReturn:
        raise BackendError(ONE_PLACE)

    def routing(self, out: Value) -> NoReturn:
        raise BackendError(ONE_PLACE)

    def replace(self, weight: Tensor) -> NoReturn:
        raise BackendError(ONE_PLACE)

    def copy_blocks(self, source: np.ndarray, target: np.ndarray, windowed: bool = False) -> None:
        for executable in self._bound.values():
            executable.copy_blocks(source, target, windowed)

    def read_blocks(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        side, number = self._cut.layers[layer]
        return self._bound[side].read_blocks(number, numbers)

    def write_blocks(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        side, number = self._cut.layers[layer]
        self._bound[side].write_blocks(number, numbers, content)

    def read_bandwidth(self) -> float:
        """Bytes a second over both sides, each at its own pace, one after the other as decoding does."""
        pairs = [(bound.memory.weights_per_token, bound.read_bandwidth()) for bound in self._bound.values()]
        if not all(pace for _, pace in pairs):
            return 0.0
        return sum(size for size, _ in pairs) / max(sum(size / pace for size, pace in pairs), 1e-9)

    def close(self) -> None:
        for executable in self._bound.values():
            executable.close()


def sum_of(memories: Sequence[Memory]) -> Memory:
    """What both sides take together."""
    return Memory(
        weights=sum(m.weights for m in memories),
        cache=sum(m.cache for m in memories),
        scratch=sum(m.scratch for m in memories),
        weights_per_token=sum(m.weights_per_token for m in memories),
        cache_per_token=sum(m.cache_per_token for m in memories),
        window_per_token=sum(m.window_per_token for m in memories),
        window=max(m.window for m in memories),
    )


def _numbered(order: Sequence[Side]) -> list[tuple[Side, int]]:
    """(side, number among its own) of every part."""
    counts: Counter[Side] = Counter()
    found = []
    for side in order:
        found.append((side, counts[side]))
        counts[side] += 1
    return found


def _piece(batch: Batch, rows: NDArray[np.intp]) -> tuple[Batch, NDArray[np.intp]]:
    """Some rows of a batch as one of its own, and which of `logit_rows` are of them."""
    if len(rows) == len(batch.tokens):
        return batch, np.arange(len(batch.logit_rows))
    place = np.full(len(batch.tokens), -1, np.int32)
    place[rows] = np.arange(len(rows))
    at = place[batch.logit_rows]
    wanted = np.flatnonzero(at >= 0)
    window_slots = None if batch.window_slots is None else batch.window_slots[rows]
    piece = replace(
        batch, tokens=batch.tokens[rows], positions=batch.positions[rows], slots=batch.slots[rows],
        sequence=batch.sequence[rows], logit_rows=at[wanted], window_slots=window_slots,
    )  # fmt: skip
    return piece, wanted
