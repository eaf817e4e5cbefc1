"""The exp in attention is close to float64, and bitwise identical on every instruction set."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from llvmlite import ir

from localllm.backends.cpu import isa
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.jit import Kernel, Library
from localllm.backends.cpu.kernels.common import f32x16
from localllm.backends.cpu.kernels.softmax import exp_negative
from localllm.backends.cpu.memory import address
from localllm.backends.cpu.simd import Function
from tests.backends.cpu.test_instruction_sets import needs

COUNT = 1 << 16


def powers(x: np.ndarray, row: Isa) -> np.ndarray:
    def emit(isa: Isa) -> ir.Module:
        f = Function("powers", 2, isa)
        source, target = (f.pointer(argument) for argument in f.arguments)
        with f.loop(0, 4 * x.size, 64) as at:
            f.store(target + at, exp_negative(f, f.load(source + at, f32x16)))
        return f.finish()

    library = Library(row, None)
    library.load([Kernel("powers", emit)])
    out = np.empty_like(x)
    ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(library.address("powers"))(
        address(x), address(out)
    )
    return out


def test_it_is_within_two_units_of_the_last_place() -> None:
    random = np.random.RandomState(0)
    x = -np.concatenate([random.uniform(0, 1, COUNT), random.uniform(0, 87, COUNT)]).astype(np.float32)
    truth = np.exp(x.astype(np.float64))
    ours = powers(x, isa.host())
    assert np.abs(ours[:COUNT] / truth[:COUNT] - 1).max() < 1.3e-7
    assert np.abs(ours / truth - 1).max() < 3e-7  # far below 0, where the rounding error of ln 2 matters


def test_one_at_zero_nothing_below_and_nan() -> None:
    x = np.full(16, -np.inf, np.float32)
    x[:5] = 0.0, -0.0, -88.0, -1e30, np.nan
    np.testing.assert_array_equal(powers(x, isa.host()), [1.0, 1.0, 0.0, 0.0, np.nan, *[0.0] * 11])


@pytest.mark.parametrize("name", ["avx2", "generic"])
def test_every_instruction_set_gives_the_same_bits(name: str) -> None:
    x = np.linspace(-90, 0, COUNT, dtype=np.float32)
    np.testing.assert_array_equal(powers(x, needs(name)), powers(x, isa.host()))
