"""Emitters of operations on several streams of hidden states."""

from __future__ import annotations

from localllm.backends.gpu.kernels import streams as kernels
from localllm.backends.gpu.lowering import Lowering
from localllm.backends.gpu.references import Fixed
from localllm.plan import Blend, GaussianTopK, HyperConnection, Match, Mix, Mul, Value


def mul(low: Lowering, op: Mul) -> None:
    x, weight, to, rows = low.floats(op.x), low.vector(op.weight), low.deliver(op.out), op.x.rows
    kernel = kernels.MulRows(WIDTH=op.x.width, X_STRIDE=x.stride, Y_STRIDE=op.out.width, delivered=to.delivered)
    buffers = kernels.MulRowsBuffers(x=x, weight=weight, y=to.y, blocks=to.y_blocks)
    low.dispatch("weigh", rows, [kernel.launch((-(-op.x.width // 128), (rows, 1, 1), 1), buffers)])


def mix(low: Lowering, op: Mix) -> None:
    x, own, rows = low.floats(op.x), op.coefficients, op.x.rows
    coefficients, stride = (low.floats(own), own.width) if isinstance(own, Value) else (low.vector(own), 0)
    base, y = Fixed.NOTHING if op.base is None else low.floats(op.base), low.make(op.out)
    kernel = kernels.MixSlices(
        WIDTH=op.x.width // op.slices, SLICES=op.slices, X_STRIDE=x.stride, C_STRIDE=stride, Y_STRIDE=y.stride,
        HAS_BASE=op.base is not None,
    )  # fmt: skip
    buffers = kernels.MixSlicesBuffers(x=x, coefficients=coefficients, base=base, y=y)
    low.dispatch("mix", rows, [kernel.launch((-(-y.stride // 128), (rows, 1, 1), 1), buffers)])


def blend(low: Lowering, op: Blend) -> None:
    x, last, y, rows = low.floats(op.x), low.floats(op.last), low.make(op.out), op.x.rows
    kernel = kernels.BlendSlices(
        WIDTH=op.last.width, SLICES=op.x.width // op.last.width, X_STRIDE=x.stride, L_STRIDE=last.stride,
        Y_STRIDE=y.stride, EPS=float(op.eps),
    )  # fmt: skip
    buffers = kernels.BlendSlicesBuffers(x=x, last=last, weight=low.vector(op.weight), y=y)
    low.dispatch("blend", rows, [kernel.launch((1, (rows, 1, 1), 1), buffers)])


def hyper_connection(low: Lowering, op: HyperConnection) -> None:
    x, y, rows = low.floats(op.x), low.make(op.out), op.x.rows
    kernel = kernels.HyperConnectionStreams(
        SLICES=op.streams, PARTS=op.parts, X_STRIDE=x.stride, Y_STRIDE=y.stride, EPS=float(op.eps),
        MAGNITUDE=float(op.magnitude), WRITTEN_EPS=float(op.written_eps), ITERATIONS=op.iterations,
    )  # fmt: skip
    buffers = kernels.HyperConnectionStreamsBuffers(x=x, scale=low.vector(op.scale), bias=low.vector(op.bias), y=y)
    low.dispatch("connect", rows, [kernel.launch((1, (rows, 1, 1), 1), buffers)])


def match(low: Lowering, op: Match) -> None:
    x, like, y, rows = low.floats(op.x), low.floats(op.like), low.make(op.out), op.x.rows
    kernel = kernels.MatchSlices(
        WIDTH=op.x.width // op.groups, L_WIDTH=like.stride, X_STRIDE=x.stride, Y_STRIDE=y.stride, EPS=float(op.eps)
    )
    buffers = kernels.MatchSlicesBuffers(x=x, like=like, y=y)
    low.dispatch("match", rows, [kernel.launch((op.groups, (rows, 1, 1), 1), buffers)])


def gaussian_top_k(low: Lowering, op: GaussianTopK) -> None:
    x, y, rows = low.floats(op.x), low.make(op.out), op.x.rows
    kernel = kernels.GaussianTopKRows(
        WIDTH=op.x.width, X_STRIDE=x.stride, Y_STRIDE=y.stride, FACTOR=float(op.deviations)
    )
    low.dispatch("excess", rows, [kernel.launch((1, (rows, 1, 1), 1), kernels.GaussianTopKRowsBuffers(x=x, y=y))])
