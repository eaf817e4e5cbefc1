"""Tensors and layouts of all cases of the reference kit equal llama.cpp's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.media import EncoderInput
from tests.localllm.media.kit import CASES, KIT, Case, maker

pytestmark = pytest.mark.skipif(not CASES, reason=f"needs {KIT}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kit")


# Tokens of a piece where the model's own program is the reference, because llama.cpp differs from it (docs/media.md).
OWN = {"voxtral": {187: 375}}


@pytest.mark.parametrize("name", CASES)
def test_a_case(name: str, folder: Path) -> None:
    case = Case(name, folder)
    for label, kind, data in case.inputs():
        chunks = case.chunks(kind, data)
        assert len(chunks) == len(case.stored[f"{label}.layout"]), label
        at = 0
        for k, (chunk, stored) in enumerate(zip(chunks, case.stored[f"{label}.layout"].tolist(), strict=True)):
            where = f"{label}.{k}"
            if isinstance(chunk, list):
                row = [0, len(chunk), len(chunk), at, 0, 0, 0]
                assert chunk == case.stored[f"{where}.text"].tolist(), where
                at += len(chunk)
            else:
                kinds = {"image": 1, "audio": 2}
                grid = (chunk.columns, chunk.rows) if chunk.kind == "image" else (0, 0)
                row = [kinds[chunk.kind], chunk.tokens, chunk.positions, at, *grid, int(not chunk.causal)]
                _compare(case, where, chunk, at)
                at += stored[2]
                if name in OWN:
                    stored[1:3] = [OWN[name][count] for count in stored[1:3]]
            assert row == stored, where


def _compare(case: Case, where: str, piece: EncoderInput, at: int) -> None:
    stored = case.stored
    for j, tensor in enumerate(piece.tensors):
        assert tensor.dtype == np.float32
        assert tensor.shape == tuple(stored[f"{where}.pre{j}.shape"]), where
        sample = stored[f"{where}.pre{j}.sample"]
        mine = tensor.reshape(-1)[maker().sample_index(tensor.size, len(sample))]
        assert np.abs(mine - sample).max() <= (0 if piece.kind == "image" else 1e-3), f"{where}.pre{j}"
        for axis in (0, 1):
            if (mean := stored.get(f"{where}.pre{j}.mean{axis}")) is not None:
                np.testing.assert_allclose(tensor.mean(axis, dtype=np.float64), mean, atol=2e-3, rtol=1e-3)
    assert f"{where}.pre{len(piece.tensors)}.shape" not in stored
    assert list(piece.flags.numbers) == stored.get(f"{where}.pre0.flags", np.zeros(8, int)).tolist()
    if (positions := stored.get(f"{where}.pos")) is not None:
        axes = np.repeat(np.arange(piece.tokens)[:, None], 4, 1) if piece.axes is None else piece.axes
        absolute = np.zeros(axes.shape, bool) if piece.absolute is None else piece.absolute
        t, y, x, z = (np.where(absolute, axes, axes + at)).T
        np.testing.assert_array_equal(np.stack([t, x, y, z], 1), positions)
