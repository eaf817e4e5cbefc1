"""Declarations of kernels for operations on several streams of hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.gpu.kernels.kernel import Buffers, Factor, FloatIn, FloatOut, Kernel, Shape
from localllm.backends.gpu.kernels.rowwise import Delivered


@dataclass(frozen=True, slots=True, kw_only=True)
class MixSlicesBuffers(Buffers):
    x: FloatIn
    coefficients: FloatIn
    base: FloatIn
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class MixSlices(Kernel[MixSlicesBuffers]):
    """Sum slices times coefficients. C_STRIDE is 0 if all rows share the coefficients."""

    name, parts, flag = "mix_slices", "streams", "MIX"
    WIDTH: Shape
    SLICES: Shape
    X_STRIDE: Shape
    C_STRIDE: Shape
    Y_STRIDE: Shape
    HAS_BASE: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MulRowsBuffers(Buffers):
    x: FloatIn
    weight: FloatIn
    y: FloatOut
    blocks: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class MulRows(Kernel[MulRowsBuffers]):
    name, parts, flag = "weigh", "blocks streams", "WEIGH"
    WIDTH: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    delivered: Delivered

    @property
    def local_floats(self) -> int:
        return 128


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendSlicesBuffers(Buffers):
    x: FloatIn
    last: FloatIn
    weight: FloatIn
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendSlices(Kernel[BlendSlicesBuffers]):
    """Compute a weighted mean of slices. A work-group handles one row."""

    name, parts, flag = "blend_slices", "streams", "BLEND"
    WIDTH: Shape
    SLICES: Shape
    X_STRIDE: Shape
    L_STRIDE: Shape
    Y_STRIDE: Shape
    EPS: Factor

    @property
    def local_floats(self) -> int:
        return 128


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnectionStreamsBuffers(Buffers):
    x: FloatIn
    scale: FloatIn
    bias: FloatIn
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnectionStreams(Kernel[HyperConnectionStreamsBuffers]):
    """Compute the coefficients of hyper-connections.

    A work-group handles one row, a work-item at most one coefficient.
    """

    name, parts, flag = "connect_streams", "streams", "CONNECT"
    SLICES: Shape
    PARTS: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    EPS: Factor
    MAGNITUDE: Factor
    WRITTEN_EPS: Factor
    ITERATIONS: Shape

    @property
    def local_floats(self) -> int:
        return 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchSlicesBuffers(Buffers):
    x: FloatIn
    like: FloatIn
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchSlices(Kernel[MatchSlicesBuffers]):
    """Scale slices. A work-group scales one slice of WIDTH values."""

    name, parts, flag = "match_slices", "streams", "MATCH"
    WIDTH: Shape
    L_WIDTH: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    EPS: Factor

    @property
    def local_floats(self) -> int:
        return 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianTopKRowsBuffers(Buffers):
    x: FloatIn
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianTopKRows(Kernel[GaussianTopKRowsBuffers]):
    """Subtract a threshold and clamp at zero. A work-group handles one row."""

    name, parts, flag = "excess", "streams", "EXCESS"
    WIDTH: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    FACTOR: Factor

    @property
    def local_floats(self) -> int:
        return 128
