"""Sums of four byte products per lane: the one operation that needs a row per instruction set.

`small`: bytes 0..127 times signed bytes. `biased`: bytes that stand for q = byte - 128, times signed bytes; on a row
with `biased_needs_offset` the caller takes off 128 * sum(x). Every row returns the same integers.
"""

from __future__ import annotations

from llvmlite import ir

from backends.cpu.isa import Dot
from backends.cpu.simd import I8, I16, I32, Function, Value, vector

BYTES, INTS = 64, 16  # a register value: 16 lanes of 4 bytes


def small(f: Function, acc: Value, w: Value, x: Value) -> Value:
    """acc[lane] += sum of w[4 lane + i] * x[4 lane + i]; w in 0..127."""
    return _ROWS[f.isa.dot](f, acc, w, x)


def biased(f: Function, acc: Value, w: Value, x: Value) -> Value:
    """As `small` with w = q + 128; exact, or short of the offset on rows that need it."""
    if f.isa.biased_needs_offset:
        return _ROWS[f.isa.dot](f, acc, w, x)
    q = w ^ 0x80
    if f.isa.dot == "sdot":
        return _sdot(f, acc, q, x)
    if f.isa.dot == "plain":
        return _plain(f, acc, q, x, signed=True)
    # maddubs: |q| times x with q's sign; the pair sums stay within 128 * 127 * 2 < 2^15.
    return _maddubs(f, acc, _with_sign(f, q, q), _with_sign(f, x, q))


def _x86(f: Function, name: str, result: ir.Type, *values: Value) -> Value:
    kind = ir.FunctionType(result, [v.type for v in values])
    function = f.module.globals.get(name) or ir.Function(f.module, kind, name=name)
    return Value(f, f.builder.call(function, [v.ir for v in values]))


def _with_sign(f: Function, x: Value, sign: Value) -> Value:
    """x, -x or 0 byte by byte, as `sign` is positive, negative or 0 (AVX2)."""
    halves = [(_part(f, x, i, 2), _part(f, sign, i, 2)) for i in range(2)]
    return f.join([_x86(f, "llvm.x86.avx2.psign.b", vector(I8, 32), a, b) for a, b in halves])


def _part(f: Function, x: Value, part: int, parts: int) -> Value:
    n = x.type.count // parts
    return f.shuffle(x, x, range(part * n, part * n + n))


def _vnni512(f: Function, acc: Value, w: Value, x: Value) -> Value:
    return _vpdpbusd(f, acc, w, x, "llvm.x86.avx512.vpdpbusd.512")


def _vnni256(f: Function, acc: Value, w: Value, x: Value) -> Value:
    out = []
    for i in range(2):
        a, u, s = (_part(f, v, i, 2) for v in (acc, w, x))
        out.append(_vpdpbusd(f, a, u, s, "llvm.x86.avx512.vpdpbusd.256"))
    return f.join(out)


def _vpdpbusd(f: Function, acc: Value, w: Value, x: Value, name: str) -> Value:
    return _x86(f, name, acc.type, acc, w, x)


def _maddubs(f: Function, acc: Value, w: Value, x: Value) -> Value:
    out = []
    for i in range(2):
        a, u, s = (_part(f, v, i, 2) for v in (acc, w, x))
        pairs = _x86(f, "llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), u, s)
        ones = f.constant(vector(I16, 16), 1)
        out.append(a + _x86(f, "llvm.x86.avx2.pmadd.wd", vector(I32, 8), pairs, ones))
    return f.join(out)


def _sdot(f: Function, acc: Value, w: Value, x: Value) -> Value:
    out = []
    for i in range(4):
        a, u, s = (_part(f, v, i, 4) for v in (acc, w, x))
        out.append(_x86(f, "llvm.aarch64.neon.sdot.v4i32.v16i8", vector(I32, 4), a, u, s))
    return f.join(out)


def _plain(f: Function, acc: Value, w: Value, x: Value, signed: bool = False) -> Value:
    for i in range(4):
        lanes = range(i, BYTES, 4)
        a = f.widen(f.shuffle(w, w, lanes), I32, signed=signed)
        b = f.widen(f.shuffle(x, x, lanes), I32, signed=True)
        acc = acc + a * b
    return acc


def broadcast4(f: Function, pointer: Value) -> Value:
    """Four consecutive bytes of memory in every lane."""
    return f.bits(f.broadcast(pointer, I32), vector(I8, BYTES))


_ROWS = {"vnni512": _vnni512, "vnni256": _vnni256, "maddubs": _maddubs, "sdot": _sdot, "plain": _plain}
assert set(_ROWS) == set(Dot.__args__)  # type: ignore[attr-defined]
