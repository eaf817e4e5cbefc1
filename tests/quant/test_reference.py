"""Blocks and dequantized values equal ggml's bit for bit, and equal gguf-py's on random bytes."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from localllm import quant
from tests.conftest import reference

STORED = sorted(set(quant.FORMATS) - {"F32", "F64", "I8", "I16", "I32", "I64"})  # formats with reference bytes
WRITABLE = [name for name in STORED if quant.FORMATS[name].quantize]
BLOCKS = np.load(Path(__file__).with_name("blocks.npz"))
NO_PLAIN = {"IQ1_S", "IQ2_XXS", "IQ2_XS"}  # ggml quantizes to these only with importance weights


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Check bitwise equality, including the sign of zeros. Any NaN equals any NaN."""
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    expected = np.ascontiguousarray(expected, np.float32)
    different = (got.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(got) & np.isnan(expected))
    assert not different.any(), (
        f"{different.sum()} of {different.size} values differ, first at {np.argwhere(different)[0]}"
    )


def test_the_table_holds_every_format_of_the_reference() -> None:
    assert len(STORED) == 27
    assert WRITABLE == STORED


@pytest.mark.parametrize("name", STORED)
def test_dequantize_gives_the_values_of_ggml(name: str) -> None:
    expected = BLOCKS[f"{name}.values"]
    stored = BLOCKS[f"{name}.imatrix"][:, : quant.row_bytes(name, expected.shape[1])]
    assert_same_bits(quant.dequantize(stored, name), expected)


@pytest.mark.parametrize("name", WRITABLE)
def test_quantize_gives_the_bytes_of_ggml(name: str) -> None:
    if name not in NO_PLAIN:
        np.testing.assert_array_equal(quant.quantize(BLOCKS["x"], name), BLOCKS[f"{name}.plain"])
    np.testing.assert_array_equal(quant.quantize(BLOCKS["x"], name, BLOCKS["imatrix"]), BLOCKS[f"{name}.imatrix"])


@pytest.mark.parametrize("name", STORED)
def test_whole_reference(name: str) -> None:
    """The reference has 64 rows of 1024 values, with and without importance weights."""
    data = np.load(reference("formats", f"{name}.npz"))
    source = np.load(reference("formats", "input.npz"))
    for kind, importance in (("plain", None), ("imatrix", source["imatrix"])):
        if kind == "plain" and name in NO_PLAIN:
            continue
        assert_same_bits(quant.dequantize(data[f"bytes_{kind}"], name), data[f"values_{kind}"])
        if name in WRITABLE:
            np.testing.assert_array_equal(quant.quantize(source["x"], name, importance), data[f"bytes_{kind}"])


def test_importance_changes_the_searched_formats_only() -> None:
    plain = set(STORED) - NO_PLAIN
    same = {name for name in plain if (BLOCKS[f"{name}.plain"] == BLOCKS[f"{name}.imatrix"]).all()}
    assert same == {"F16", "BF16", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0"}


def test_type_ids_and_sizes_are_those_of_gguf() -> None:
    gguf = pytest.importorskip("gguf")
    for fmt in quant.FORMATS.values():
        if fmt.type_id in set(gguf.GGMLQuantizationType):  # older gguf releases do not list the newest types
            sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(fmt.type_id)]
            assert gguf.GGMLQuantizationType(fmt.type_id).name == fmt.name
            assert sizes == (fmt.block_values, fmt.block_bytes)
        assert quant.by_type_id(fmt.type_id) is fmt


@pytest.mark.parametrize("name", ["F32", *STORED])
def test_random_bytes_mean_what_gguf_says(name: str) -> None:
    """Every bit pattern is a valid block. This covers damaged scales, unused codes, and all points of the codebooks."""
    gguf = pytest.importorskip("gguf")
    if name not in gguf.GGMLQuantizationType.__members__:
        pytest.skip(f"this gguf does not know {name}")
    fmt = quant.FORMATS[name]
    stored = np.random.default_rng(fmt.type_id).integers(0, 256, (64, 8 * fmt.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        try:
            expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name])
        except NotImplementedError:
            pytest.skip(f"this gguf cannot read {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = quant.dequantize(stored, name)
    assert_same_bits(got, expected)
