"""Int8 dot products per lane. Only this operation is written separately for each instruction set.

`small` multiplies bytes 0..127 by signed bytes. `biased` multiplies bytes that encode q = byte - 128; if
`biased_needs_offset`, the caller subtracts 128 * sum(x). `Sum` adds up these products over a group of values and
multiplies the sum by the group's integer scale. `pairs` sums 16-bit products. All instruction sets return the same
integers. `bfloats` multiplies BF16 values like two fused multiply-adds; only one instruction set supports it.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from localllm.backends.cpu.isa import Dot
from localllm.backends.cpu.simd import I8, I16, I32, Function, Value, vector

BYTES, INTS = 64, 16  # bytes and int32 lanes of a vector value
BIASED = 128  # `largest` of biased bytes: the largest magnitude of q; otherwise `largest` is the largest byte
Weight = Callable[[], Value]  # emits the scale of a group in the form of `weight_form`


def small(f: Function, acc: Value, w: Value, x: Value) -> Value:
    """Emit acc[lane] += sum of w[4 lane + i] * x[4 lane + i]; w is within 0..127."""
    return _ROWS[f.isa.dot](f, acc, w, x)


def biased(f: Function, acc: Value, w: Value, x: Value) -> Value:
    """Emit acc[lane] += sum of (w - 128) * x, or of w * x if `biased_needs_offset`."""
    if f.isa.biased_needs_offset:
        return _ROWS[f.isa.dot](f, acc, w, x)
    q = w ^ 0x80
    if f.isa.dot == "sdot":
        return _sdot(f, acc, q, x)
    if f.isa.dot == "plain":
        return _plain(f, acc, q, x, signed=True)
    return _widened(f, acc, _short_sums(f, q, x, signed=True))


class Sum:
    """Sums the products of a group, four per lane at a time, and multiplies the sum by the group's scale if it has one.

    `largest` is the largest byte of the weights, or BIASED. AVX2 sums in int16 until the next sum could overflow, and
    applies the scale when it widens the sums.
    """

    def __init__(self, f: Function, start: Value, largest: int, weight: Weight | None = None) -> None:
        self._f, self._total, self._biased, self._weight = f, start, largest == BIASED, weight
        self._shorts: list[Value] = []
        self._added, self._room = 0, shorts(largest)

    def add(self, w: Value, x: Value) -> None:
        f = self._f
        if f.isa.dot != "maddubs":
            self._total = (biased if self._biased else small)(f, self._total, w, x)
            return
        here = _short_sums(f, w ^ 0x80 if self._biased else w, x, signed=self._biased)
        self._shorts = [a + b for a, b in zip(self._shorts, here, strict=True)] if self._shorts else here
        self._added += 1
        if self._added == self._room:
            self._widen()

    def _widen(self) -> None:
        weight = self._weight() if self._weight is not None else None
        self._total = _widened(self._f, self._total, self._shorts, weight)
        self._shorts, self._added = [], 0

    def total(self) -> Value:
        """Return the sums as int32 x 16."""
        if self._shorts:
            self._widen()
        if self._weight is None or self._f.isa.dot == "maddubs":
            return self._total
        return self._total * self._weight()


def shorts(largest: int) -> int:
    """Return how many two-product sums can be added in int16 without overflow."""
    return 32767 // (2 * 127 * largest)


def bfloats(f: Function, acc: Value, w: Value, x: Value) -> Value:
    """Emit acc + the product of the upper halves of each lane, then + the product of the lower halves.

    Each sum is rounded once to float32, as Intel defines VDPBF16PS and Zen 4 computes it. The result equals two `fma`,
    except that inputs and results below 2^-126 become zero. Requires `isa.bfloat_dot`.
    """
    assert f.isa.bfloat_dot
    return _x86(f, "llvm.x86.avx512bf16.dpbf16ps.512", acc.type, acc, w, x)


def weight_form(f: Function, scale: Value) -> Value:
    """Convert 16-bit scales (int32 x 16) to the form that `Sum` needs: on AVX2 both halves of a lane hold the scale."""
    return pair_products(scale, scale) if f.isa.dot == "maddubs" else scale


def pair_products(low: Value, high: Value) -> Value:
    """Pack two int32 x 16 of 16-bit numbers into the halves of each lane."""
    return (low & 0xFFFF) | (high << 16)


def pairs(f: Function, acc: Value, a: Value, b: Value) -> Value:
    """Emit acc[lane] += a.low * b.low + a.high * b.high; the halves of a lane are signed 16-bit numbers."""
    if f.isa.dot == "vnni512":
        return _vpdpbusd(f, acc, a, b, "llvm.x86.avx512.vpdpwssd.512")
    if f.isa.dot == "vnni256":
        out = []
        for i in range(2):
            t, u, v = (_part(f, value, i, 2) for value in (acc, a, b))
            out.append(_vpdpbusd(f, t, u, v, "llvm.x86.avx512.vpdpwssd.256"))
        return f.join(out)
    if f.isa.dot == "maddubs":
        shorts = f.bits(a, vector(I16, 32))
        return _widened(f, acc, [_part(f, shorts, i, 2) for i in range(2)], b)
    return acc + (a << 16).sra(16) * (b << 16).sra(16) + a.sra(16) * b.sra(16)


def settled(f: Function, x: Value) -> Value:
    """Return x, computed at this point. The compiler cannot regroup sums across it and so delay products (AVX2)."""
    halves = [_part(f, x, i, 2) for i in range(2)]
    kind = ir.FunctionType(halves[0].type, [halves[0].type])
    return f.join([Value(f, f.builder.asm(kind, "", "=x,0", [half.ir], False)) for half in halves])


def _x86(f: Function, name: str, result: ir.Type, *values: Value) -> Value:
    kind = ir.FunctionType(result, [v.type for v in values])
    function = f.module.globals.get(name) or ir.Function(f.module, kind, name=name)
    return Value(f, f.builder.call(function, [v.ir for v in values]))


def _with_sign(f: Function, x: Value, sign: Value) -> Value:
    """Return x, -x or 0 for each byte, depending on whether `sign` is positive, negative or 0 (AVX2)."""
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
    return _widened(f, acc, _short_sums(f, w, x))


def _short_sums(f: Function, w: Value, x: Value, signed: bool = False) -> list[Value]:
    """Return w[2 i] * x[2 i] + w[2 i + 1] * x[2 i + 1] as int16, in two half registers (AVX2)."""
    if signed:  # |w| times x with w's sign; sums stay within 128 * 127 * 2 < 2^15
        w, x = _with_sign(f, w, w), _with_sign(f, x, w)
    halves = [[_part(f, v, i, 2) for v in (w, x)] for i in range(2)]
    return [_x86(f, "llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), *half) for half in halves]


def _widened(f: Function, acc: Value, shorts: list[Value], weight: Value | None = None) -> Value:
    """Return acc + the products of int16 pairs with the pairs of `weight`, one sum per lane (AVX2)."""
    out = []
    for i, short in enumerate(shorts):
        factor = f.constant(short.type, 1) if weight is None else f.bits(_part(f, weight, i, 2), short.type)
        wide = _x86(f, "llvm.x86.avx2.pmadd.wd", vector(I32, 8), short, factor)
        out.append(_part(f, acc, i, 2) + wide)
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
    """Load four consecutive bytes into every lane."""
    return f.bits(f.broadcast(pointer, I32), vector(I8, BYTES))


_ROWS = {"vnni512": _vnni512, "vnni256": _vnni256, "maddubs": _maddubs, "sdot": _sdot, "plain": _plain}
assert set(_ROWS) == set(Dot.__args__)  # type: ignore[attr-defined]
