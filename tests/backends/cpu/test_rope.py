"""The RoPE table is within one float32 ulp of exact sines and cosines, up to position one million."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest

from localllm.backends.cpu import rope
from localllm.plan import Rope, rope_table

POSITIONS = [0, 1, 2, 3, 17, 1000, 4095, 32767, 131071, 524288, 999_424, 1_000_000]

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803")


def exact(angle: float) -> tuple[float, float]:
    """Return the cosine and sine of a float64 number, computed from their series in 60 digits after exact range
    reduction.
    """
    with localcontext() as context:
        context.prec = 60
        x = Decimal(angle) % (2 * PI)
        x = x - 2 * PI if x > PI else x
        cosine, sine, term, k = Decimal(0), Decimal(0), Decimal(1), 0
        while abs(term) > Decimal("1e-45") or k < 4:
            if k % 2:
                sine += term if k % 4 == 1 else -term
            else:
                cosine += term if k % 4 == 0 else -term
            k += 1
            term = term * abs(x) / k
        return float(cosine), float(sine if x >= 0 else -sine)


def ulps(ours: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the error in float32 ulps at the true value."""
    return np.abs(ours.astype(np.float64) - truth) / np.spacing(np.abs(truth).astype(np.float32))


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 1_000_000.0])
def test_cosines_and_sines_are_exact_to_the_last_place(base: float) -> None:
    frequencies = tuple(base ** (-2 * i / 128) for i in range(64))
    what = Rope("neox", 128, frequencies)
    for position in POSITIONS:
        (row,) = rope.rope_rows(what, position, position + 1)
        truth = np.array([exact(position * f) for f in frequencies]).T  # (2, 64)
        assert ulps(row, truth).max() <= 0.5 + 1e-3


def test_a_whole_table_agrees_with_numpy() -> None:
    """The table agrees with NumPy's float64 sine, which is accurate to 1e-16, in every quadrant and at every position
    of a chat.
    """
    what = Rope("interleaved", 64, tuple(10_000.0 ** (-2 * i / 64) for i in range(32)))
    table = rope.rope_rows(what, 0, 8192)
    assert (table.shape, table.dtype) == ((8192, 2, 32), np.float32)
    assert ulps(table, np.stack(rope_table(what, np.arange(8192, dtype=np.int32)), axis=1)).max() <= 0.51


def test_a_shifted_table_has_the_rows_of_other_positions() -> None:
    """A shifted position below 0 gets the row of position 0."""
    frequencies = tuple(10_000.0 ** (-2 * i / 20) for i in range(10))
    plain, shifted = (rope.rope_rows(Rope("interleaved", 20, frequencies, shift=n), 0, 40) for n in (0, -3))
    np.testing.assert_array_equal(shifted[3:], plain[:-3])
    np.testing.assert_array_equal(shifted[:3], plain[[0, 0, 0]])
    whole = rope_table(Rope("interleaved", 20, frequencies, shift=-3), np.arange(40, dtype=np.int32))
    assert ulps(shifted, np.stack(whole, axis=1)).max() <= 0.51


def test_pieces_of_a_table_are_the_table() -> None:
    what = Rope("interleaved", 20, tuple(10_000.0 ** (-2 * i / 20) for i in range(10)), 1.3, 0.2, 100)
    whole = rope.rope_rows(what, 0, 1500)
    np.testing.assert_array_equal(
        np.concatenate([rope.rope_rows(what, 0, 1024), rope.rope_rows(what, 1024, 1500)]), whole
    )


def test_magnitude_and_temperature() -> None:
    """The table holds cos * magnitude * (1 + t ln(1 + floor(p / length))), the scaling of queries past the context in
    Ministral 3.
    """
    what = Rope("interleaved", 4, (0.0, 1e-3), 1.5, 0.25, 10)
    table = rope.rope_rows(what, 0, 31)
    growth = 1.0 + 0.25 * np.log(1.0 + np.arange(31) // 10)
    np.testing.assert_allclose(table[:, 0, 0], 1.5 * growth, rtol=1e-7)
    np.testing.assert_allclose(table[:, 1, 1], 1.5 * growth * np.sin(np.arange(31) * 1e-3), rtol=1e-7)
    np.testing.assert_array_equal(table[:, 1, 0], 0.0)
