"""Declarations of mixture-of-experts kernels, except the products."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.gpu.kernels.kernel import Buffers, Factor, FloatIn, FloatOut, IntIn, IntOut, Kernel, Shape
from localllm.backends.gpu.references import Fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteBuffers(Buffers):
    logits: FloatIn
    bias: FloatIn
    given: FloatIn
    choices: IntOut
    weights: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Kernel[RouteBuffers]):
    """Select USED experts per row, and compute their weights. GATING is the index in `plan.Gating`."""

    name, parts, flag = "route", "experts", "ROUTE"
    EXPERTS: Shape
    USED: Shape
    STRIDE: Shape
    GATING: int
    NORMALIZE: bool
    FACTOR: Factor
    HAS_BIAS: bool
    EXPERT_GROUPS: Shape
    GROUPS_USED: Shape
    HAS_GIVEN: bool = False
    GIVEN_STRIDE: Shape = 0

    @property
    def local_floats(self) -> int:
        return 2 * self.EXPERTS + 256 + self.USED


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuffers(Buffers):
    choices: IntIn
    step: IntIn = Fixed.STEP
    groups: IntOut


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPairs(Kernel[GroupBuffers]):
    """Group the pairs (row, expert) by expert, in tiles of TILE pairs."""

    name, parts, flag = "group_pairs", "experts", "GROUP_PAIRS"
    EXPERTS: Shape
    USED: Shape
    PAIRS: Shape
    TILE: int
    COUNT_AT: Shape

    @property
    def local_floats(self) -> int:
        return self.EXPERTS


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineExpertsBuffers(Buffers):
    x: FloatIn
    weights: FloatIn
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineExperts(Kernel[CombineExpertsBuffers]):
    """Compute the weighted sum of a row's USED experts."""

    name, parts, flag = "combine", "experts", "COMBINE"
    WIDTH: Shape
    STRIDE: Shape
    USED: Shape
    WEIGHTED: bool = True
