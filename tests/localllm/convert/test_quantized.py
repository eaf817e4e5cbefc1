"""Weights packed by compressed-tensors are dequantized as by that package: integers of 2, 4 and 8 bits, and FP4 with
two codes a byte, as in DeepSeek 4 and Kimi K3.

`test_own` compares converted FP4 experts with llama.cpp's bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from localllm.convert import ConvertError, LazyTensor, open_checkpoint
from localllm.convert.hf_config import HfConfig
from localllm.convert.quantized import Packing, read_packing
from localllm.convert.safetensors import Shard
from localllm.convert.tensor_registry import TensorRegistry
from tests.localllm.convert.checkpoints import DATA, tensors_of, write
from tests.localllm.convert.make_data import CASES
from tests.localllm.convert.support import logits_of, save, values
from tests.localllm.convert.weights import ids

STORED = dict(np.load(DATA / "packed.npz"))
FP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
Arrays = dict[str, np.ndarray]


def quantization(*weights: dict[str, Any]) -> dict[str, Any]:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": {"type": "int", **w}} for i, w in enumerate(weights)}
    told = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return told | ({"config_groups": groups} if weights else {})


def packing_of(*weights: dict[str, Any], **told: Any) -> Packing:
    config = {"quantization_config": {**quantization(*weights), **told}}
    return read_packing(HfConfig(Path("config.json"), config, {}))


def fp4_packing(**changes: Any) -> Packing:
    return packing_of({**FP4, **changes}, format="mxfp4-pack-quantized")


@contextmanager
def taken(
    name: str, parts: Arrays, packing: Packing, folder: Path, types: Mapping[str, str] = MappingProxyType({})
) -> Iterator[LazyTensor]:
    """Yield a tensor that several stored ones make up."""
    save(folder / "x.safetensors", parts, types)
    shard = Shard(folder / "x.safetensors")
    try:
        found = TensorRegistry([shard], 1, packing)
        (tensor,) = found.take("", (f"{name}.weight",)) or ()
        assert found.rest() == []
        yield tensor
    finally:
        shard.close()


# -- integers ----------------------------------------------------------------------------------------------------------


def parts_of(case: str) -> Arrays:
    return {key.removeprefix(f"{case}:"): x for key, x in STORED.items() if key.startswith(f"{case}:")}


def unpacked(parts: Arrays, packing: Packing, folder: Path) -> np.ndarray:
    named = {f"x.{key}": value for key, value in parts.items() if key != "numbers"}
    with taken("x", named, packing, folder) as tensor:
        whole = values(tensor)
        for start, stop in ((0, 1), (3, 7), (5, len(whole))):  # row ranges that split a word of eight zero points
            assert_array_equal(tensor.read(start, stop).view(np.float32), whole[start:stop])
        return whole


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_compressed_tensors(case: str, tmp_path: Path) -> None:
    parts = parts_of(case)
    other = {"num_bits": 8, "strategy": "group", "group_size": 16}  # quantization scheme of the other matrices
    assert_array_equal(unpacked(parts, packing_of(other, CASES[case][2]), tmp_path), parts["numbers"])


def test_columns_in_an_order_of_their_own(tmp_path: Path) -> None:
    """`weight_g_idx` assigns each column to a group, whose scale and zero point it uses."""
    parts = parts_of("asymmetric")
    index = np.random.RandomState(1).permutation(np.arange(80) // 16).astype(np.int32)
    words = parts["weight_packed"].view(np.uint32)
    codes = np.stack([words >> 4 * i & 15 for i in range(8)], axis=-1).reshape(21, -1).astype(np.int64)
    down = parts["weight_zero_point"].view(np.uint32)
    zeros = np.stack([down >> 4 * i & 15 for i in range(8)], axis=1).reshape(24, -1)[:21].astype(np.int64)
    expected = (codes - zeros[:, index]) * parts["weight_scale"].astype(np.float64)[:, index]
    packing = packing_of(CASES["asymmetric"][2])
    found = unpacked({**parts, "weight_g_idx": index}, packing, tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    unused = np.full(80, -1, np.int32)
    assert_array_equal(unpacked({**parts, "weight_g_idx": unused}, packing, tmp_path), parts["numbers"])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 3, "group_size": 32}, r"num_bits is 3 \(int\); expected int of \(2, 4, 8\) bits"),
        ({"num_bits": 4, "type": "float"}, r"num_bits is 4 \(float\)"),
        ({"num_bits": 4, "strategy": "block"}, "strategy is block; expected group, channel or tensor"),
        ({"num_bits": 4, "strategy": "group"}, "group_size is missing"),
    ],
)
def test_schemes_that_cannot_be_read_are_one_line(weights: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        packing_of(weights)


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
    packed, plain = {}, {}
    for name, x in tensors_of("deepseek2-v3").items():
        if name.endswith("proj.weight"):
            parts, x = _pack(x, 8)
            packed |= {f"{name}_{part}": value for part, value in parts.items()}
        else:
            packed[name] = x
        plain[name] = x
    told = quantization({"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8})
    senses = {"vision_tower.x.weight": np.ones(4, np.float32), "mm_projector.x.weight": np.ones(4, np.float32)}
    inside = {f"language_model.{name}": x for name, x in packed.items()} | senses
    folder, results = write("deepseek2-v3", tmp_path, plain), []
    with open_checkpoint(folder) as model:
        assert model.notes == ()
        results.append(logits_of(model, ids()))
    text = {**json.loads((folder / "config.json").read_text()), "quantization_config": {**told, "ignore": ["lm_head"]}}
    outside = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(outside))
    save(folder / "model.safetensors", inside)
    with open_checkpoint(folder) as model:
        assert len(model.notes) == 1  # the note on skipped tensors
        results.append(logits_of(model, ids()))
    assert_array_equal(*results)


# -- FP4 ---------------------------------------------------------------------------------------------------------------

LEVELS = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)  # E2M1 values, OCP Microscaling 1.0
CODES = np.random.RandomState(2).randint(0, 256, (6, 32), np.uint8)  # two codes a byte, the first in the low half
SCALES = np.random.RandomState(3).randint(120, 130, (6, 2), np.uint8)
NUMBERS = LEVELS[np.stack([CODES & 15, CODES >> 4], axis=-1).reshape(6, 64)] * np.exp2(
    np.repeat(SCALES.astype(np.float32) - 127, 32, axis=1)
)


@pytest.mark.parametrize("of_kimi", [True, False])
@pytest.mark.parametrize(("base", "kept"), [("model.layers.0.x.experts.0.w1", "MXFP4"), ("model.layers.0.x.wq", "F32")])
def test_numbers_are_levels_times_powers_of_two(of_kimi: bool, base: str, kept: str, tmp_path: Path) -> None:
    codes, scales = (f"{base}.{x}" for x in (("weight_packed", "weight_scale") if of_kimi else ("weight", "scale")))
    types = {} if of_kimi else {codes: "I8", scales: "F8_E8M0"}
    packing = fp4_packing() if of_kimi else Packing()
    with taken(base, {codes: CODES, scales: SCALES}, packing, tmp_path, types) as tensor:
        assert (tensor.format, tensor.shape) == (kept, (6, 64))
        assert_array_equal(values(tensor), NUMBERS)
        assert_array_equal(tensor.read(2, 5), tensor.read(0, 6)[2:5])


def test_groups_that_nobody_tells_are_those_of_mxfp4() -> None:
    assert packing_of(format="mxfp4-pack-quantized") == fp4_packing() == Packing(fp4=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 16}, "group_size is 16; expected 32, as in MXFP4"),
        ({"num_bits": 8}, "num_bits is 8; expected 4, as in MXFP4"),
        ({"type": "int"}, "type is int; expected float, as in MXFP4"),
    ],
)
def test_codes_of_another_kind_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        fp4_packing(**change)


# -- parts that do not belong together ---------------------------------------------------------------------------------

INTEGERS, CODED = parts_of("asymmetric"), {"weight_packed": CODES, "weight_scale": SCALES}
# Parts, what replaces some of them, and the message.
BAD: list[tuple[Arrays, dict[str, np.ndarray | None], str]] = [
    (INTEGERS, {"weight_scale": None}, "'x.weight_scale' is missing"),
    (INTEGERS, {"weight_shape": None}, "'x.weight_shape' is missing"),
    (INTEGERS, {"weight_shape": np.array([1, 2, 3])}, "expected rows and columns"),
    (INTEGERS, {"weight_shape": np.array([21, 1 << 40])}, "expected rows and columns"),
    (INTEGERS, {"weight_shape": np.array([21, -80])}, "expected rows and columns"),
    (INTEGERS, {"weight_shape": np.array([21, 96])}, r"is not a matrix of \(21, 96\)"),
    (INTEGERS, {"weight_scale": INTEGERS["weight_scale"][:, :4]}, r"is not a matrix of \(21, 80\)"),
    (INTEGERS, {"weight_scale": INTEGERS["weight_scale"][:20]}, r"is not a matrix of \(21, 80\)"),
    (INTEGERS, {"weight_zero_point": INTEGERS["weight_zero_point"][:2]}, "does not fit scales"),
    (INTEGERS, {"weight_g_idx": np.full(80, 5, np.int32)}, "names groups outside of 0 to 4"),
    (INTEGERS, {"weight_g_idx": np.zeros(8, np.int32)}, r"expected I32 \(80,\)"),
    (CODED, {"weight_scale": None}, "'x.weight_scale' is missing"),
    (CODED, {"weight_scale": SCALES[:, :1]}, r"\(6, 32\) with scales U8 \(6, 1\)"),
    (CODED, {"weight_packed": CODES.astype(np.float32)}, r"F32 \(6, 32\) with scales U8 \(6, 2\)"),
    (CODED, {"weight": CODES}, "is present both packed and unpacked"),
]


@pytest.mark.parametrize(("parts", "changes", "message"), BAD)
def test_parts_that_do_not_belong_together(
    parts: Arrays, changes: dict[str, np.ndarray | None], message: str, tmp_path: Path
) -> None:
    packing = fp4_packing() if parts is CODED else packing_of(CASES["asymmetric"][2])
    with pytest.raises(ConvertError, match=message) as error:
        unpacked({key: x for key, x in {**parts, **changes}.items() if x is not None}, packing, tmp_path)
    assert "\n" not in str(error.value)
