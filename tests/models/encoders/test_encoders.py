"""Every projector gives the embeddings of an independent float64 program, with the same bits on all threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest

from localllm.backends.base import Backend
from localllm.backends.cpu import pieces, slices
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.engine.encoder import Encoder
from localllm.models.encoders import encoder_of
from localllm.plan import runs
from tests.backends.cpu.test_instruction_sets import needs
from tests.models.encoders import kit, small
from tests.models.encoders.support import CENTERED, ROWS, bound, errors
from tests.models.support import MemoryWeight

NAMES = tuple(small.SHAPES)
ON_OPENCL = (
    "qwen2.5vl",
    "gemma4v",
    "gemma4a",
    "mimovl",
    "parakeet",
    "granite4_vision",
)  # the benchmark `table` runs all
BITS = ("qwen2.5vl", "gemma4v", "minicpmv-2.6", "gemma4a", "mimovl", "parakeet", "ldp", "mimo_audio")
# The input of each case that is quick to prepare.
KIT = {
    "deepseekocr": "noise64", "deepseekocr2": "noise64", "qwen2vl": "video", "qwen3vl": "two",
    "idefics3-old": "noise64", "llava16": "noise64",
}  # fmt: skip


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=2)
    yield backend
    backend.close()


def run(backend: Backend, name: str) -> np.ndarray:
    with bound(backend, *small.loaded(name), kind(name)) as encoder:
        assert encoder.width == small.expected(name).shape[1]
        return encoder.encode([small.input_of(name)], small.SHAPES[name].flags)


def kind(name: str) -> Literal["vision", "audio"]:
    return "audio" if small.SHAPES[name].sound else "vision"


def check(backend: Backend, name: str) -> None:
    rows, centered = errors(run(backend, name), small.expected(name))
    assert rows < 1e-9, f"{name}: {rows:.1e}"  # float32; the kit's limits allow for F16 in llama.cpp
    assert centered < 1e-8, f"{name}: {centered:.1e}"


@pytest.mark.parametrize("name", NAMES)
def test_reference(name: str) -> None:
    check(ReferenceBackend(), name)


@pytest.mark.parametrize("name", NAMES)
def test_cpu(cpu: CpuBackend, name: str) -> None:
    check(cpu, name)


@pytest.mark.parametrize("name", ON_OPENCL)
def test_opencl(opencl: Backend, name: str) -> None:
    check(opencl, name)


@pytest.fixture(scope="module")
def opencl() -> Iterator[Backend]:
    pytest.importorskip("pyopencl")
    from tests.backends.gpu.conftest import pocl

    backend = pocl()
    yield backend
    backend.close()


@pytest.mark.skipif(not kit.FOLDER.exists(), reason="the reference kit is missing")
@pytest.mark.parametrize("name", KIT)
def test_llama_cpp(cpu: CpuBackend, name: str) -> None:
    """With the kit's inputs, the embeddings are llama.cpp's. The benchmark `table` runs all cases and inputs."""
    case = kit.Case(name)
    with bound(cpu, *case.loaded(), "vision") as encoder:
        for chunk in case.chunks(KIT[name]):
            found = case.errors(chunk, encoder.encode(chunk.tensors, chunk.flags))
            assert found["rows"] < ROWS, chunk.name
            assert found["centered"] < CENTERED, chunk.name


@pytest.mark.parametrize("name", BITS)
def test_bits_depend_on_nothing_else(cpu: CpuBackend, name: str) -> None:
    """One thread, AVX2, and an encoder that has run another picture before give the same bits."""
    truth = run(cpu, name)
    for backend in (CpuBackend(threads=1), CpuBackend(threads=2, isa=needs("avx2"))):
        np.testing.assert_array_equal(run(backend, name), truth)
        backend.close()
    with bound(cpu, *small.loaded(name), kind(name)) as encoder:
        own = small.input_of(name)
        encoder.encode([np.flip(own, axis=1).copy()])
        np.testing.assert_array_equal(encoder.encode([own]), truth)


def quantized(tensors: dict[str, MemoryWeight], format: str = "Q8_0") -> dict[str, MemoryWeight]:
    """Return the tensors with every matrix of the layers in this format."""
    return {
        name: MemoryWeight.of(name, tensor.values(), format) if ".blk." in name and len(tensor.shape) == 2 else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("name", ["qwen3vl", "gemma4v"])
def test_quantized_weights(cpu: CpuBackend, name: str) -> None:
    metadata, tensors = small.loaded(name)
    tensors = quantized(tensors)
    assert sum(tensor.format == "Q8_0" for tensor in tensors.values()) > 10
    with bound(ReferenceBackend(), metadata, tensors, "vision") as encoder:
        truth = encoder.encode([small.input_of(name)])
    with bound(cpu, metadata, tensors, "vision") as encoder:
        rows, _ = errors(encoder.encode([small.input_of(name)]), truth)
    assert 1e-9 < errors(truth, small.expected(name))[0] < 1e-2  # the format is in use
    assert rows < 1e-3  # activations are quantized, too


def test_segments_end_at_layers(cpu: CpuBackend) -> None:
    """Another encoder runs between the segments of this one. The embeddings are the same."""
    metadata, tensors = small.loaded("qwen2.5vl")
    truth, picture = run(cpu, "qwen2.5vl"), small.input_of("qwen2.5vl")
    with bound(cpu, metadata, tensors, "vision") as encoder, bound(cpu, metadata, tensors, "vision") as other:
        running, between = encoder.begin([picture]), other.begin([picture[::-1].copy()])
        count = 1
        while not running.advance():
            between.advance()
            count += 1
        assert count == metadata["clip.vision.block_count"] + 1  # the projector is the last segment
        np.testing.assert_array_equal(running.result, truth)
        assert running.advance()


@pytest.mark.parametrize("name", BITS)
def test_segments_in_slices_have_the_same_bits(cpu: CpuBackend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another encoder on the same threads runs between the slices, and a last call runs the rest, if any."""
    monkeypatch.setattr(slices, "LEAST", 0.0)
    monkeypatch.setattr(runs, "BAND", 4096)
    for size, few in {"BYTES": 2048, "PRODUCTS": 1 << 15, "WRITTEN": 4096, "LEAST_ROWS": 3}.items():
        monkeypatch.setattr(pieces, size, few)
    metadata, tensors = small.loaded(name)
    medium = small.input_of(name)
    with bound(cpu, metadata, tensors, kind(name)) as encoder, bound(cpu, metadata, tensors, kind(name)) as other:
        truth = encoder.encode([medium])
        for most in (7, 250, 10**9):
            running, between, count = encoder.begin([medium]), other.begin([-medium]), 0
            while not running.advance(1e-9 if count < most else 0.0):
                count += 1
                between.advance(1e-9)
            np.testing.assert_array_equal(running.result, truth)
            assert count >= min(most, 250)  # more than the segments and the kernels


def test_two_frames_are_one_picture(cpu: CpuBackend) -> None:
    with bound(cpu, *small.loaded("qwen2vl"), "vision") as encoder:
        picture = small.input_of("qwen2vl")
        alone, twice = encoder.encode([picture]), encoder.encode([picture, picture])
        np.testing.assert_array_equal(alone, twice)
        assert errors(encoder.encode([picture, -picture]), alone)[0] > 0.01


def test_every_projector_is_in_the_table() -> None:
    from localllm.models.encoders import supported

    found: set[Any] = {"deepseekocr", "deepseekocr2", "qwen2.5o"}
    for name in NAMES:
        metadata, _ = small.loaded(name)
        found.add(metadata.get("clip.projector_type"))
    assert found == {*supported("vision"), *supported("audio")}


def test_memory_is_bounded() -> None:
    """An encoder is recorded without reading the weights of its layers."""
    metadata, tensors = small.loaded("qwen3vl")
    read: list[str] = []

    class Watched(MemoryWeight):
        def read(self, start: int, stop: int) -> np.ndarray:
            read.append(self.name)
            return super().read(start, stop)

    watched = {name: Watched(t.name, t.format, t.shape, t.rows) for name, t in tensors.items()}
    model = encoder_of(metadata, watched, "vision")
    assert set(read) == {"v.position_embd.weight"}
    Encoder(ReferenceBackend(), model).close()
    assert len(set(read)) > 40
