"""References: names for the buffers of a launch before memory is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from localllm.backends.allocation import Buffer
from localllm.plan import Rope


@dataclass(frozen=True, slots=True)
class MatrixOf:
    """The packed matrix of a weight, identified by the weight's name."""

    name: str


@dataclass(frozen=True, slots=True)
class VectorOf:
    """The float32 values of a weight, identified by the weight's name."""

    name: str


@dataclass(frozen=True, slots=True)
class CacheOf:
    """The keys or the values of a cache layer."""

    layer: int
    part: Literal["keys", "values"]


@dataclass(frozen=True, slots=True)
class RopeTableOf:
    """The RoPE table of cosines and sines (positions, n_rot), after the axis of each pair if the rope has axes."""

    rope: Rope


@dataclass(frozen=True, slots=True)
class Choices:
    """The routing of a mixture: the selected experts, their weights, or the pairs grouped by expert.

    `mixture` is the index of the mixture's output value.
    """

    mixture: int
    what: Literal["experts", "weights", "groups"]


class Fixed(Enum):
    """Buffers that exist only once per program."""

    NOTHING = "nothing"  # a small dummy buffer for parameters that a kernel does not read
    STEP = "step"  # step buffer of the batch
    WANTED = "wanted"  # step buffer of the rows whose logits are requested
    TABLES = "tables"  # block tables
    WINDOW_TABLES = "window tables"  # block tables of sliding-window layers with separate blocks
    PARTIAL = "partial"  # partial results of attention
    SCORES = "scores"  # indexer scores, and their integers in the same order
    PICKED = "picked"  # parameters of the top-k search
    EVEN_KEYS = "keys: even passes"  # results of the top-k search
    ODD_KEYS = "keys: odd passes"


Scratch = Choices | Fixed  # memory that is not a weight, a cache layer or a value
Reference = Buffer | MatrixOf | VectorOf | CacheOf | RopeTableOf | Choices | Fixed
