"""Argument structs of kernels: layout, checks and packing in Python, and the values that a kernel reads."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import pytest

from localllm.backends.cpu import isa
from localllm.backends.cpu.arguments import (
    SLOT,
    AddressOrZero,
    Apart,
    Float32,
    Int64,
    Output,
    Place,
    Rows,
    RowsOrNone,
    Struct,
    Target,
)
from localllm.backends.cpu.jit import Library
from localllm.backends.cpu.kernels.common import kernel
from localllm.backends.cpu.memory import address
from localllm.backends.cpu.simd import F32


class Somewhere(Place):
    """A placeholder for a memory address."""


HERE, THERE = Somewhere(), Somewhere()


class Base(Struct):
    count: Int64
    x: Rows
    factor: Float32


class Example(Base):
    y: Output
    more: RowsOrNone
    bias: AddressOrZero
    total: Target


class Lines(Struct):
    first: Int64
    alone: Apart
    second: Int64
    last: Apart


def example(**changed: object) -> Example:
    given: dict[str, object] = {
        "count": 3, "x": Rows(address=HERE, stride=256), "factor": 0.5, "y": Output(address=THERE, stride=64),
        "more": RowsOrNone(address=0, stride=0), "bias": 0, "total": THERE,
    }  # fmt: skip
    return Example(**(given | changed))  # type: ignore[arg-type]


def test_slots_follow_the_order_of_declaration_those_of_the_base_first() -> None:
    assert (Base.count, Base.factor, Base.size) == (0, 3, 4)
    assert (Example.count, Example.factor, Example.bias, Example.total, Example.size) == (0, 3, 8, 9, 10)
    assert (Rows.address, Rows.stride, Rows.size) == (0, 1, 2)


def test_a_slot_apart_begins_a_cache_line() -> None:
    assert (Lines.first, Lines.alone, Lines.second, Lines.last, Lines.size) == (0, 8, 9, 16, 17)


def test_a_packed_struct_holds_numbers_bits_and_addresses() -> None:
    packed = example().pack(lambda place: {HERE: 1000, THERE: 2000}[place])
    half = struct.unpack("<i", struct.pack("<f", 0.5))[0]
    assert packed.dtype == np.int64
    assert packed.tolist() == [3, 1000, 256, half, 2000, 64, 0, 0, 0, 2000]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 1.5),
        ("count", HERE),
        ("factor", "1"),
        ("factor", HERE),
        ("total", 2.0),
        ("bias", None),
        ("x", 3),
        ("x", RowsOrNone(address=0, stride=0)),
        ("y", Rows(address=HERE, stride=1)),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"Example.{name} is"):
        example(**{name: value})


def test_missing_and_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Rows: missing \['stride'\], unknown \['strides'\]"):
        Rows(address=HERE, strides=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"missing \['address', 'stride'\], unknown \[\]"):
        Rows()  # type: ignore[call-arg]


def test_a_struct_never_changes() -> None:
    for name, value in {"count": 4, "x": Rows(address=0, stride=1), "factor": 1.0, "bias": 0, "total": HERE}.items():
        with pytest.raises(AttributeError, match="filled when it is made"):
            setattr(example(), name, value)


def test_places_tell_what_is_read_from_what_is_written() -> None:
    assert list(example(bias=HERE).places) == [(HERE, False), (THERE, True), (HERE, False), (THERE, True)]


def test_a_place_without_an_address_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="no address yet"):
        example().pack()


def test_a_kernel_reads_what_python_packed(tmp_path: Path) -> None:
    """The kernel computes y[i] = x.row(i)[0] * factor. Its argument struct has every kind of field, including
    nested `Rows`.
    """

    def body(f, a, thread, threads) -> None:  # type: ignore[no-untyped-def]
        with f.loop(0, a.count) as row:
            value = f.load(a.x.row(row), F32) * a.factor
            with f.when(a.more.given):
                f.store(a.total, f.load(a.more.row(row), F32))
            with f.when(a.bias.differs(0)):
                f.store(f.pointer(a.bias), f.i64(7), 8)
            f.store(a.y.row(row), value)
        f.store(a.where(Example.factor), f.i64(-1), 8)

    made = kernel("packed_example", Example, body)
    library = Library(isa.host(), tmp_path)
    library.load([made])
    x, y = np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros((3, 2), np.float32)
    total, bias = np.zeros(1, np.float32), np.zeros(1, np.int64)
    run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(library.address("packed_example"))
    given = {
        "x": Rows(address=address(x), stride=16), "y": Output(address=address(y), stride=8), "factor": 0.25,
        "total": address(total),
    }  # fmt: skip
    packed = example(**given).pack()
    run(address(packed), 0, 1)
    assert y[:, 0].tolist() == [0.0, 1.0, 2.0]
    assert (total[0], bias[0], packed[Example.factor]) == (0.0, 0, -1)
    more = RowsOrNone(address=address(x), stride=16)
    run(address(example(**given, more=more, bias=address(bias)).pack()), 0, 1)
    assert (total[0], bias[0]) == (8.0, 7)
    assert SLOT * Example.size == packed.nbytes
