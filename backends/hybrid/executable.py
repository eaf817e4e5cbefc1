"""A plan bound to two backends that run its stages in alternation, behind the interface of one executable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError, Executable, Limits, Memory, TopK, TopKExecutable
from localllm.backends.hybrid.cut import Side
from localllm.base.notices import Notice, Setting
from localllm.plan import F32, Batch, Rows, Tensor, Value
from localllm.plan.rewrites.split import Split

ONE_PLACE = Notice(
    "weights and their inputs can be measured only where all layers run in one place; leave ", Setting("gpu_layers"),
    " and ", Setting("n_cpu_moe"), " out, or use ", Setting("backend", "cpu"),
)  # fmt: skip


class HybridExecutable:
    """Owns the executables of all sides, which run the stages of a plan in alternation."""

    def __init__(self, split: Split[Side], bound: Mapping[Side, Executable], limits: Limits) -> None:
        self._split, self._bound, self.limits = split, dict(bound), limits
        self._last = self._bound[split.order[-1]]
        self.sides = {side: executable.memory for side, executable in bound.items()}
        self.memory = sum_of(list(self.sides.values()))
        self.block_bytes = tuple(bound[side].block_bytes[number] for side, number in split.layers)
        runs = [(side, len(list(group))) for side, group in groupby(side for side, _ in split.layers)]
        self.cache_layout = ", ".join(f"{count} of {bound[side].cache_layout}" for side, count in runs)
        self.max_top_k = self._last.max_top_k if isinstance(self._last, TopKExecutable) else 0

    # -- stepping --------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> F32:
        """Run the batch and return its logits, float32 (L, vocabulary), as a view that the next step overwrites."""
        (logits,) = self._step(batch, ["logits"], lambda: [self.result()])
        return logits

    def step_top_k(self, batch: Batch, count: int) -> TopK:
        """Run the batch and return the `count` largest logits of each row."""
        return TopK(*self._step(batch, ["logits", "logits"], lambda: self.result_top_k(count)))

    def _step(
        self, batch: Batch, kinds: Sequence[Rows], result: Callable[[], Sequence[NDArray[Any]]]
    ) -> Sequence[NDArray[Any]]:
        """Run the batch piece by piece. Return the arrays of `result` (L, ...) for the whole batch."""
        pieces = self.pieces(batch)
        if len(pieces) == 1:
            self.begin(batch)
            self.run()
            return result()

        def parts() -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp], Sequence[NDArray[Any]]]]:
            for rows in pieces:
                piece, wanted = batch.piece(rows)
                self.begin(piece)
                self.run()
                yield rows, wanted, result()

        return batch.merged(kinds, parts())

    def pieces(self, batch: Batch) -> list[NDArray[np.intp]]:
        """Return the pieces of the side that splits the batch most finely.

        In non-causal models a sequence stays in one piece, so only the sides with non-causal attention decide.
        """
        plans = self._split.plans
        sides = [side for side in plans if not plans[side].causal] or list(plans)
        return max((self._bound[side].pieces(batch) for side in sides), key=len)

    def begin(self, batch: Batch) -> None:
        for executable in self._bound.values():
            executable.begin(batch)

    def run(self, received: Sequence[F32] = ()) -> list[F32]:
        """Run all stages on their sides."""
        crossing = list(received)
        for side in self._split.order:
            crossing = self._bound[side].run(crossing)
        return crossing

    def result(self) -> F32:
        return self._last.result()

    def result_top_k(self, count: int) -> TopK:
        assert isinstance(self._last, TopKExecutable), "guarded by max_top_k"
        return self._last.result_top_k(count)

    # -- the rest of the interface --------------------------------------------------------------------------------

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
        side, number = self._split.layers[layer]
        return self._bound[side].read_blocks(number, numbers)

    def write_blocks(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        side, number = self._split.layers[layer]
        self._bound[side].write_blocks(number, numbers, content)

    def read_bandwidth(self) -> float:
        """Return the bandwidth over all sides in bytes per second. The sides read one after the other, as in decode."""
        return joint_bandwidth(
            [(each.memory.weights_per_token, each.read_bandwidth()) for each in self._bound.values()]
        )

    def close(self) -> None:
        for executable in self._bound.values():
            executable.close()


def sum_of(memories: Sequence[Memory]) -> Memory:
    """Return the memory of all sides together."""
    positions = ("window", "selected")  # not bytes
    names = [field.name for field in fields(Memory)]
    return Memory(**{name: (max if name in positions else sum)(getattr(m, name) for m in memories) for name in names})


def joint_bandwidth(pairs: Sequence[tuple[int, float]]) -> float:
    """Return the bandwidth of parts that are read in turn, from their bytes and bandwidths; 0 if unknown."""
    if not all(rate for _, rate in pairs):
        return 0.0
    return sum(size for size, _ in pairs) / max(sum(size / rate for size, rate in pairs), 1e-9)
