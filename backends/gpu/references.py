"""References: names of the buffers of a launch before their memory is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from localllm.backends.allocation import Buffer
from localllm.plan import Rope


@dataclass(frozen=True, slots=True)
class MatrixOf:
    """The packed matrix of a weight, by the weight's name."""

    name: str


@dataclass(frozen=True, slots=True)
class VectorOf:
    """The float32 numbers of a weight, by the weight's name."""

    name: str


@dataclass(frozen=True, slots=True)
class CacheOf:
    """The keys or the values of a cache layer."""

    layer: int
    part: Literal["keys", "values"]


@dataclass(frozen=True, slots=True)
class RopeTableOf:
    """The table of cosines and sines (positions, n_rot)."""

    rope: Rope


@dataclass(frozen=True, slots=True)
class Choices:
    """The experts selected for the rows of a mixture: their numbers, their weights, or the pairs grouped by expert.

    `mixture` is the index of the value that the mixture makes.
    """

    mixture: int
    what: Literal["experts", "weights", "groups"]


class Fixed(Enum):
    """Buffers that exist once."""

    NOTHING = "nothing"  # small; for parameters that a kernel does not read
    STEP = "step"  # the rows of the batch
    WANTED = "wanted"  # step of the rows whose logits are requested
    TABLES = "tables"  # block tables
    WINDOW_TABLES = "window tables"  # block tables of layers with separate blocks
    PARTIAL = "partial"  # partial results of attention
    SCORES = "scores"  # indexer scores, and integers in the same order
    PICKED = "picked"  # parameters of the search for the largest logits
    EVEN_KEYS = "keys: even passes"  # results of the search
    ODD_KEYS = "keys: odd passes"


Scratch = Choices | Fixed  # memory that is not a weight, a cache layer or a value
Reference = Buffer | MatrixOf | VectorOf | CacheOf | RopeTableOf | Choices | Fixed
