"""Emitters of operations on several streams of hidden states."""

from __future__ import annotations

from localllm.backends.cpu.arguments import Rows, RowsOrNone
from localllm.backends.cpu.emit.products import NOTHING
from localllm.backends.cpu.kernels import connections
from localllm.backends.cpu.kernels import streams as kernels
from localllm.backends.cpu.kernels.streams import (
    BlendArguments,
    GaussianTopKArguments,
    MatchArguments,
    MixArguments,
    MulArguments,
)
from localllm.backends.cpu.lowering import Lowering
from localllm.backends.cpu.places import BufferOf, CountOf, VectorOf, output_to, rows_in
from localllm.backends.cpu.simd import LANES
from localllm.plan import Blend, GaussianTopK, HyperConnection, Match, Mix, Mul, Value


def mul(low: Lowering, op: Mul) -> None:
    x = low.floats(op.x)
    low.values.release(op.x)
    arguments = MulArguments(
        x=rows_in(x), y=output_to(low.make(op.out)), weight=VectorOf(op.weight, LANES), width=op.out.width,
        rows=CountOf(op.out.rows),
    )  # fmt: skip
    low.call(kernels.mul(), arguments, op.out.rows, "weigh")


def mix(low: Lowering, op: Mix) -> None:
    own, width = op.coefficients, op.x.width // op.slices
    base = NOTHING
    if op.base is not None:
        buffer = low.floats(op.base)
        base = RowsOrNone(address=BufferOf(buffer), stride=buffer.stride)
    arguments = MixArguments(
        x=rows_in(low.floats(op.x)),
        y=output_to(low.make(op.out)),
        coefficients=rows_in(low.floats(own))
        if isinstance(own, Value)
        else Rows(address=VectorOf(own, LANES), stride=0),
        base=base,
        slices=op.slices,
        made=op.out.width // width,
        width=width,
        rows=CountOf(op.out.rows),
    )
    low.call(kernels.mix(), arguments, op.out.rows, "mix")


def blend(low: Lowering, op: Blend) -> None:
    slices = op.x.width // op.last.width
    stride = -(-4 * slices // 64) * 64  # separate cache lines for each thread
    arguments = BlendArguments(
        x=rows_in(low.floats(op.x)), last=rows_in(low.floats(op.last)), y=output_to(low.make(op.out)),
        weight=VectorOf(op.weight, LANES), slices=slices, width=op.last.width, eps=op.eps,
        rows=CountOf(op.out.rows), scratch=Rows(address=low.list(stride * low.threads), stride=stride),
    )  # fmt: skip
    low.call(kernels.blend(), arguments, op.out.rows, "blend")


def hyper_connection(low: Lowering, op: HyperConnection) -> None:
    arguments = connections.HyperConnectionArguments(
        x=rows_in(low.floats(op.x)), y=output_to(low.make(op.out)), scale=VectorOf(op.scale, LANES),
        bias=VectorOf(op.bias, LANES), eps=op.eps, magnitude=op.magnitude, written_eps=op.written_eps,
        iterations=op.iterations, rows=CountOf(op.out.rows),
    )  # fmt: skip
    low.call(connections.hyper_connection(op.streams, op.parts), arguments, op.out.rows, "connect")


def match(low: Lowering, op: Match) -> None:
    arguments = MatchArguments(
        x=rows_in(low.floats(op.x)), like=rows_in(low.floats(op.like)), y=output_to(low.make(op.out)),
        like_width=op.like.width, width=op.x.width // op.groups, groups=op.groups, eps=op.eps,
        rows=CountOf(op.out.rows),
    )  # fmt: skip
    low.call(kernels.match(), arguments, op.out.rows, "match")


def gaussian_top_k(low: Lowering, op: GaussianTopK) -> None:
    x = low.floats(op.x)
    low.values.release(op.x)  # the last pass reads each value before it overwrites it
    arguments = GaussianTopKArguments(
        x=rows_in(x), y=output_to(low.make(op.out)), width=op.out.width, deviations=op.deviations,
        rows=CountOf(op.out.rows),
    )  # fmt: skip
    low.call(kernels.gaussian_top_k(), arguments, op.out.rows, "excess")
