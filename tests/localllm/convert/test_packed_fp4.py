"""Packed FP4 experts with two codes a byte, as in DeepSeek 4 and Kimi K3: accepted and refused layouts.

`test_own` compares the converted experts with llama.cpp's bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.quantized import Packing, read_packing
from localllm.convert.safetensors import Shard
from localllm.convert.tensor_registry import TensorRegistry
from tests.localllm.convert.support import save, values

LEVELS = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)  # E2M1 values, OCP Microscaling 1.0
CODES = np.random.RandomState(2).randint(0, 256, (6, 32), np.uint8)  # two codes a byte, the first in the low half
SCALES = np.random.RandomState(3).randint(120, 130, (6, 2), np.uint8)
NUMBERS = LEVELS[np.stack([CODES & 15, CODES >> 4], axis=-1).reshape(6, 64)] * np.exp2(
    np.repeat(SCALES.astype(np.float32) - 127, 32, axis=1)
)
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}


def told(weights: dict[str, Any] | None) -> dict[str, Any]:
    groups = {} if weights is None else {"config_groups": {"group_0": {"weights": weights}}}
    return {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", **groups}


def packing_of(weights: dict[str, Any] | None) -> Packing:
    return read_packing(HfConfig(Path("config.json"), {"quantization_config": told(weights)}, {}))


Storage = Callable[[str], tuple[dict[str, np.ndarray], dict[str, str], Packing]]


def as_deepseek(base: str) -> tuple[dict[str, np.ndarray], dict[str, str], Packing]:
    kinds = {f"{base}.weight": "I8", f"{base}.scale": "F8_E8M0"}
    return {f"{base}.weight": CODES, f"{base}.scale": SCALES}, kinds, Packing()


def as_kimi(base: str) -> tuple[dict[str, np.ndarray], dict[str, str], Packing]:
    return {f"{base}.weight_packed": CODES, f"{base}.weight_scale": SCALES}, {}, packing_of(WEIGHTS)


@pytest.mark.parametrize("storage", [as_deepseek, as_kimi])
@pytest.mark.parametrize(("base", "kept"), [("model.layers.0.x.experts.0.w1", "MXFP4"), ("model.layers.0.x.wq", "F32")])
def test_numbers_are_levels_times_powers_of_two(storage: Storage, base: str, kept: str, tmp_path: Path) -> None:
    tensors, types, packing = storage(base)
    save(tmp_path / "x.safetensors", tensors, types)
    shard = Shard(tmp_path / "x.safetensors")
    try:
        found = TensorRegistry([shard], 1, packing)
        (tensor,) = found.take("", (f"{base}.weight",)) or ()
        assert (tensor.format, tensor.shape, found.rest()) == (kept, (6, 64), [])
        np.testing.assert_array_equal(values(tensor), NUMBERS)
        np.testing.assert_array_equal(tensor.read(2, 5), tensor.read(0, 6)[2:5])
    finally:
        shard.close()


def test_groups_that_nobody_tells_are_those_of_mxfp4() -> None:
    assert packing_of(None) == packing_of(WEIGHTS) == Packing(fp4=True)


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
        packing_of({**WEIGHTS, **change})


BAD: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "no scale": ({"x.weight_packed": CODES}, "'x.weight_scale' is missing"),
    "few scales": ({"x.weight_packed": CODES, "x.weight_scale": SCALES[:, :1]}, r"\(6, 32\) with scales U8 \(6, 1\)"),
    "numbers": (
        {"x.weight_packed": CODES.astype(np.float32), "x.weight_scale": SCALES},
        r"F32 \(6, 32\) with scales U8 \(6, 2\)"
    ),
    "twice": (
        {"x.weight_packed": CODES, "x.weight_scale": SCALES, "x.weight": CODES}, "is there packed and unpacked"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_parts_that_do_not_belong_together_are_one_line(case: str, tmp_path: Path) -> None:
    tensors, message = BAD[case]
    save(tmp_path / "x.safetensors", tensors)
    shard = Shard(tmp_path / "x.safetensors")
    with pytest.raises(ConvertError, match=message) as error:
        TensorRegistry([shard], 1, packing_of(WEIGHTS))
    shard.close()
    assert "\n" not in str(error.value)
