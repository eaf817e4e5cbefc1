"""References: the buffers that a launch names before their memory is allocated."""

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
    """The experts that rows of a mixture chose: their numbers, their weights, or the pairs grouped by expert.

    `mixture` is the index of the value that the mixture makes.
    """

    mixture: int
    what: Literal["experts", "weights", "groups"]


class Fixed(Enum):
    """Buffers that exist once."""

    NOTHING = "nothing"  # small; for parameters that a kernel does not read
    STEP = "step"  # the rows of the batch
    WANTED = "wanted"  # a step of the rows whose logits are wanted
    TABLES = "tables"  # block tables
    WINDOW_TABLES = "window tables"  # block tables of layers that have blocks of their own
    PARTIAL = "partial"  # partial results of attention
    SCORES = "scores"  # of an indexer, and integers in their order
    PICKED = "picked"  # parameters of the search for the largest logits
    EVEN_KEYS = "keys: even passes"  # its results
    ODD_KEYS = "keys: odd passes"


Scratch = Choices | Fixed  # memory that is neither a weight, a cache nor a value
Reference = Buffer | MatrixOf | VectorOf | CacheOf | RopeTableOf | Choices | Fixed
