"""Sixteen float32 lanes as one value in Numba: `Lanes`, and `Mask`, the result of comparing two `Lanes`.

    + - * / and unary -     lane by lane, each rounded once; LLVM neither fuses nor reorders them
    < > <= >= ==            a Mask; & | ~ combine masks
    splat                   a number in all lanes
    load store              lanes from and to row i of a C-contiguous float32 (n, 16)
    store_bytes             integers as bytes, modulo 256, to row i of a C-contiguous uint8 (n, 16)
    fields                  the same four bits of each of 16 consecutive integers, as floats
    pick least most absolute root rint nearest any_lane lowest numbers

A search processes one block per lane. Sums therefore run in the order of a plain loop over one block, with results
bit-equal to scalar code. Instruction sets with shorter vectors use several vectors per Lanes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

LANES = 16
Lanes = Any  # Python name of the type `lanes`, whose values only exist in compiled code
Mask = Any
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)


class _Vector(types.Type):
    """A Numba type that is one LLVM vector."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)


class LanesType(_Vector):
    pass


class MaskType(_Vector):
    pass


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


@register_model(MaskType)
class _MaskModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _BITS)


lanes, mask = LanesType("float32x16"), MaskType("boolx16")


def _operator(function: Any, arguments: tuple[Any, ...], result: Any, emit: Callable[[Any, Any], Any]) -> None:
    """Register an operator on vectors with Numba; `emit(builder, values)` writes the instruction."""

    @infer_global(function)
    class Template(AbstractTemplate):
        key = function

        def generic(self, args: Any, kws: Any) -> Any:
            return signature(result, *arguments) if args == arguments else None

    @lower_builtin(function, *arguments)
    def lower(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return emit(builder, values)


_operator(operator.add, (lanes, lanes), lanes, lambda b, v: b.fadd(*v))
_operator(operator.sub, (lanes, lanes), lanes, lambda b, v: b.fsub(*v))
_operator(operator.mul, (lanes, lanes), lanes, lambda b, v: b.fmul(*v))
_operator(operator.truediv, (lanes, lanes), lanes, lambda b, v: b.fdiv(*v))
_operator(operator.neg, (lanes,), lanes, lambda b, v: b.fneg(v[0]))
_operator(operator.lt, (lanes, lanes), mask, lambda b, v: b.fcmp_ordered("<", *v))
_operator(operator.gt, (lanes, lanes), mask, lambda b, v: b.fcmp_ordered(">", *v))
_operator(operator.le, (lanes, lanes), mask, lambda b, v: b.fcmp_ordered("<=", *v))
_operator(operator.ge, (lanes, lanes), mask, lambda b, v: b.fcmp_ordered(">=", *v))
_operator(operator.eq, (lanes, lanes), mask, lambda b, v: b.fcmp_ordered("==", *v))
_operator(operator.and_, (mask, mask), mask, lambda b, v: b.and_(*v))
_operator(operator.or_, (mask, mask), mask, lambda b, v: b.or_(*v))
_operator(operator.invert, (mask,), mask, lambda b, v: b.not_(v[0]))


def _splat(builder: Any, scalar: Any, kind: Any = _FLOATS) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_INTS, [0] * LANES))


def _row(context: Any, builder: Any, array_type: Any, array: Any, row: Any, vector: Any) -> Any:
    """Return a vector pointer to row `row` of an array (n, 16)."""
    data = context.make_array(array_type)(context, builder, array).data
    first = builder.mul(row, ir.Constant(row.type, LANES))
    return builder.bitcast(builder.gep(data, [first]), vector.as_pointer())


def _call(builder: Any, name: str, *values: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(values))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), values)


@intrinsic
def splat(typing: Any, x: Any) -> Any:
    return lanes(types.float32), lambda c, b, s, v: _splat(b, v[0])


@intrinsic
def load_lanes(typing: Any, array: Any, row: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        vector = builder.load(_row(context, builder, sig.args[0], values[0], values[1], _FLOATS))
        vector.align = 4
        return vector

    return lanes(array, types.intp), emit


@intrinsic
def store(typing: Any, array: Any, row: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        builder.store(values[2], _row(context, builder, sig.args[0], values[0], values[1], _FLOATS)).align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), emit


@intrinsic
def store_bytes(typing: Any, array: Any, row: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        data = builder.trunc(builder.fptosi(values[2], _INTS), _BYTES)
        builder.store(data, _row(context, builder, sig.args[0], values[0], values[1], _BYTES)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), emit


@intrinsic
def fields(typing: Any, array: Any, first: Any, which: Any) -> Any:
    """Return bits 4 * which ... 4 * which + 3 of elements first ... first + 15 of a C-contiguous int32 array."""

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        words = builder.load(builder.bitcast(builder.gep(data, [values[1]]), _INTS.as_pointer()))
        words.align = 4
        bits = builder.mul(builder.trunc(values[2], ir.IntType(32)), ir.Constant(ir.IntType(32), 4))
        moved = builder.lshr(words, _splat(builder, bits, _INTS))
        return builder.sitofp(builder.and_(moved, ir.Constant(_INTS, [15] * LANES)), _FLOATS)

    return lanes(array, types.intp, types.intp), emit


@intrinsic
def numbers(typing: Any) -> Any:
    """Return 0, 1, ... 15."""
    return lanes(), lambda c, b, s, v: ir.Constant(_FLOATS, [float(i) for i in range(LANES)])


@intrinsic
def pick(typing: Any, which: Any, yes: Any, no: Any) -> Any:
    """Return `yes` in the lanes where the mask is set, and `no` in the others."""
    return lanes(mask, lanes, lanes), lambda c, b, s, v: b.select(*v)


@intrinsic
def least(typing: Any, a: Any, bound: Any) -> Any:
    """Return the smaller of two; `bound` where `a` is NaN."""
    return lanes(lanes, lanes), lambda c, b, s, v: b.select(b.fcmp_ordered("<", *v), *v)


@intrinsic
def most(typing: Any, a: Any, bound: Any) -> Any:
    """Return the larger of two; `bound` where `a` is NaN."""
    return lanes(lanes, lanes), lambda c, b, s, v: b.select(b.fcmp_ordered(">", *v), *v)


@intrinsic
def absolute(typing: Any, a: Any) -> Any:
    return lanes(lanes), lambda c, b, s, v: _call(b, "fabs", v[0])


@intrinsic
def root(typing: Any, a: Any) -> Any:
    return lanes(lanes), lambda c, b, s, v: _call(b, "sqrt", v[0])


@intrinsic
def rint(typing: Any, a: Any) -> Any:
    """Round to the nearest integers, halves to even."""
    return lanes(lanes), lambda c, b, s, v: _call(b, "nearbyint", v[0])


@intrinsic
def nearest(typing: Any, a: Any) -> Any:
    """Round like `rint` below 2**22; above, return the mantissa bits of ggml's rounding trick, as signed integers.

    The searches divide by sums that cancel. The quotient can be arbitrarily large, so the stored bytes depend on
    how ggml rounds large values.
    """

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        moved = builder.fadd(values[0], ir.Constant(_FLOATS, [12582912.0] * LANES))  # 1.5 * 2**23
        low = builder.and_(builder.bitcast(moved, _INTS), ir.Constant(_INTS, [0x7FFFFF] * LANES))
        return builder.sitofp(builder.sub(low, ir.Constant(_INTS, [0x400000] * LANES)), _FLOATS)

    return lanes(lanes), emit


@intrinsic
def any_lane(typing: Any, which: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        bits = builder.bitcast(values[0], ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return types.boolean(mask), emit


@intrinsic
def lowest(typing: Any, a: Any) -> Any:
    """Return the smallest lane value; no lane may be NaN."""

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        left = values[0]
        for distance in (8, 4, 2, 1):
            order = ir.Constant(_INTS, [(i + distance) % LANES for i in range(LANES)])
            right = builder.shuffle_vector(left, left, order)
            left = builder.select(builder.fcmp_ordered("<", left, right), left, right)
        return builder.extract_element(left, ir.Constant(ir.IntType(32), 0))

    return types.float32(lanes), emit
