"""Declarations of mixture-of-experts kernels, except the products."""

from __future__ import annotations

from localllm.backends.gpu.kernels.kernel import Factor, Kernel, Shape


class Route(Kernel):
    """Select USED experts per row, and compute their weights. GATING is the index in `plan.Gating`."""

    name, parts = "route", "experts"
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


class GroupPairs(Kernel):
    """Group the pairs (row, expert) by expert, in tiles of TILE pairs."""

    name, parts = "group_pairs", "experts"
    EXPERTS: Shape
    USED: Shape
    PAIRS: Shape
    TILE: int
    COUNT_AT: Shape

    @property
    def local_floats(self) -> int:
        return self.EXPERTS


class CombineExperts(Kernel):
    """Compute the weighted sum of a row's USED experts."""

    name, parts = "combine", "experts"
    WIDTH: Shape
    STRIDE: Shape
    USED: Shape
    WEIGHTED: bool = True
