"""Emitters of operations on several streams of hidden states."""

from __future__ import annotations

from localllm.backends.gpu.kernels import streams as kernels
from localllm.backends.gpu.kernels.kernel import by_row, by_value
from localllm.backends.gpu.lowering import Lowering
from localllm.plan import Blend, GaussianTopK, HyperConnection, Match, Mix, Mul, Value


def mul(low: Lowering, op: Mul) -> None:
    x, weight, to, rows = low.floats(op.x), low.vector(op.weight), low.deliver(op.out), op.x.rows
    kernel = kernels.MulRows(WIDTH=op.x.width, X_STRIDE=x.stride, Y_STRIDE=op.out.width, delivered=to.delivered)
    launch = kernel.launch(by_value(op.x.width, rows), x=x, weight=weight, y=to.y, blocks=to.y_blocks)
    low.dispatch("weigh", rows, [launch])


def mix(low: Lowering, op: Mix) -> None:
    x, own, rows = low.floats(op.x), op.coefficients, op.x.rows
    shares, stride = (low.floats(own), own.width) if isinstance(own, Value) else (low.vector(own), 0)
    base, y = low.optional(op.base), low.make(op.out)
    kernel = kernels.MixSlices(
        WIDTH=op.x.width // op.slices, SLICES=op.slices, X_STRIDE=x.stride, C_STRIDE=stride, Y_STRIDE=y.stride,
        HAS_BASE=op.base is not None,
    )  # fmt: skip
    low.dispatch("mix", rows, [kernel.launch(by_value(y.stride, rows), x=x, coefficients=shares, base=base, y=y)])


def blend(low: Lowering, op: Blend) -> None:
    x, last, y, rows = low.floats(op.x), low.floats(op.last), low.make(op.out), op.x.rows
    kernel = kernels.BlendSlices(
        WIDTH=op.last.width, SLICES=op.x.width // op.last.width, X_STRIDE=x.stride, L_STRIDE=last.stride,
        Y_STRIDE=y.stride, EPS=float(op.eps),
    )  # fmt: skip
    low.dispatch("blend", rows, [kernel.launch(by_row(1, rows), x=x, last=last, weight=low.vector(op.weight), y=y)])


def hyper_connection(low: Lowering, op: HyperConnection) -> None:
    x, y, rows, scale, bias = low.floats(op.x), low.make(op.out), op.x.rows, low.vector(op.scale), low.vector(op.bias)
    kernel = kernels.HyperConnectionStreams(
        SLICES=op.streams, PARTS=op.parts, X_STRIDE=x.stride, Y_STRIDE=y.stride, EPS=float(op.eps),
        MAGNITUDE=float(op.magnitude), WRITTEN_EPS=float(op.written_eps), ITERATIONS=op.iterations,
    )  # fmt: skip
    low.dispatch("connect", rows, [kernel.launch(by_row(1, rows), x=x, scale=scale, bias=bias, y=y)])


def match(low: Lowering, op: Match) -> None:
    x, like, y, rows = low.floats(op.x), low.floats(op.like), low.make(op.out), op.x.rows
    kernel = kernels.MatchSlices(
        WIDTH=op.x.width // op.groups, L_WIDTH=like.stride, X_STRIDE=x.stride, Y_STRIDE=y.stride, EPS=float(op.eps)
    )
    low.dispatch("match", rows, [kernel.launch(by_row(op.groups, rows), x=x, like=like, y=y)])


def gaussian_top_k(low: Lowering, op: GaussianTopK) -> None:
    x, y, rows = low.floats(op.x), low.make(op.out), op.x.rows
    kernel = kernels.GaussianTopKRows(
        WIDTH=op.x.width, X_STRIDE=x.stride, Y_STRIDE=y.stride, FACTOR=float(op.deviations)
    )
    low.dispatch("excess", rows, [kernel.launch(by_row(1, rows), x=x, y=y)])
