"""Damaged mmproj files and unsuitable inputs are refused in one line that names the key, the tensor or the input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm.backends.base import BackendError
from localllm.backends.reference import ReferenceBackend
from localllm.engine.encoder import Encoder
from localllm.models import ModelError
from localllm.models.encoders import encoder_of
from tests.models.encoders import small
from tests.models.encoders.support import bound
from tests.models.support import MemoryWeight


def refused(name: str, problem: str, keys: dict[str, Any] | None = None, **tensors: MemoryWeight | None) -> None:
    metadata, own = small.loaded(name)
    metadata |= keys or {}
    for tensor, weight in tensors.items():
        del own[tensor]
        if weight is not None:
            own[tensor] = weight
    with pytest.raises(ModelError, match=problem) as caught:
        encoder_of(metadata, own, small.kind_of(name))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_projectors() -> None:
    refused("qwen2vl", r"clip\.projector_type: found 'gemma3na'; supported vision projectors: qwen2vl_merger, ", {
        "clip.projector_type": "gemma3na"})  # fmt: skip
    metadata, tensors = small.loaded("qwen2vl")
    with pytest.raises(ModelError, match="supported audio projectors: ultravox, voxtral"):
        encoder_of(metadata, tensors, "audio")
    with pytest.raises(ModelError, match="this key is missing"):
        encoder_of({}, tensors)
    own = {**metadata, "clip.vision.projector_type": "qwen2vl_merger", "clip.projector_type": "other"}
    assert encoder_of(own, tensors).width == 64


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedding_length", 1 << 30), ("attention.head_count", 0), ("attention.head_count", 3), ("block_count", -1),
        ("block_count", 1 << 20), ("patch_size", 0), ("patch_size", "14"), ("attention.layer_norm_epsilon", 2.0),
        ("spatial_merge_size", 100), ("attention.head_count_kv", 5),
    ],
)  # fmt: skip
def test_keys(key: str, value: object) -> None:
    refused("qwen2vl", r"clip\.vision\.|v\.blk", {f"clip.vision.{key}": value})


def test_missing_layers() -> None:
    refused("qwen2vl", r"v\.blk\.2\.ln1\.weight: this tensor is missing", {"clip.vision.block_count": 3})


# Tensors that some encoders do not read, or without which a file has another meaning.
UNUSED = {
    "lfm2a": ("a.position_embd.weight",),
    "gemma3nv": ("dw_start.conv", "dw_mid.conv", "down_conv", "gamma", ".bn.weight", "key.norm", "value.norm"),
}


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5vl", "qwen3vl", "gemma4v", "minicpmv-2.6", "ultravox", "qwen3a", "gemma4a", "yasa2", "lfm2a",
        "granite_speech", "gemma3nv",
    ],
)  # fmt: skip
def test_every_tensor_that_is_missing_or_has_another_shape(name: str) -> None:
    """The encoder is refused, except for optional tensors."""
    _, tensors = small.loaded(name)
    optional = ("bias", "_min", "_max", "v.std_bias", "weight.1", "attn_q_norm", "attn_k_norm", "post_norm.weight")
    for tensor in tensors:
        if any(part in tensor for part in UNUSED.get(name, ())):
            continue
        if not any(part in tensor for part in (*optional, "pos_embed_k", "ffn_gate", "deepstack", "std_scale", "ls")):
            refused(name, r"\.(weight|query|bias)|missing", None, **{tensor: None})
        odd = MemoryWeight.of(tensor, np.ones((3, 7), np.float32))
        if tensor not in ("resampler.pos_embed_k", "v.std_bias", "v.std_scale"):
            refused(name, r"expected|missing", None, **{tensor: odd})


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("qwen2vl", (57, 84, 3), "not a whole number of cells of 28 pixels"),
        ("qwen2vl", (0, 84, 3), "not a whole number of cells"),
        ("qwen2vl", (56, 84, 4), "not a whole number of cells"),
        ("qwen2vl", (28 * 70, 28 * 70, 3), "140 x 140 patches are more than 16384"),
        ("gemma3", (112, 112, 3), "64 patches, and the position table has 256"),
        ("gemma4v", (48, 48 * 60, 3), "the position table has 160 per side"),
        ("ultravox", (128, 80), "is not \\(80, 1 to 8192\\)"),
        ("ultravox", (80, 3002), "1501 frames, and the position table has 1500"),
        ("ultravox", (80, 14), "7 frames are fewer than the 8 of a token"),
        ("gemma4a", (128, 5000), "is not \\(128, 1 to 4096\\)"),
    ],
)
def test_inputs(name: str, shape: tuple[int, ...], problem: str) -> None:
    with (
        bound(ReferenceBackend(), *small.loaded(name), small.kind_of(name)) as encoder,  # type: ignore[arg-type]
        pytest.raises(ModelError, match=problem),
    ):
        encoder.encode([np.zeros(shape, np.float32)])


VALUES = (0, 1, 2, 3, 7, 16, 64, 1 << 20, -1, 1 << 40, 0.5, float("nan"), "x", None, [1, 2], True, [], 12)


def mutated(name: str, random: np.random.RandomState) -> tuple[dict[str, Any], dict[str, MemoryWeight]]:
    """Return a case with up to three changes: other values of keys, missing tensors, and other shapes."""
    metadata, tensors = small.loaded(name)
    for _ in range(random.randint(1, 4)):
        change, tensor = random.randint(5), list(tensors)[random.randint(len(tensors))]
        if change < 2:
            metadata[list(metadata)[random.randint(len(metadata))]] = VALUES[random.randint(len(VALUES))]
        elif change == 2 and len(tensors) > 1:
            del tensors[tensor]
        else:
            shape = list(tensors[tensor].shape) or [1]
            at = random.randint(len(shape))
            shape[at] = max(1, (1, 2, 2 * shape[at], shape[at] // 2, shape[at] + 1)[random.randint(5)])
            own = (shape, shape[::-1], [int(np.prod(shape))])[random.randint(3)]
            tensors[tensor] = MemoryWeight.of(tensor, np.zeros(own, np.float32), tensors[tensor].format)
    return metadata, tensors


def test_mutated_files() -> None:
    """An encoder of a damaged file is refused in one line, or runs."""
    random, names = np.random.RandomState(5), list(small.SHAPES)
    refusals: list[str] = []
    for number in range(120):
        name = names[random.randint(len(names))]
        try:
            model = encoder_of(*mutated(name, random), small.kind_of(name))  # type: ignore[arg-type]
            if number % 10 == 0:
                encoder = Encoder(ReferenceBackend(), model)
                encoder.encode([small.input_of(name)], small.SHAPES[name].flags)
        except (ModelError, BackendError) as error:
            refusals.append(str(error))
    assert 60 < len(refusals) < 120
    assert not any("\n" in text for text in refusals)
