"""Quantization labels in GGUF file names, in the forms that publishers on the hub use."""

from __future__ import annotations

import pytest

from localllm.hub.labels import Variant, is_model, label_of, matching, titles, variants


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M", "Q4_K_M"),
        ("tinyllama-1.1b-chat-v1.0.Q4_K_M", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q8_0", "Q8_0"),
        ("phi-2_q5_k_s", "Q5_K_S"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("gpt-oss-20b-MXFP4_MOE", "MXFP4_MOE"),
        ("UD-Q4_K_XL/Qwen3-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("x.i1-IQ3_XXS", "IQ3_XXS"),
        ("model-Q4_0_4_4", "Q4_0_4_4"),
        ("bitnet-TQ2_0", "TQ2_0"),
        ("m-fp16", "F16"),
        ("stories260K-f32", "F32"),
        ("Q8_0/model-F16", "F16"),  # of several labels, the last one counts
        ("model", ""),
        ("iq-test-f1600", ""),
        ("Q4K", ""),
    ],
)
def test_the_quantization_is_read_from_the_name(name: str, label: str) -> None:
    assert label_of(name) == label


@pytest.mark.parametrize(
    "name",
    [
        "mmproj-F16.gguf", "gemma-3-4b-it-mmproj-f16.gguf", "imatrix.gguf", "x.imatrix.gguf", "ggml-vocab-llama.gguf",
        "mtp-Q8_0.gguf", "eagle3-x.gguf", "model.safetensors", "model.gguf.part", "sub/mmproj-Q8_0.gguf",
    ],
)  # fmt: skip
def test_what_is_no_model_is_skipped(name: str) -> None:
    assert not is_model(name)
    assert variants([name]) == []


def test_parts_of_a_split_model_are_one() -> None:
    parts = [f"big-Q8_0-{n:05d}-of-00003.gguf" for n in (3, 1, 2)]
    other = "big-Q8_0-00001-of-00002.gguf"  # part 1 of 2, unlike the other parts of 3
    whole, rest = sorted(variants([*parts, other, "mmproj-F16.gguf"]), key=lambda each: len(each.missing))
    assert whole == Variant("big-Q8_0", "Q8_0", tuple(sorted(parts)))
    assert rest == Variant("big-Q8_0", "Q8_0", (other,), (2,))


def test_a_number_of_parts_that_lies_costs_nothing() -> None:
    (found,) = variants(["x-00002-of-99999.gguf"])
    assert found.missing == (1, 3, 4, 5)
    assert variants(["x-00000-of-00002.gguf", "x-00003-of-00002.gguf"]) == []


GIVEN = variants(
    ["m-Q4_K_M.gguf", "m-Q4_0.gguf", "m-Q8_0.gguf", "m-UD-Q4_K_XL.gguf", "m-UD-Q8_0.gguf", "m-IQ4_XS.gguf", "m.gguf"]
)


@pytest.mark.parametrize(
    ("quant", "found"),
    [
        ("Q4_K_M", ["m-Q4_K_M"]),
        ("q4_k_m", ["m-Q4_K_M"]),
        ("q4", ["m-Q4_0", "m-Q4_K_M", "m-UD-Q4_K_XL"]),
        ("Q4_K", ["m-Q4_K_M", "m-UD-Q4_K_XL"]),
        ("IQ4", ["m-IQ4_XS"]),
        ("Q8_0", ["m-Q8_0"]),  # an exact label before the UD variant
        ("UD-Q8_0", ["m-UD-Q8_0"]),
        ("Q4_K_XL", ["m-UD-Q4_K_XL"]),
        ("m-q8_0.gguf", ["m-Q8_0"]),
        ("m", ["m"]),
        ("Q5_K_M", []),
        ("Q", []),
        ("4", []),
    ],
)
def test_a_quantization_is_matched_whole_or_by_its_beginning(quant: str, found: list[str]) -> None:
    assert [each.name for each in matching(GIVEN, quant)] == found


def test_names_are_short_where_that_is_unique() -> None:
    given = variants(["a-Q4_0.gguf", "b-Q4_0.gguf", "a-Q8_0.gguf", "sub/x.gguf"])
    assert list(titles("u/r", given).values()) == ["u/r:a-Q4_0", "u/r:Q8_0", "u/r:b-Q4_0", "u/r:sub/x"]
    assert list(titles("u/r", variants(["x.gguf"])).values()) == ["u/r"]
    assert list(titles("", variants(["x.gguf", "y-Q4_0.gguf"])).values()) == ["x", "y-Q4_0"]
