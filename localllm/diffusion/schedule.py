"""The number of tokens to unmask in each diffusion step: over time as in Dream, or block by block as in LLaDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class DenoisingStage(NamedTuple):
    """A range of the canvas that is unmasked in a number of steps."""

    start: int
    stop: int
    steps: int


def stages(start: int, stop: int, steps: int, block_length: int) -> Iterator[DenoisingStage]:
    """Yield the blocks from `start` to `stop` with their numbers of steps; with a block length of 0, a single stage.

    Steps are distributed evenly, with one more for the first blocks. Every block has at least one step.
    """
    if not block_length:
        yield DenoisingStage(start, stop, steps)
        return
    begins = range(start, stop, block_length)
    each, more = divmod(steps, len(begins))
    for number, begin in enumerate(begins):
        yield DenoisingStage(begin, min(begin + block_length, stop), max(1, each + (number < more)))


def over_time(step: int, steps: int, masked: int, eps: float) -> int:
    """Return how many of `masked` tokens to unmask: the fraction 1 - s/t, where time falls from 1 to `eps` (Dream 7B).

    The result is rounded down in float32, as in llama.cpp. The last step unmasks all tokens.
    """
    if step >= steps - 1:
        return masked
    one, rest = np.float32(1), np.float32(1) - np.float32(eps)
    t = one - np.float32(step) / np.float32(steps) * rest
    s = one - np.float32(step + 1) / np.float32(steps) * rest
    return int(np.float32(masked) * (one - s / t))


def evenly(step: int, steps: int, masked: int) -> int:
    """Return how many of a block's `masked` tokens to unmask in this step: evenly, with the remainder in the first
    steps.
    """
    return masked // steps + (step < masked % steps)
