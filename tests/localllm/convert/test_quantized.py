"""Integer weights packed by compressed-tensors are dequantized as by that package, and a whole checkpoint converts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import ConvertError, open_checkpoint
from localllm.convert.hf_config import HfConfig
from localllm.convert.quantized import read_packing, unpack_quantized
from localllm.convert.safetensors import Shard
from tests.localllm.convert.hf_models import ids
from tests.localllm.convert.hf_synthetic import DATA, numbers, read_specs
from tests.localllm.convert.hf_tokenizers import save_tokenizer
from tests.localllm.convert.make_packed import CASES
from tests.localllm.convert.support import logits_of, save, values

STORED = dict(np.load(DATA / "packed.npz"))


def parts_of(case: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{case}:"): x for key, x in STORED.items() if key.startswith(f"{case}:")}


def schemes(*weights: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": {"type": "int", **w}} for i, w in enumerate(weights)}
    told = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return read_packing(HfConfig(Path("config.json"), {"quantization_config": told}, {})).schemes


def unpacked(parts: dict[str, np.ndarray], known: tuple[tuple[int, int], ...], folder: Path) -> np.ndarray:
    save(folder / "x.safetensors", {f"x.{key}": value for key, value in parts.items() if key != "numbers"})
    shard = Shard(folder / "x.safetensors")
    try:
        tensors = dict(shard.tensors)
        tensor = unpack_quantized(lambda name: tensors.pop(name, None), "x", known)
        assert not tensors
        whole = values(tensor)
        for start, stop in ((0, 1), (3, 7), (5, len(whole))):  # row ranges that split a word of eight zero points
            np.testing.assert_array_equal(tensor.read(start, stop).view(np.float32), whole[start:stop])
        return whole
    finally:
        shard.close()


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_compressed_tensors(case: str, tmp_path: Path) -> None:
    parts = parts_of(case)
    other = {"num_bits": 8, "strategy": "group", "group_size": 16}  # quantization scheme of the other matrices
    np.testing.assert_array_equal(unpacked(parts, schemes(other, CASES[case][2]), tmp_path), parts["numbers"])


def test_columns_in_an_order_of_their_own(tmp_path: Path) -> None:
    """`weight_g_idx` assigns each column to a group, whose scale and zero point it uses."""
    parts = parts_of("asymmetric")
    index = np.random.RandomState(1).permutation(np.arange(80) // 16).astype(np.int32)
    words = parts["weight_packed"].view(np.uint32)
    codes = np.stack([words >> 4 * i & 15 for i in range(8)], axis=-1).reshape(21, -1).astype(np.int64)
    down = parts["weight_zero_point"].view(np.uint32)
    zeros = np.stack([down >> 4 * i & 15 for i in range(8)], axis=1).reshape(24, -1)[:21].astype(np.int64)
    expected = (codes - zeros[:, index]) * parts["weight_scale"].astype(np.float64)[:, index]
    known = schemes(CASES["asymmetric"][2])
    found = unpacked({**parts, "weight_g_idx": index}, known, tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    unused = np.full(80, -1, np.int32)
    np.testing.assert_array_equal(unpacked({**parts, "weight_g_idx": unused}, known, tmp_path), parts["numbers"])


BAD: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "no scale": (lambda p: p.pop("weight_scale"), r"'x.weight_scale' is missing"),
    "no shape": (lambda p: p.pop("weight_shape"), r"'x.weight_shape' is missing"),
    "shape of three": (lambda p: p.update(weight_shape=np.array([1, 2, 3])), r"expected rows and columns"),
    "huge": (lambda p: p.update(weight_shape=np.array([21, 1 << 40])), r"expected rows and columns"),
    "negative": (lambda p: p.update(weight_shape=np.array([21, -80])), r"expected rows and columns"),
    "more columns": (lambda p: p.update(weight_shape=np.array([21, 96])), r"is no matrix of \(21, 96\)"),
    "scales": (lambda p: p.update(weight_scale=p["weight_scale"][:, :4]), r"is no matrix of \(21, 80\)"),
    "rows of scales": (lambda p: p.update(weight_scale=p["weight_scale"][:20]), r"is no matrix of \(21, 80\)"),
    "zero points": (lambda p: p.update(weight_zero_point=p["weight_zero_point"][:2]), r"does not fit scales"),
    "index": (lambda p: p.update(weight_g_idx=np.full(80, 5, np.int32)), r"names groups outside of 0 to 4"),
    "length of the index": (lambda p: p.update(weight_g_idx=np.zeros(8, np.int32)), r"expected I32 \(80,\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_parts_that_do_not_belong_together_are_one_line(case: str, tmp_path: Path) -> None:
    change, expected = BAD[case]
    parts = parts_of("asymmetric")
    change(parts)
    with pytest.raises(ConvertError, match=expected) as caught:
        unpacked(parts, schemes(CASES["asymmetric"][2]), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"num_bits": 3, "group_size": 32}, r"num_bits is 3 \(int\); expected int of \(2, 4, 8\) bits"),
        ({"num_bits": 4, "type": "float"}, r"num_bits is 4 \(float\)"),
        ({"num_bits": 4, "strategy": "block"}, "strategy is block; expected group, channel or tensor"),
        ({"num_bits": 4, "strategy": "group"}, "group_size is missing"),
    ],
)
def test_schemes_that_cannot_be_read_are_one_line(weights: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConvertError, match=expected):
        schemes(weights)


def _pack(x: np.ndarray, size: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Quantize a matrix to 4 bits, symmetric; return its packed tensors and its dequantized values."""
    groups = x.reshape(len(x), -1, size)
    scales = (np.abs(groups).max(axis=2) / np.float32(7)).astype(np.float32)
    codes = np.rint(groups / scales[:, :, None]).astype(np.int64)
    words = (codes.reshape(len(x), -1, 8) + 8 << 4 * np.arange(8)).sum(axis=2).astype(np.uint32).view(np.int32)
    stood_for = (codes.astype(np.float32) * scales[:, :, None]).reshape(x.shape)
    return {"packed": words, "scale": scales, "shape": np.array(x.shape)}, stood_for


def test_a_folder_with_packed_experts(tmp_path: Path) -> None:
    """A DeepSeek V3 with packed experts, as Kimi K2.5 is published, gives the logits of the dequantized weights."""
    spec = read_specs()["deepseek2-v3"]
    packed, plain = {}, {}
    for name, *rest in spec["tensors"]:
        x = numbers(name, *rest)
        if name.endswith("proj.weight"):
            parts, x = _pack(x, 8)
            packed |= {f"{name}_{part}": value for part, value in parts.items()}
        else:
            packed[name] = x
        plain[name] = x
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
    told = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    results = []
    senses = {"vision_tower.x.weight": np.ones(4, np.float32), "mm_projector.x.weight": np.ones(4, np.float32)}
    inside = {f"language_model.{name}": x for name, x in packed.items()} | senses
    outside = {"architectures": ["KimiK25ForConditionalGeneration"]}
    outside["text_config"] = {**spec["config"], "quantization_config": told}
    for tensors, config in ((inside, outside), (plain, spec["config"])):
        save(tmp_path / "model.safetensors", tensors)
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_tokenizer(spec["tokenizer"], tmp_path)
        with open_checkpoint(tmp_path) as model:
            assert len(model.notes) == (tensors is inside)  # the note on skipped tensors
            results.append(logits_of(model, ids()))
    np.testing.assert_array_equal(*results)
