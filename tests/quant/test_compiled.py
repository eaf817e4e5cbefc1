"""Compiled searches: the cache of their code, and the only difference from ggml's results."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm import quant
from localllm.quant.codecache import NoCodeCache
from localllm.quant.compiled import jit
from localllm.quant.formats.grids import levels_of
from tests.conftest import full_disk

X = (np.random.RandomState(8).standard_normal((2, 256)) * 0.02).astype(np.float32)


@pytest.mark.parametrize("importance", [None, np.ones(256, np.float32)], ids=["plain", "imatrix"])
def test_a_group_of_zeros_in_iq3_s_holds_nothing_of_what_came_before(importance: np.ndarray | None) -> None:
    """For a group of zeros, ggml keeps the bytes of the previous group, so that its blocks depend on their
    neighbors. Ours do not.
    """
    x = X.copy()
    x[1, 96:128] = 0
    row = quant.quantize(x[1:], "IQ3_S", importance)[0]
    np.testing.assert_array_equal(quant.quantize(x, "IQ3_S", importance).reshape(2, 110)[1], row)
    assert not row[2 + 24 : 2 + 32].any()  # indices of the codebook points
    assert row[66 + 3] == 0  # ninth bits of the indices
    assert not row[74 + 12 : 74 + 16].any()  # signs
    assert row[106 + 1] >> 4 == 0  # the scale
    values = quant.dequantize(row[None], "IQ3_S")[0]
    assert np.abs(values[96:128]).max() < 0.1 * np.abs(values).max()


def test_every_neighbour_is_read_as_its_point() -> None:
    """The packed coordinates equal the points of the neighbor lists, up to the last entry of the last list."""
    from localllm.quant.compiled.codebook import codebook

    for name in ("IQ1S", "IQ2XXS", "IQ2XS", "IQ2S", "IQ3XXS", "IQ3S"):
        book = codebook(name)
        places = book.places[book.places < 0]
        assert len(places) > 3000
        for place in (*places[:: len(places) // 50], places.min()):
            near = book.near[-place : -place + book.near[-place - 1]]
            packed = book.near_packed[-place : -place + len(near)].view(np.uint32)
            shifts = 4 * np.arange(book.points.shape[1], dtype=np.uint32)
            np.testing.assert_array_equal(packed[:, None] >> shifts & 15, 2 * levels_of(name)[near] + 1)
        assert len(book.near_packed) >= len(book.near) + 15


def test_a_cache_folder_is_private_and_named_after_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = jit.cache_folder.__wrapped__()
    assert folder is not None
    assert folder.parent == tmp_path / "cache" / "localllm" / "quant"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    other = tmp_path / "compiled"
    other.mkdir()
    for path in Path(jit.__file__).parent.glob("*.py"):
        (other / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(jit, "__file__", str(other / "jit.py"))
    assert jit.cache_folder.__wrapped__() == folder
    with (other / "search.py").open("a") as file:
        file.write("\n")
    assert jit.cache_folder.__wrapped__() != folder


def half(folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a compiled function whose code is cached in this folder."""
    monkeypatch.setattr(jit, "cache_folder", lambda: folder)

    @jit.compiled
    def halved(x: float) -> float:
        return x / 2

    return halved


@pytest.mark.parametrize("place", ["file", "/proc/no/such/place"])
def test_where_no_cache_can_be_kept_code_is_compiled_anyway(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
    with pytest.warns(NoCodeCache):
        assert jit.cache_folder.__wrapped__() is None
    halved = half(None, monkeypatch)
    assert halved(3.0) == 1.5
    assert not halved.stats.cache_hits
    assert halved.stats.cache_path is None
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_code_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert half(tmp_path, monkeypatch)(3.0) == 1.5
    again = half(tmp_path, monkeypatch)
    assert again(3.0) == 1.5
    assert sum(again.stats.cache_hits.values()) == 1
    assert Path(again.stats.cache_path).parent == tmp_path


def test_a_full_disk_costs_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(50), pytest.warns(NoCodeCache, match="File too large"):
        assert half(tmp_path, monkeypatch)(3.0) == 1.5
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_numba_may_not_choose_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without write access, Numba would choose __pycache__ or ~/.cache/numba, whose owners are not checked."""
    (tmp_path / "file").touch()
    with pytest.warns(NoCodeCache, match="Permission denied"):
        halved = half(tmp_path / "file", monkeypatch)
    assert halved(3.0) == 1.5
    assert halved.stats.cache_path is None


def test_a_folder_with_what_others_put_there_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba opens its files by name, so one symbolic link among them makes the folder unusable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_folder = jit.cache_folder.__wrapped__
    folder = cache_folder()
    assert folder is not None
    assert half(folder, monkeypatch)(3.0) == 1.5
    (index,) = folder.rglob("*.nbi")
    index.rename(tmp_path / "download")
    index.symlink_to(tmp_path / "download")
    with pytest.warns(NoCodeCache, match="is a link or belongs to another user"):
        assert cache_folder() is None
    index.unlink()
    assert cache_folder() == folder
    tmp_path.chmod(0o777)
    with pytest.warns(NoCodeCache, match="other users can write"):
        assert cache_folder() is None
