"""What encoders rearrange with NumPy is done in bands of rows, bounded by count, with the same numbers as at once."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pytest

from localllm.engine.encoder import Running
from localllm.models.encoders import banded, encoder_of, grids, minicpm
from localllm.models.encoders.grids import Grid
from localllm.plan import F32, Send, runs
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


@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (1, 9), (16, 16)])
@pytest.mark.parametrize("width", [128, 3584])
def test_waves_of_positions(rows: int, columns: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = grids.by_rows(rows, columns)
    rate = 10000.0 ** (-np.arange(width // 4) / (width // 4))
    x, y = (each[:, None] * rate for each in (grid.x, grid.y))
    truth = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)
    for band in (runs.BAND, 1):
        monkeypatch.setattr(runs, "BAND", band)
        found, count = driven(minicpm._waves(grid, width))
        np.testing.assert_array_equal(found, truth)
        assert count > 1 if band > 1 else count == max(rows, columns) + rows * columns


def test_chosen_rows_and_learned_ones(narrow: None) -> None:
    rows, learned = values(12, 10), [values(1, 10) + 1, values(1, 10) + 2]
    index = np.array([13, *banded.with_ends(12, 3, 12).reshape(-1), 13])
    found, count = driven(banded.chosen(rows, index, *learned))
    lines = np.concatenate([rows.reshape(3, 4, 10), np.tile(learned[0], (3, 1, 1))], axis=1).reshape(-1, 10)
    np.testing.assert_array_equal(found, np.concatenate([learned[1], lines, learned[1]]))
    assert count == 2


def everything(name: str) -> tuple[list[F32], dict[str, int]]:
    """Return the inputs of an encoder's runs, and its result, if runs have random results; and the number of
    pauses before the first run of each part, and before the "end".
    """
    model, random = encoder_of(*small.loaded(name)), np.random.default_rng(0)
    encoding, given, pauses, count = model.encode([small.input_of(name)], small.SHAPES[name].flags), [], {}, 0
    results: list[F32] | None = None
    while True:
        try:
            run = next(encoding) if results is None else encoding.send(results)
        except StopIteration as end:
            return [*given, end.value], pauses | {"end": count}
        results, count = None, count + 1
        if run is not None:
            given += [*run.received, *run.later]
            sent = model.parts[run.part].plan.operations[-1]
            assert isinstance(sent, Send)
            results = [random.standard_normal((run.layouts[-1].rows, x.width), np.float32) for x in sent.values]
            pauses.setdefault(run.part, count - 1)
            count = 0


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("pixtral", ["head", "end"]),
        ("cogvlm", ["head", "end"]),
        ("hunyuanvl", ["head", "product", "norm"]),
        ("deepseek4v", ["head", "end"]),
        ("minicpmv-2.6", ["head"]),
        ("minicpmv4_6-4", ["head"]),
        ("mimovl", ["layers 1", "head"]),
        ("granite4_vision", ["queries 0", "tokens 0", "queries 1", "tokens 1", "end"]),
    ],
)
def test_encoders_arrange_in_bands_between_their_runs(
    name: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = everything(name)
    monkeypatch.setattr(runs, "BAND", 1)
    single, pauses = everything(name)
    for a, b in zip(whole, single, strict=True):
        np.testing.assert_array_equal(a, b)
    assert min(pauses[part] for part in parts) > 1, pauses


def test_an_error_between_two_runs_is_raised_again() -> None:
    def encoding() -> Encoding:
        yield None
        raise ValueError("a bug")

    for seconds in (0.0, 0.1):
        running = Running({}, encoding())
        for _ in range(2):
            with pytest.raises(ValueError, match="a bug"):
                running.advance(seconds)


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
