"""Encoders of pictures and sound: plans, runs of plans, and the layout of the rows in a run.

An encoder is a generator: it yields runs, receives their results, and returns the embeddings. Between runs it
rearranges rows with NumPy, in bands, after which it yields None: then others may run.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.plan.plan import Plan
from localllm.plan.values import F32


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How the rows of a step are divided into sequences, which attend only to themselves.

    `lengths` gives the rows of each sequence, in order. The positions of a sequence begin at 0. With a `border`, rows
    attend to the positions before it and to no others: those that an earlier stage has stored with the same border.
    The first `span` rows of each sequence see each other in layers with spans.
    """

    lengths: tuple[int, ...]
    axes: NDArray[np.int32] | None = None  # (rows, axes): positions for rotations, such as row and column
    border: int = 0
    span: int = 0

    @property
    def rows(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Run the stages of a part. `received` is the input of the first stage; the last stage's results are returned.

    There is one layout per stage, or one for all stages. If the last stage has other rows, `later` is its input. With
    `stage`, only this stage runs.
    """

    part: str
    received: tuple[F32, ...]
    layouts: tuple[Layout, ...]
    later: tuple[F32, ...] = ()
    stage: int | None = None


T = TypeVar("T")
Arranging: TypeAlias = Generator["Run | None", list[F32], T]  # yields only None if it needs no runs
Encoding: TypeAlias = Arranging[F32]
BAND = 1 << 20  # bytes


def bands(rows: int, row_bytes: int) -> Iterator[slice]:
    """Yield runs of rows of about `BAND` bytes, which take less than a millisecond to copy."""
    step = max(BAND // max(row_bytes, 1), 1)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


@dataclass(frozen=True, slots=True)
class Part:
    """A plan of an encoder. Each stage is a segment, between which other work may run."""

    plan: Plan
    rows: int  # maximum number of rows
    window: int = 0  # minimum number of rows per sequence, if sequences are windows


class EncoderModel(Protocol):
    """An encoder: its plans by name, and the runs that compute the embeddings (tokens, width) of an input."""

    parts: dict[str, Part]
    width: int

    def encode(self, inputs: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs, and None where other work may run. Return the embeddings."""
        ...
