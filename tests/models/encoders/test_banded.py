"""What encoders rearrange with NumPy is done in bands of rows, bounded by count, with the same numbers as at once."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pytest

from localllm.engine.encoder import Running
from localllm.models.encoders import banded, encoder_of, grids
from localllm.models.encoders.grids import Grid
from localllm.plan import F32, runs
from localllm.plan.runs import Arranging, Encoding, Run
from tests.models.encoders import small

T = TypeVar("T")
NAMES = ("qwen2.5vl", "qwen3vl", "gemma4v", "minicpmv-2.6", "granite4_vision", "internvl", "ldp")


def driven(arranging: Arranging[T]) -> tuple[T, int]:
    """Return the result, and the number of bands before the last."""
    count = 0
    while True:
        try:
            assert next(arranging) is None
        except StopIteration as end:
            return end.value, count
        count += 1


def values(*shape: int) -> F32:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


GRIDS = [grids.by_rows(9, 6), grids.by_cells(8, 6, 2), grids.by_rows(1, 5)]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "BAND", 600)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("last", [False, True])
def test_patches(narrow: None, grid: Grid, last: bool) -> None:
    picture, index = values(grid.rows * 4, grid.columns * 4, 3), grid.index
    for signed in (False, True):
        into = np.full((len(index), 48), np.nan, np.float32)
        _, count = driven(banded.patches(picture, 4, index, into, signed, last))
        np.testing.assert_array_equal(into, grids.patch_rows(picture * 2 - 1 if signed else picture, 4, last)[index])
        assert count == grid.rows  # a line of patches has more than 600 bytes


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_cells(narrow: None, grid: Grid, padded: bool, first: bool) -> None:
    x, index = values(len(grid.index), 20), grid.index
    for side in (1, 2, 4) if padded or grid.rows > 4 else (1,):
        found, count = driven(banded.cells(x, grid, index, side, first, padded))
        rows = np.empty_like(x)
        rows[index] = x
        np.testing.assert_array_equal(found, grids.cells(rows, grid.rows, grid.columns, side, first, padded))
        lines = -(-grid.rows // side) if padded else grid.rows // side
        assert count == (lines if side > 1 else -(-lines // max(600 // (grid.columns * 80), 1)))


def test_taken(narrow: None) -> None:
    rows, index = values(30, 10), np.random.default_rng(1).permutation(30)
    into = np.empty((30, 10), np.float32)
    _, count = driven(banded.taken(rows, index, into))
    np.testing.assert_array_equal(into, rows[index])
    assert count == 2  # 15 rows of 40 bytes each


@pytest.mark.parametrize("name", ["corners", "linear", "enlarged", "antialiased", "cubic", "buckets"])
def test_a_resized_table_is_made_line_by_line(name: str) -> None:
    weights: grids.Resize = getattr(grids, name)
    table = values(49, 5)
    for rows, columns in ((3, 11), (14, 7), (1, 1)):
        found, count = driven(grids.resized(table, rows, columns, weights))
        down, across = weights(7, rows), weights(7, columns)
        truth = np.einsum("ra,cb,abw->rcw", down, across, table.reshape(7, 7, 5).astype(np.float64))
        np.testing.assert_allclose(found, truth.reshape(-1, 5), rtol=1e-5, atol=1e-6)
        assert count == rows
    if name != "enlarged":
        assert driven(grids.resized(table, 7, 7, weights)) == (table, 0)


def first_run(name: str) -> tuple[Run, int]:
    encoding = encoder_of(*small.loaded(name)).encode([small.input_of(name)], small.SHAPES[name].flags)
    count = 0
    while (run := next(encoding)) is None:
        count += 1
    return run, count


@pytest.mark.parametrize("name", NAMES)
def test_the_input_of_the_layers_is_arranged_in_bands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, few = first_run(name)
    monkeypatch.setattr(runs, "BAND", 1)
    single, many = first_run(name)
    assert many > few
    assert many >= small.input_of(name).shape[0] // 16  # lines of patches
    for a, b in zip(whole.received, single.received, strict=True):
        np.testing.assert_array_equal(a, b)


def test_results_are_copied_in_bands(narrow: None) -> None:
    """Between two bands of the results of a run, other work may run."""

    def encoding() -> Encoding:
        (x,) = yield Run("layers", (), ())
        yield None
        return x

    x, running = values(30, 10), Running({}, encoding())
    running._arrange()
    running._between = running._continued([x])
    calls = 0
    while running._result is None:
        running._arrange(0.0)  # until a time that is over
        calls += 1
    assert calls == 2 + 1 + 1  # two bands of 15 rows, the pause of the encoder, and the end
    np.testing.assert_array_equal(running.result, x)
    assert not np.shares_memory(running.result, x)
