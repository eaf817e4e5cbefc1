"""Explicit SIMD as Python expressions: a kernel is a Python function that emits LLVM IR through these classes.

`Function` builds one C function over 64-bit arguments; `Value` wraps an LLVM value and gives it operators. A Python
`for` unrolls, `f.loop` loops, `f.var` is a mutable register. Floating-point operations are emitted one by one with no
fast-math flags. So a kernel is the same sequence of IEEE operations on every instruction set, and results are
bit-equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from localllm.backends.cpu.builder import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    POINTER,
    Builder,
    Value,
    Variable,
    element_of,
    vector,
    vector_constant,
)

__all__ = [
    "F16",
    "F32",
    "I8",
    "I16",
    "I32",
    "I64",
    "LANES",
    "POINTER",
    "Function",
    "Value",
    "Variable",
    "vector",
    "vector_constant",
]


class Function(Builder):
    """Builder of a function `int64 name(int64 ...)` in a new module, with the arithmetic of its vectors."""

    # -- lanes -----------------------------------------------------------------------------------------------------

    def splat(self, scalar: Value, lanes: int = LANES) -> Value:
        type_ = vector(scalar.type, lanes)
        one = self.builder.insert_element(ir.Constant(type_, ir.Undefined), scalar.ir, I32(0))
        mask = vector_constant(I32, [0] * lanes)
        return Value(self, self.builder.shuffle_vector(one, ir.Constant(type_, ir.Undefined), mask))

    def broadcast(self, pointer: Value, type_: ir.Type, lanes: int = LANES) -> Value:
        """Load one scalar into every lane."""
        return self.splat(self.load(pointer, type_, 4 if type_ in (F32, I32) else 1), lanes)

    def store_lanes(self, pointer: Value, value: Value, lanes: int) -> None:
        """Store the first `lanes` of a vector. The memory after them does not change."""
        if lanes == value.type.count:
            self.store(pointer, value)
            return
        for lane in range(lanes):
            self.store(pointer + lane * (4 if element_of(value.type) == F32 else 2), self.lane(value, lane))

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        mask = vector_constant(I32, lanes)
        return Value(self, self.builder.shuffle_vector(a.ir, b.ir, mask))

    def lane(self, value: Value, index: int) -> Value:
        return Value(self, self.builder.extract_element(value.ir, I32(index)))

    def lane_numbers(self, lanes: int = LANES) -> Value:
        return Value(self, vector_constant(I32, range(lanes)))

    def reduce(self, value: Value, combine: object) -> Value:
        """Reduce the lanes to one scalar by halves (lane i with lane i + n/2, and so on), always in the same order."""
        assert callable(combine)
        n = value.type.count
        while n > 1:
            n //= 2
            low = self.shuffle(value, value, range(n))
            high = self.shuffle(value, value, range(n, 2 * n))
            value = combine(low, high)
        return self.lane(value, 0)

    def lane_at(self, value: Value, index: Value) -> Value:
        """Return lane number `index`."""
        return Value(self, self.builder.extract_element(value.ir, index.ir))

    def lookup_nibbles(self, table: Sequence[int], value: Value) -> tuple[Value, Value]:
        """Return table[value & 15] and table[value >> 4] for 16 bytes `table` and u8 x 64."""
        if not self.isa.byte_permute:
            return self._lookup(table, value & 15), self._lookup(table, value >> 4)
        # A permutation ignores two upper bits of an index, and with four copies of the table the other two: no masks.
        high = self.bits(self.bits(value, vector(I32)) >> 4, value.type)
        return self.lookup_long([*table] * 4, value, None), self.lookup_long([*table] * 4, high, None)

    def _lookup(self, table: Sequence[int], index: Value) -> Value:
        """Return table[index] for 16 bytes `table` and u8 x 64 indices below 16."""
        name, lanes = {
            "vnni512": ("llvm.x86.avx512.pshuf.b.512", 64),
            "vnni256": ("llvm.x86.avx2.pshuf.b", 32),
            "maddubs": ("llvm.x86.avx2.pshuf.b", 32),
            "sdot": ("llvm.aarch64.neon.tbl1.v16i8", 16),
            "plain": ("", 64),
        }[self.isa.dot]
        if not name:
            out = self.zeros(index.type)
            for number, entry in enumerate(table):
                out = self.select(index.equals(number), self.constant(index.type, entry), out)
            return out
        type_ = vector(I8, lanes)
        entries = Value(self, vector_constant(I8, [*table] * (lanes // 16)))
        parts = []
        for first in range(0, 64, lanes):
            part = self.shuffle(index, index, range(first, first + lanes))
            parts.append(self._call(name, type_, [entries.ir, part.ir]))
        return self.join(parts)

    def lookup_long(self, table: Sequence[int], low: Value, high: Value | None) -> Value:
        """Return table[256 * high + low] for a table of bytes and u8 x 64 indices; requires `isa.byte_permute`.

        A table of 64 or 128 bytes ignores the upper bits of `low`.
        """
        assert self.isa.byte_permute
        type_ = vector(I8, 64)
        if len(table) == 64:
            entries = vector_constant(I8, table)
            return self._call("llvm.x86.avx512.permvar.qi.512", type_, [entries, low.ir])
        parts = []
        for first in range(0, len(table), 128):
            halves = [vector_constant(I8, [int(x) for x in table[at : at + 64]]) for at in (first, first + 64)]
            parts.append(self._call("llvm.x86.avx512.vpermi2var.qi.512", type_, [halves[0], low.ir, halves[1]]))
        if len(parts) == 1:
            return parts[0]
        parts = [self.select(low < 0, b, a) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        bit = 1
        while len(parts) > 1:
            assert high is not None
            here = (high & bit).differs(0)
            parts = [self.select(here, b, a) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            bit *= 2
        return parts[0]

    def shift_bytes(self, value: Value, shifts: Sequence[int]) -> Value:
        """Set byte i of every int32 lane to the 8 bits that start at bit shifts[i]; requires `isa.byte_permute`.

        A field that crosses the end of a lane takes bits of the next lane, so the caller must mask the result.
        """
        assert self.isa.byte_permute
        type_ = vector(I8, 64)
        control = vector_constant(I8, [(shifts[n % 4] + 32 * (n // 4 % 2)) % 64 for n in range(64)])
        return self._call("llvm.x86.avx512.pmultishift.qb.512", type_, [control, value.ir])

    def merge_bits(self, mask: int, a: Value, b: Value) -> Value:
        """Return the bits of `a` in the bits of `mask` of every byte (u8 x 64), and the bits of `b` in the others."""
        if not self.isa.byte_permute:
            return (a & mask) | (b & ~mask)
        # LLVM forgets that the two masks are complements, and emits two instructions.
        type_ = vector(I64, 8)
        masks = self.bits(self.constant(a.type, mask), type_)
        values = [x.ir for x in (masks, self.bits(a, type_), self.bits(b, type_))]
        return self.bits(self._call("llvm.x86.avx512.pternlog.q.512", type_, [*values, I32(0xCA)]), a.type)

    def table(self, name: str, numbers: Sequence[int], element: ir.Type = I32) -> Value:
        """Return the address of constant integers that are stored with the kernel."""
        found = self.module.globals.get(name)
        if found is None:
            type_ = ir.ArrayType(element, len(numbers))
            found = ir.GlobalVariable(self.module, type_, name=name)
            found.global_constant, found.linkage, found.align = True, "internal", 64
            found.initializer = ir.Constant(type_, [element(number) for number in numbers])
        return Value(self, found)

    def buffer(self, size: int) -> Value:
        """Return the address of `size` bytes on the stack that the compiler cannot optimize away.

        With `keep_order` between a store and a load, the compiler keeps both.
        """
        slot = self._entry.alloca(ir.ArrayType(I8, size))
        slot.align = 64
        return Value(self, self._entry.asm(ir.FunctionType(POINTER, [POINTER]), "", "=r,0", [slot], False))

    def fetch(self, table: Value, element: ir.Type, indices: Sequence[Value]) -> Value:
        """Return table[index] for unsigned scalars as one vector. Single loads are used: gathers take twice as long."""
        step = 128 // element.width  # lanes of a register that single loads can fill
        parts = []
        for first in range(0, len(indices), step):
            part = ir.Constant(vector(element, step), ir.Undefined)
            for lane, index in enumerate(indices[first : first + step]):
                at = self.builder.gep(table.ir, [self.widen(index, I64).ir], source_etype=element)
                part = self.builder.insert_element(part, self.builder.load(at, typ=element, align=1), I32(lane))
            parts.append(Value(self, part))
        return self.join(parts)

    def _call(self, name: str, result: ir.Type, arguments: list[ir.Value]) -> Value:
        """Call an LLVM intrinsic by its full name."""
        kind = ir.FunctionType(result, [a.type for a in arguments])
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name=name)
        return Value(self, self.builder.call(function, arguments))

    def join(self, parts: Sequence[Value]) -> Value:
        """Concatenate vectors. Their number must be a power of two."""
        while len(parts) > 1:
            n = parts[0].type.count
            parts = [self.shuffle(a, b, range(2 * n)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def _intrinsic(self, name: str, *values: Value) -> Value:
        type_ = values[0].type
        suffix = f"v{type_.count}" if isinstance(type_, ir.VectorType) else ""
        suffix += {F32: "f32", I32: "i32", I16: "i16", I8: "i8"}[element_of(type_)]
        kind = ir.FunctionType(type_, [v.type for v in values])
        name = f"{name}.{suffix}"
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name=name)
        return Value(self, self.builder.call(function, [v.ir for v in values]))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return a * b + c, rounded once."""
        return self._intrinsic("llvm.fma", a, b, c)

    def sqrt(self, x: Value) -> Value:
        return self._intrinsic("llvm.sqrt", x)

    def abs(self, x: Value) -> Value:
        return self._intrinsic("llvm.fabs", x)

    def round_even(self, x: Value) -> Value:
        return self._intrinsic("llvm.roundeven", x)

    def fmax(self, a: Value, b: Value) -> Value:
        """Return the larger value of each lane, and b if either is NaN."""
        return self.select(a > b, a, b)

    def fmin(self, a: Value, b: Value) -> Value:
        return self.select(a < b, a, b)

    def to_float(self, x: Value) -> Value:
        type_ = vector(F32, x.type.count) if isinstance(x.type, ir.VectorType) else F32
        return Value(self, self.builder.sitofp(x.ir, type_))

    def to_int32(self, x: Value) -> Value:
        type_ = vector(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32
        return Value(self, self.builder.fptosi(x.ir, type_))

    def truncate(self, x: Value, element: ir.Type) -> Value:
        type_ = vector(element, x.type.count) if isinstance(x.type, ir.VectorType) else element
        return Value(self, self.builder.trunc(x.ir, type_))

    def bits(self, x: Value, type_: ir.Type) -> Value:
        return Value(self, self.builder.bitcast(x.ir, type_))

    def widen(self, x: Value, element: ir.Type, signed: bool = False) -> Value:
        type_ = vector(element, x.type.count) if isinstance(x.type, ir.VectorType) else element
        return Value(self, (self.builder.sext if signed else self.builder.zext)(x.ir, type_))

    # -- half precision --------------------------------------------------------------------------------------------

    def load_half(self, pointer: Value, lanes: int = LANES) -> Value:
        """Load half-precision values as float32. The conversion is exact."""
        return self.half_bits(self.load(pointer, vector(I16, lanes)))

    def half_bits(self, bits: Value) -> Value:
        """Convert int16 lanes that hold half-precision bits to float32. The conversion is exact."""
        lanes = bits.type.count
        if self.isa.half_conversion:
            halves = self.builder.bitcast(bits.ir, vector(F16, lanes))
            return Value(self, self.builder.fpext(halves, vector(F32, lanes)))
        wide = self.widen(bits, I32)
        # A product changes the exponent bias from 15 to 127; it is exact for subnormals too.
        magnitude = self.bits((wide & 0x7FFF) << 13, vector(F32, lanes)) * 2.0**112
        special = self.bits(((wide & 0x7FFF) << 13) | 0x7F800000, vector(F32, lanes))
        value = self.select((wide & 0x7C00).equals(0x7C00), special, magnitude)
        return self.bits(self.bits(value, vector(I32, lanes)) | ((wide & 0x8000) << 16), vector(F32, lanes))

    def load_bfloat(self, pointer: Value, lanes: int = LANES) -> Value:
        wide = self.widen(self.load(pointer, vector(I16, lanes)), I32)
        return self.bits(wide << 16, vector(F32, lanes))

    def to_bfloat(self, x: Value) -> Value:
        """Round float32 to the nearest BF16 value, ties to even, as int32 whose lower half is zero. NaN stays NaN."""
        bits = self.bits(x, vector(I32, x.type.count))
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        return self.select(x.equals(x), rounded, bits | 0x400000) & -0x10000

    def half_of(self, x: Value) -> Value:
        """Round a scalar as `to_half` does."""
        return self.lane(self.to_half(self.splat(x)), 0)

    def to_half(self, x: Value) -> Value:
        """Round float32 to half precision (int16 bits), ties to even. Values beyond the range become 65504."""
        lanes = x.type.count
        limit = self.constant(x.type, 65504.0)
        x = self.fmax(self.fmin(x, limit), self.constant(x.type, -65504.0))
        if self.isa.half_conversion:
            return self.bits(Value(self, self.builder.fptrunc(x.ir, vector(F16, lanes))), vector(I16, lanes))
        bits = self.bits(x, vector(I32, lanes))
        sign = (bits >> 16) & 0x8000
        magnitude = bits & 0x7FFFFFFF
        # Normal: round the 13 dropped bits half to even in integers. Subnormal: adding 0.5 rounds at 2^-24.
        odd = (magnitude >> 13) & 1
        normal = ((magnitude + 0xFFF + odd) >> 13) - (112 << 10)
        small = self.bits(self.bits(magnitude, vector(F32, lanes)) + 0.5, vector(I32, lanes)) - 0x3F000000
        half = self.select(magnitude < 0x38800000, small, normal)
        return self.truncate(half | sign, I16)
