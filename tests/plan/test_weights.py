"""Slices of a tensor read the same bytes as that part of the whole tensor, and are compared by content."""

from __future__ import annotations

import numpy as np
import pytest

from localllm import quant
from localllm.plan import Tensor, Weight
from tests.models.support import MemoryWeight

RANDOM = np.random.RandomState(4)


def tensor(*shape: int, format: str = "Q4_0") -> MemoryWeight:
    return MemoryWeight.of("blk.0.some.weight", RANDOM.standard_normal(shape), format)


def values(weight: Tensor) -> np.ndarray:
    """Return all values of a tensor, read three rows at a time."""
    rows = int(np.prod(weight.shape[:-1]))
    parts = [weight.read(start, min(start + 3, rows)) for start in range(0, rows, 3)]
    return quant.dequantize(np.ascontiguousarray(np.concatenate(parts)), weight.format).reshape(weight.shape)


@pytest.mark.parametrize("shape", [(128,), (8, 64), (5, 4, 32)], ids=["values", "rows", "experts"])
def test_a_part_holds_the_numbers_of_the_whole_from_its_first_on(shape: tuple[int, ...]) -> None:
    source = tensor(*shape)
    whole = Weight.of(source)
    start, stop = (32, 96) if len(shape) == 1 else (1, 4)
    part = whole.part(start, stop)
    np.testing.assert_array_equal(values(whole), source.values())
    np.testing.assert_array_equal(values(part), source.values()[start:stop])
    assert (part.tensor, part.first, part.shape[0]) == (source.name, start, stop - start)
    last = part.part(stop - start - 1, stop - start) if len(shape) > 1 else part.part(32, 64)
    np.testing.assert_array_equal(values(last), source.values()[stop - len(values(last)) : stop])


def test_a_weight_is_the_whole_of_a_tensor_or_itself() -> None:
    whole = Weight.of(tensor(8, 64))
    assert (whole.name, whole.format, whole.shape, whole.first) == ("blk.0.some.weight", "Q4_0", (8, 64), 0)
    assert Weight.of(whole) is whole
    part = whole.part(2, 4)
    assert Weight.of(part) is part


def test_names_tell_parts_apart() -> None:
    whole = Weight.of(tensor(8, 64))
    assert whole.part(0, 8).name == whole.name
    assert whole.part(2, 5).name == "blk.0.some.weight[2:5]"
    assert whole.part(2, 5).part(1, 2).name == "blk.0.some.weight[3:4]"


def test_equal_weights_name_the_same_part_whatever_the_bytes() -> None:
    one, other = Weight.of(tensor(8, 64)), Weight.of(tensor(8, 64))
    assert one == other
    assert len({one, other, one.part(0, 4), other.part(0, 4), one.part(4, 8)}) == 3


@pytest.mark.parametrize(("shape", "size"), [((96,), 3 * 18), ((8, 64), 8 * 2 * 18), ((5, 4, 32), 5 * 4 * 18)])
def test_bytes_are_those_of_the_file(shape: tuple[int, ...], size: int) -> None:
    """The bytes equal the GGUF's. A block of Q4_0 has 32 values in 18 bytes."""
    assert Weight.of(tensor(*shape)).bytes == size
