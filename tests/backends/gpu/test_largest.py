"""Top-k of the logits on the device gives the same ids in the same order as on the host."""

from __future__ import annotations

import numpy as np
import pytest

import localllm
from localllm.backends.base import Backend, BackendError, TopKExecutable
from localllm.backends.gpu.executable import GpuExecutable
from localllm.backends.gpu.kernels.largest import SORTED
from localllm.engine.top_k import top_k_indices
from localllm.options import SamplingOptions
from localllm.plan import Batch
from localllm.sampling.errors import SamplingError
from localllm.sampling.sampler import Sampler
from tests.backends.support import bind, record
from tests.conftest import reference
from tests.models.support import MemoryWeight

ROWS = 5


def rows_of(vocabulary: int) -> np.ndarray:
    """Return rows of logits: normally distributed; many ties; nearly all minus infinity; zeros of both signs;
    all equal.
    """
    random = np.random.RandomState(vocabulary)
    x = 4 * random.standard_normal((ROWS, vocabulary)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2, np.arange(vocabulary) % 37 > 0] = -np.inf
    x[3] = np.where(random.rand(vocabulary) < 0.5, np.float32(0.0), np.float32(-0.0))
    x[4] = -7.25
    return x


def handed_over(gpu: Backend, x: np.ndarray, count: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the top-k of a step whose logits are the rows of `x` (n, V)."""
    executable = bind(gpu, record(MemoryWeight.of("table", x), lambda r, v: r.select_rows(v)))
    assert isinstance(executable, TopKExecutable)
    numbers = np.arange(len(rows), dtype=np.int32)
    batch = Batch(
        rows.astype(np.int32), numbers, numbers, 0 * numbers, np.zeros((1, 1), np.int32), numbers[::-1].copy()
    )
    found = executable.step_top_k(batch, count)
    return found.ids[::-1], found.logits[::-1]


@pytest.mark.parametrize("vocabulary", [3, 500, SORTED, SORTED + 1, 40000])
def test_largest_logits_in_order(gpu: Backend, vocabulary: int) -> None:
    x = rows_of(vocabulary)
    for count in (1, 40, 256):
        for rows in (np.array([1]), np.arange(ROWS), np.arange(40) % ROWS):
            ids, logits = handed_over(gpu, x, count, rows)
            for row, i, v in zip(rows, ids, logits, strict=True):
                expected = top_k_indices(x[row], count)
                np.testing.assert_array_equal(i, expected)
                np.testing.assert_array_equal(v, x[row, expected])


def test_a_nan_comes_first(gpu: Backend) -> None:
    x = rows_of(9000)[:1]
    x[0, 7000] = np.nan
    x[0, 3] = np.inf
    ids, logits = handed_over(gpu, x, 3, np.array([0]))
    assert ids[0, :2].tolist() == [7000, 3]
    with pytest.raises(SamplingError, match="largest logit is nan"):
        Sampler(SamplingOptions()).sample_top_k(ids[0], logits[0])


def test_more_than_there_is_room_for_is_refused(gpu: Backend) -> None:
    with pytest.raises(BackendError, match="the 257 largest logits were requested; supported: 1 to 256"):
        handed_over(gpu, rows_of(300), 257, np.array([0]))


OPTIONS = {
    "defaults": ({}, 40),
    "greedy": ({"temperature": 0.0}, 1),
    "no other cut": ({"top_p": 1.0, "min_p": 0.0, "temperature": 1.3}, 40),
    "one": ({"top_k": 1}, 1),
    "typical, xtc": ({"typical_p": 0.6, "xtc_probability": 0.5, "xtc_threshold": 0.02, "top_k": 200}, 200),
    "no top-k": ({"top_k": 0}, 0),
    "bias": ({"logit_bias": {3: 2.0}}, 0),
    "penalties": ({"repeat_penalty": 1.1}, 0),
    "greedy with penalties": ({"repeat_penalty": 1.1, "temperature": 0.0}, 0),
    "nothing": ({"samplers": ()}, 0),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_all_logits(name: str) -> None:
    given, required_top_k = OPTIONS[name]
    options = SamplingOptions(seed=4, **given)
    assert Sampler(options).required_top_k == required_top_k
    if required_top_k:
        whole, part = Sampler(options), Sampler(options)
        for logits in rows_of(5000).repeat(20, axis=0):
            ids = top_k_indices(logits, required_top_k).astype(np.int32)
            token = whole.sample(logits)
            assert part.sample_top_k(ids, logits[ids]) == token
            for sampler in (whole, part):
                sampler.accept(token)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.5, "top_k": 100}])
def test_the_same_text_while_a_step_copies_little(sampling: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    texts, copied = {}, []
    path = reference("models", "stories260K-f32.gguf")
    with localllm.load(path, backend="opencl") as model:
        executable = model.executable
        assert isinstance(executable, GpuExecutable)
        download = executable._device.download
        monkeypatch.setattr(
            executable._device, "download", lambda s, o, into: (copied.append(into.nbytes), download(s, o, into))
        )
        for most in (256, 0):
            executable.max_top_k = most
            copied.clear()
            texts[most] = "".join(piece.text for piece in model.generate("Once", max_tokens=60, seed=3, **sampling))  # type: ignore[arg-type]
            assert sorted(copied)[-2] <= (8 * 256 if most else 4 * model.vocabulary)
    assert texts[256] == texts[0]
