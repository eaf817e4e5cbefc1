"""Declarations of kernels that copy columns between rows."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.gpu.kernels.kernel import Buffers, FloatIn, FloatOut, Kernel, Shape
from localllm.backends.gpu.kernels.rowwise import Delivered


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceColumnsBuffers(Buffers):
    x: FloatIn
    y: FloatOut
    blocks: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceColumns(Kernel[SliceColumnsBuffers]):
    """Copy TAKEN values from START on out of every GROUP values of a row."""

    name, parts, flag = "columns", "blocks columns", "COLUMNS"
    WIDTH: Shape
    X_STRIDE: Shape
    GROUP: Shape
    START: Shape
    TAKEN: Shape
    delivered: Delivered

    @property
    def local_floats(self) -> int:
        return 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatColumnsBuffers(Buffers):
    a: FloatIn
    b: FloatIn
    y: FloatOut
    blocks: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatColumns(Kernel[ConcatColumnsBuffers]):
    """Interleave OF_A values of a row of a with OF_B values of a row of b."""

    name, parts, flag = "join_columns", "blocks columns", "JOIN"
    WIDTH: Shape
    A_STRIDE: Shape
    B_STRIDE: Shape
    OF_A: Shape
    OF_B: Shape
    delivered: Delivered

    @property
    def local_floats(self) -> int:
        return 128
