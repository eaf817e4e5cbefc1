"""Compare our GGUF reader, forward pass, kernels and KV cache with llama.cpp's logits for the reference models."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm import quant
from localllm.gguf import NewTensor, open_gguf, write_gguf
from tests.conftest import reference
from tests.models.support import nmse

# Architectures with a GGUF in ../shared/data/archs; tests/models/kit_models has a model of every architecture.
ARCHITECTURES = (
    "falcon", "gemma", "gemma2", "gemma3", "glm4", "glm4moe", "gpt-oss", "gptneox", "granite", "llama", "mistral3",
    "olmo2", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
PROMPT = 32  # tokens evaluated in one batch; the rest of 40 is evaluated one by one
NOISE = 2.3e-5  # relative error of normally distributed values quantized to int8 in blocks of 32: (2.1 / 127)^2 / 12


def paths(architecture: str) -> Iterator[Path]:
    """Yield the paths of an architecture's reference models: dense, mixture of experts, or both."""
    folder = reference("archs")
    yield from (p for kind in ("dense", "moe") if (p := folder / f"{architecture}-{kind}.gguf").exists())


def logits(path: Path, backend: str = "cpu", chunks: tuple[int, ...] = (PROMPT,)) -> np.ndarray:
    """Return the logits of all positions, evaluated in these chunks and then one by one."""
    ids = [int(token) for token in np.load(reference("archs", path.name).with_suffix(".npz"))["tokens"]]
    cuts = np.cumsum([0, *chunks, *[1] * (len(ids) - sum(chunks))])
    with localllm.load(path, backend=backend) as model:
        session = model.session()
        parts = [session.evaluate(ids[a:b], logits=True).copy() for a, b in pairwise(cuts)]
    return np.concatenate(parts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_position(architecture: str) -> None:
    """llama.cpp rounds activations to F16, which causes an error of at most 1.4e-6. An error of 1e-4 would
    mean a bug in our code.
    """
    found = list(paths(architecture))
    assert found
    for path in found:
        truth = np.load(path.with_suffix(".npz"))
        assert int(truth["prompt_len"].item()) == PROMPT
        ours = logits(path)
        assert nmse(ours, truth["logits"]).max() < 5e-6
        np.testing.assert_array_equal(logits(path, chunks=(1, 3, 7, 24)), ours)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "smollm3", "mistral3"])
def test_quantized_files(tmp_path: Path, architecture: str, format: str) -> None:
    """The error against the model with dequantized weights in float64 comes from int8 activations.

    Its bound is the quantization noise of one matmul times the number of consecutive matmuls, times ten because softmax
    and gates amplify it. The difference from llama.cpp is bounded by the quantization error of the weights.
    """
    (path,) = (p for p in paths(architecture) if p.stem.endswith("-dense"))
    layers, written = quantize(path, tmp_path / path.name, format)
    ours = logits(written)
    assert nmse(ours, logits(written, "reference")).max() < 10 * NOISE * (4 * layers + 1)
    truth = np.load(path.with_suffix(".npz"))["logits"]
    assert nmse(ours, truth).max() < {"Q8_0": 3e-3, "Q4_0": 0.3}[format]


def quantize(source: Path, target: Path, format: str) -> tuple[int, Path]:
    """Return the model with its matrices in another format, written by our GGUF writer, and its number of layers."""
    file = open_gguf(source)
    tensors, layers = [], 0
    for name, tensor in file.tensors.items():
        data, kept = tensor.read(0, int(np.prod(tensor.shape[:-1]))), tensor.format
        if len(tensor.shape) == 2 and tensor.format == "F16":
            data, kept = quant.quantize(quant.dequantize(data, "F16"), format), format
        layers += name.endswith("attn_q.weight")
        tensors.append(NewTensor(name, kept, tensor.shape, data.copy()))
    assert sum(tensor.format == format for tensor in tensors) > 5 * layers
    metadata = {k: np.int32(v) if isinstance(v, int) and v < 0 else v for k, v in file.metadata.items()}
    write_gguf(target, metadata, tensors)
    file.close()
    return layers, target
