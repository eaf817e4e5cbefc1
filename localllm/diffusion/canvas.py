"""Fills in a canvas: runs a schedule's steps over the model's forward pass, and yields the canvas after each change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.diffusion.choice import guided, propose, settling
from localllm.diffusion.reading import Masking
from localllm.diffusion.schedule import evenly, over_time, stages
from localllm.options import SamplingOptions
from localllm.options.diffusion import BLOCK_LENGTH, EPS, STEPS, DiffusionOptions

F32 = NDArray[np.float32]
Forward = Callable[[Sequence[int], Sequence[int]], F32]  # tokens and n requested rows -> logits (n, V)


@dataclass(frozen=True, slots=True)
class Canvas:
    """The tokens after a diffusion step. Masked positions contain the mask token; none are left after the last step."""

    tokens: tuple[int, ...]  # the prompt, then the answer
    prompt: int  # number of prompt tokens
    mask: int
    step: int  # number of completed steps
    steps: int

    @property
    def answer(self) -> tuple[int, ...]:
        return self.tokens[self.prompt :]


@dataclass(frozen=True, slots=True)
class Diffusion:
    """The options of one answer, with defaults filled in."""

    steps: int
    algorithm: str
    eps: float
    block_length: int  # 0: time schedule
    alg_temp: float
    cfg_scale: float

    @classmethod
    def of(cls, options: DiffusionOptions, masking: Masking) -> Diffusion:
        """Fill in the defaults: without a schedule, LLaDA models use blocks, and others the time schedule."""
        block = options.diffusion_block_length or 0
        if options.diffusion_eps is None and not block and not masking.shifted:
            block = BLOCK_LENGTH
        return cls(
            options.diffusion_steps or STEPS,
            options.diffusion_algorithm or "confidence",
            options.diffusion_eps or EPS,
            block,
            options.diffusion_alg_temp or 0.0,
            options.diffusion_cfg_scale or 0.0,
        )


def fill(
    forward: Forward,
    prompt: Sequence[int],
    length: int,
    masking: Masking,
    diffusion: Diffusion,
    sampling: SamplingOptions,
    seed: int,
) -> Iterator[Canvas]:
    """Yield the canvas before the first step and after every step that unmasks tokens.

    Steps in which the schedule unmasks no token are skipped. The same seed gives the same tokens. Raises
    SamplingError for invalid logits.
    """
    bits = np.random.PCG64(seed)

    def uniform() -> float:
        return float((bits.random_raw() >> 11) * 2.0**-53)

    tokens, first, done = [*prompt, *[masking.mask] * length], len(prompt), 0
    parts = list(stages(first, len(tokens), diffusion.steps, diffusion.block_length))
    steps = sum(part.steps for part in parts)
    yield Canvas(tuple(tokens), first, masking.mask, 0, steps)
    for part in parts:
        whole = part.stop - part.start
        for step in range(part.steps):
            done += 1
            masked = [place for place in range(part.start, part.stop) if tokens[place] == masking.mask]
            if not masked:
                continue
            if diffusion.block_length:
                count = evenly(step, part.steps, whole) if step < part.steps - 1 else len(masked)
            else:
                count = over_time(step, part.steps, len(masked), diffusion.eps)
            if not count:
                continue
            if _settle(forward, tokens, masked, count, first, masking, diffusion, sampling, uniform):
                yield Canvas(tuple(tokens), first, masking.mask, done, steps)


def _settle(
    forward: Forward,
    tokens: list[int],
    masked: Sequence[int],
    count: int,
    first: int,
    masking: Masking,
    diffusion: Diffusion,
    sampling: SamplingOptions,
    uniform: Callable[[], float],
) -> bool:
    """Unmask about `count` of the masked positions; return whether any was unmasked."""
    places = list(masked)
    if diffusion.algorithm == "origin":  # unmask each position at random
        share = count / len(places)
        places = [place for place in places if uniform() < share]
        if not places:
            return False
        count = len(places)
    rows = [max(place - 1, 0) if masking.shifted else place for place in places]
    logits = forward(tokens, rows)  # (n, V)
    if diffusion.cfg_scale:
        logits = guided(logits, forward([*[masking.mask] * first, *tokens[first:]], rows), diffusion.cfg_scale)
    found = [propose(row, masking.mask, sampling, diffusion.algorithm, uniform()) for row in logits]
    drawn = [uniform() for _ in found] if diffusion.algorithm == "random" else [each.confidence for each in found]
    for number in settling(np.array(drawn, np.float64), count, diffusion.alg_temp, uniform):
        tokens[places[number]] = found[number].token
    return True
