"""Builds a kernel's LLVM IR: values, constants, control flow, memory access, and thread synchronization."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from llvmlite import ir

from localllm.backends.cpu.isa import Isa

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()
LANES = 16  # rows of a panel, and lanes of a vector value, on every instruction set


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def element_of(type_: ir.Type) -> ir.Type:
    return type_.element if isinstance(type_, ir.VectorType) else type_


def vector_constant(element: ir.Type, numbers: Sequence[float]) -> ir.Constant:
    """Return a constant vector. Equal vectors are one object, because llvmlite is slow to make and to print them."""
    if isinstance(element, ir.IntType):
        return _vector_constant(element, tuple(numbers))
    return _vector_constant(element, tuple(float(number).hex() for number in numbers))  # 0.0 == -0.0


@lru_cache(4096)
def _vector_constant(element: ir.Type, numbers: tuple[int | str, ...]) -> ir.Constant:
    each = {x: ir.Constant(element, float.fromhex(x) if isinstance(x, str) else x) for x in numbers}
    return ir.Constant(vector(element, len(numbers)), [each[x] for x in numbers])


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An LLVM value in the function `f`.

    Integers are signed; a Python number as the other operand becomes a constant.
    """

    f: Builder
    ir: ir.Value

    @property
    def type(self) -> ir.Type:
        return self.ir.type

    def _other(self, other: Value | float) -> ir.Value:
        return other.ir if isinstance(other, Value) else self.f.constant(self.type, other).ir

    def _binary(self, other: Value | float, integer: str, real: str | None) -> Value:
        name = integer if isinstance(element_of(self.type), ir.IntType) else real
        assert name is not None, f"no such operation on {self.type}"
        return Value(self.f, getattr(self.f.builder, name)(self.ir, self._other(other)))

    def __add__(self, other: Value | float) -> Value:
        if isinstance(self.type, ir.PointerType):
            offset = other.ir if isinstance(other, Value) else ir.Constant(I64, int(other))
            return Value(self.f, self.f.builder.gep(self.ir, [offset], source_etype=I8))
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Value | float) -> Value:
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: Value | float) -> Value:
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other: Value) -> Value:
        return self._binary(other, "sdiv", "fdiv")

    def __floordiv__(self, other: Value | int) -> Value:
        """Divide non-negative integers, rounding down."""
        return self._binary(other, "udiv", None)

    def __mod__(self, other: Value | int) -> Value:
        return self._binary(other, "urem", None)

    def __and__(self, other: Value | int) -> Value:
        return self._binary(other, "and_", None)

    def __or__(self, other: Value | int) -> Value:
        return self._binary(other, "or_", None)

    def __xor__(self, other: Value | int) -> Value:
        return self._binary(other, "xor", None)

    def __lshift__(self, other: int) -> Value:
        return self._binary(other, "shl", None)

    def __rshift__(self, other: int) -> Value:
        """Shift right logically: zeros enter from the left."""
        return self._binary(other, "lshr", None)

    def sra(self, bits: int) -> Value:
        """Shift right arithmetically."""
        return self._binary(bits, "ashr", None)

    def _compare(self, operator: str, other: Value | float) -> Value:
        b = self.f.builder
        compare = b.icmp_signed if isinstance(element_of(self.type), ir.IntType) else b.fcmp_ordered
        return Value(self.f, compare(operator, self.ir, self._other(other)))

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Value | float) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Value | float) -> Value:
        return self._compare("==", other)

    def differs(self, other: Value | float) -> Value:
        return self._compare("!=", other)


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """A mutable variable, which LLVM turns into SSA values."""

    f: Builder
    slot: ir.Value
    type: ir.Type

    def get(self) -> Value:
        return Value(self.f, self.f.builder.load(self.slot, typ=self.type))

    def set(self, value: Value) -> None:
        assert value.type == self.type, f"{value.type} put into {self.type}"
        self.f.builder.store(value.ir, self.slot)


class Builder:
    """Builder of a function `int64 name(int64 ...)` in a new module."""

    def __init__(self, name: str, arguments: int, isa: Isa) -> None:
        self.isa = isa
        self.module = ir.Module(name=name)
        self.function = ir.Function(self.module, ir.FunctionType(I64, [I64] * arguments), name=name)
        if isa.dot == "vnni512":
            # Without this, LLVM spills 64-byte registers to addresses that cross cache lines.
            self.function.attributes.alignstack = 64
            self.function.attributes.add("nounwind")  # llvmlite omits `alignstack` if it is the only attribute
        self._entry = ir.IRBuilder(self.function.append_basic_block("entry"))
        body = self.function.append_basic_block("body")
        self.builder = ir.IRBuilder(body)
        self._body = body
        self.arguments = tuple(Value(self, a) for a in self.function.args)

    def finish(self, result: int | Value = 0) -> ir.Module:
        self.builder.ret(result.ir if isinstance(result, Value) else ir.Constant(I64, result))
        self._entry.branch(self._body)
        return self.module

    # -- constants, variables, control flow ------------------------------------------------------------------------

    def constant(self, type_: ir.Type, number: float) -> Value:
        element = element_of(type_)
        number = int(number) if isinstance(element, ir.IntType) else float(number)
        if isinstance(type_, ir.VectorType):
            return Value(self, vector_constant(element, [number] * type_.count))
        return Value(self, ir.Constant(type_, number))

    def i64(self, number: int) -> Value:
        return self.constant(I64, number)

    def zeros(self, type_: ir.Type) -> Value:
        return self.constant(type_, 0)

    def var(self, value: Value) -> Variable:
        slot = self._entry.alloca(value.type)
        variable = Variable(self, slot, value.type)
        variable.set(value)
        return variable

    def array(self, element: ir.Type, count: int) -> Value:
        """Return a pointer to `count` uninitialized elements on the stack."""
        slot = self._entry.alloca(ir.ArrayType(element, count))
        slot.align = 64
        # llvmlite stores any type only through an opaque pointer
        return Value(self, self._entry.inttoptr(self._entry.ptrtoint(slot, I64), POINTER))

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """Emit the loop `for i in range(start, stop, step)` over int64."""
        first = start if isinstance(start, Value) else self.i64(start)
        i = self.var(first)
        with self.while_(lambda: i.get() < stop):
            now = i.get()
            yield now
            i.set(now + step)

    @contextmanager
    def while_(self, condition: object) -> Iterator[None]:
        assert callable(condition)
        test = self.function.append_basic_block("test")
        body = self.function.append_basic_block("loop")
        done = self.function.append_basic_block("done")
        self.builder.branch(test)
        self.builder.position_at_end(test)
        self.builder.cbranch(condition().ir, body, done)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(test)
        self.builder.position_at_end(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.ir):
            yield

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, self.builder.select(condition.ir, yes.ir, no.ir))

    def minimum(self, a: Value, b: Value | int) -> Value:
        """Return the smaller of two int64 values."""
        other = b if isinstance(b, Value) else self.i64(b)
        return self.select(a < other, a, other)

    # -- memory ----------------------------------------------------------------------------------------------------

    def pointer(self, address: Value) -> Value:
        return Value(self, self.builder.inttoptr(address.ir, POINTER))

    def load(self, pointer: Value, type_: ir.Type, align: int = 1) -> Value:
        return Value(self, self.builder.load(pointer.ir, align=align, typ=type_))

    def store(self, pointer: Value, value: Value, align: int = 1) -> None:
        self.builder.store(value.ir, pointer.ir, align=align)

    def load_int(self, pointer: Value, index: Value | int = 0) -> Value:
        """Load the int64 at pointer[index]."""
        return self.load(pointer + (index * 8), I64, 8)

    def load_i32(self, pointer: Value, index: Value | int = 0) -> Value:
        """Load the int32 at pointer[index], as int64."""
        return Value(self, self.builder.sext(self.load(pointer + (index * 4), I32, 4).ir, I64))

    def prefetch(self, pointer: Value, locality: int = 3) -> None:
        """Prefetch a cache line into L1 (3) or only into L2 (2)."""
        function = self.module.declare_intrinsic(
            "llvm.prefetch", [POINTER], ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        )
        self.builder.call(function, [pointer.ir, I32(0), I32(locality), I32(1)])

    def keep_order(self) -> None:
        """Emit a compiler barrier: no load or store moves across this point. It costs no instruction."""
        self.builder.fence("seq_cst", targetscope="singlethread")

    # -- threads ---------------------------------------------------------------------------------------------------

    def clock(self) -> Value:
        """Emit a read of the time-stamp counter."""
        ticks = self.module.declare_intrinsic("llvm.readcyclecounter", (), ir.FunctionType(I64, []))
        return Value(self, self.builder.call(ticks, []))

    def atomic_add(self, pointer: Value, value: Value | int) -> Value:
        """Emit a sequentially consistent fetch-and-add on an int64."""
        added = value if isinstance(value, Value) else self.i64(value)
        return Value(self, self.builder.atomic_rmw("add", pointer.ir, added.ir, "seq_cst"))

    def atomic_load(self, pointer: Value) -> Value:
        return Value(self, self.builder.load_atomic(pointer.ir, "acquire", 8, typ=I64))

    def atomic_store(self, pointer: Value, value: Value) -> None:
        self.builder.atomic_rmw("xchg", pointer.ir, value.ir, "seq_cst")  # llvmlite stores only through typed pointers

    def pause(self) -> None:
        if self.isa.pause:
            kind = ir.FunctionType(ir.VoidType(), [])
            function = self.module.globals.get(self.isa.pause) or ir.Function(self.module, kind, name=self.isa.pause)
            self.builder.call(function, [])

    def call(self, address: Value, *arguments: Value) -> Value:
        """Emit a call of the C function at `address` with int64 arguments."""
        kind = ir.FunctionType(I64, [I64] * len(arguments))
        function = self.builder.inttoptr(address.ir, kind.as_pointer())
        return Value(self, self.builder.call(function, [a.ir for a in arguments]))
