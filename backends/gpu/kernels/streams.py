"""Declarations of kernels for operations on several streams of hidden states."""

from __future__ import annotations

from localllm.backends.gpu.kernels.kernel import Factor, Kernel, Shape
from localllm.backends.gpu.kernels.rowwise import Delivered


class MixSlices(Kernel):
    """Sum slices times coefficients. C_STRIDE is 0 if all rows share the coefficients."""

    name, parts = "mix_slices", "streams"
    WIDTH: Shape
    SLICES: Shape
    X_STRIDE: Shape
    C_STRIDE: Shape
    Y_STRIDE: Shape
    HAS_BASE: bool


class MulRows(Kernel):
    name, parts = "weigh", "blocks streams"
    WIDTH: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    delivered: Delivered


class BlendSlices(Kernel):
    """Compute a weighted mean of slices. A work-group handles one row."""

    name, parts = "blend_slices", "streams"
    WIDTH: Shape
    SLICES: Shape
    X_STRIDE: Shape
    L_STRIDE: Shape
    Y_STRIDE: Shape
    EPS: Factor


class HyperConnectionStreams(Kernel):
    """Compute the coefficients of hyper-connections.

    A work-group handles one row, a work-item at most one coefficient.
    """

    name, parts = "connect_streams", "streams"
    SLICES: Shape
    PARTS: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    EPS: Factor
    MAGNITUDE: Factor
    WRITTEN_EPS: Factor
    ITERATIONS: Shape


class MatchSlices(Kernel):
    """Scale slices. A work-group scales one slice of WIDTH values."""

    name, parts = "match_slices", "streams"
    WIDTH: Shape
    L_WIDTH: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    EPS: Factor


class GaussianTopKRows(Kernel):
    """Subtract a threshold and clamp at zero. A work-group handles one row."""

    name, parts = "excess", "streams"
    WIDTH: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    FACTOR: Factor
