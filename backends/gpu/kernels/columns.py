"""Declarations of kernels that copy columns between rows."""

from __future__ import annotations

from localllm.backends.gpu.kernels.kernel import Kernel, Shape
from localllm.backends.gpu.kernels.rowwise import Delivered


class SliceColumns(Kernel):
    """Copy TAKEN values from START on out of every GROUP values of a row."""

    name, parts = "columns", "blocks columns"
    WIDTH: Shape
    X_STRIDE: Shape
    GROUP: Shape
    START: Shape
    TAKEN: Shape
    delivered: Delivered


class ConcatColumns(Kernel):
    """Interleave OF_A values of a row of a with OF_B values of a row of b."""

    name, parts = "join_columns", "blocks columns"
    WIDTH: Shape
    A_STRIDE: Shape
    B_STRIDE: Shape
    OF_A: Shape
    OF_B: Shape
    delivered: Delivered
