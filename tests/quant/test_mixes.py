"""The quantization mixes equal llama-quantize's: the format of every tensor of 42 models, for every type and option."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from localllm.quant import QuantError
from localllm.quant.mixes import ALIASES, MIXES, Geometry, MixOptions, allows, choose_formats, find, in_order

CASES = json.loads(gzip.decompress(Path(__file__).with_name("mixes.json.gz").read_bytes()))
OPTIONS = {
    "": MixOptions(),
    "imatrix": MixOptions(imatrix=True),
    "pure": MixOptions(pure=True),
    "leave-output": MixOptions(leave_output=True),
    "types": MixOptions(output="Q5_K", embedding="Q3_K"),
    "regex": MixOptions(overrides=((re.compile("attn_v"), "Q8_0"), (re.compile(r"blk\.[01]\.ffn_.*"), "Q6_K"))),
}


def formats(case: dict[str, Any], kind: str, options: MixOptions) -> str | None:
    tensors = [(name, tuple(shape), now) for name, shape, now in case["tensors"]]
    try:
        return " ".join(c.format for c in choose_formats(find(kind), Geometry(**case["geometry"]), tensors, options))
    except QuantError:
        return None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["model"])
def test_the_same_formats_as_llama_quantize(case: dict[str, Any]) -> None:
    wrong = {}
    for options, types in case["formats"].items():
        for kind, expected in types.items():
            found = formats(case, kind, OPTIONS[options])
            if found != expected:
                pairs = zip(case["tensors"], (found or "").split(), (expected or "").split(), strict=False)
                wrong[options, kind] = [(t[0], ours, theirs) for t, ours, theirs in pairs if ours != theirs][:5]
    assert not wrong


def test_the_table_has_every_type_of_llama_quantize_and_cases_of_all() -> None:
    assert {*MIXES, *ALIASES} - {"MXFP4"} == set(CASES[0]["formats"][""])
    assert len(CASES) == 42
    assert sum(len(types) for case in CASES for types in case["formats"].values()) > 4000


def test_names_are_found_in_any_case_and_an_unknown_one_is_explained() -> None:
    assert find("q4_k_m").name == find("Q4_K").name == "Q4_K_M"
    for unknown in ("Q9", "5", "-1", ""):
        with pytest.raises(QuantError, match=rf"unknown type '{unknown}'; known: F32, .*MXFP4_MOE.*, COPY, and their"):
            find(unknown)


def test_the_numbers_of_llama_quantize_are_names_too() -> None:
    """Quantization types may be given by the numbers that `llama-quantize --help` prints."""
    numbers = {0: "F32", 2: "Q4_0", 7: "Q8_0", 12: "Q3_K_M", 15: "Q4_K_M", 20: "IQ2_XS", 32: "BF16", 38: "MXFP4_MOE"}
    assert {number: find(str(number)).name for number in numbers} == numbers
    assert {find(str(mix.file_type)).name for mix in MIXES.values()} == set(MIXES) - {"MXFP4"}


def test_every_format_of_a_rule_is_one_that_exists() -> None:
    from localllm.quant import FORMATS

    for mix in MIXES.values():
        assert {mix.format, mix.output, mix.embedding or mix.format, *(rule.format for rule in mix.rules)} <= set(
            FORMATS
        )


def test_types_below_three_bits_need_an_importance_matrix() -> None:
    """Without an importance matrix, llama-quantize rejects IQ1, IQ2, IQ3_XXS and Q2_K_S, except for embedding and
    output matrices.
    """
    tensors = [("token_embd.weight", (32, 256), "F16"), ("blk.0.ffn_up.weight", (256, 256), "F16")]
    geometry = Geometry("llama", 2, 4, 4)
    for name in MIXES:
        needs = [c.needs_imatrix for c in choose_formats(find(name), geometry, tensors, MixOptions(pure=True))]
        assert needs == [False, name in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "Q2_K_S")]


def test_mxfp4_is_ours_and_means_every_matrix() -> None:
    tensors = [("token_embd.weight", (32, 256), "F16"), ("blk.0.ffn_up.weight", (256, 256), "F16")]
    found = [
        c.format
        for c in choose_formats(
            find("MXFP4"), Geometry("llama", 2), [*tensors, ("output.weight", (32, 256), "F16")], MixOptions()
        )
    ]
    assert found == ["MXFP4", "MXFP4", "Q6_K"]


def test_rows_that_fill_no_block_fall_back() -> None:
    """If blocks of 256 do not fit a row, blocks of 32 are used, then F16, as in llama-quantize. A
    quantization type without a fallback is rejected.
    """
    kinds = {"Q4_K_S": ["Q4_K", "Q5_0", "F16"], "IQ4_XS": ["IQ4_XS", "IQ4_NL", "F16"], "Q8_0": ["Q8_0", "Q8_0", "F16"]}
    for kind, expected in kinds.items():
        tensors = [(f"blk.9.x{n}.weight", (4, n), "F32") for n in (256, 288, 40)]
        assert [c.format for c in choose_formats(find(kind), Geometry("llama", 10), tensors, MixOptions())] == expected
    with pytest.raises(
        QuantError, match=r"x\.weight': rows of 96 values do not fill blocks of 128, and Q1_0 has no fallback"
    ):
        choose_formats(find("Q1_0"), Geometry("llama", 1), [("x.weight", (4, 96), "F32")], MixOptions())


def test_the_first_override_that_is_found_counts_and_floats_may_be_overridden() -> None:
    options = MixOptions(overrides=((re.compile("up"), "Q6_K"), (re.compile("ffn"), "Q8_0")))
    tensors = [(f"blk.0.ffn_{what}.weight", (256, 256), "F32") for what in ("up", "down", "gate")]
    assert [c.format for c in choose_formats(find("F16"), Geometry("llama", 1), tensors, options)] == [
        "Q6_K",
        "Q8_0",
        "Q8_0",
    ]


def test_tensors_are_ordered_as_llama_quantize_orders_them() -> None:
    names = ["blk.10.a", "output.weight", "blk.2.b", "blk.2.a", "blk.0.z"]
    assert in_order(names) == ["output.weight", "blk.0.z", "blk.2.a", "blk.2.b", "blk.10.a"]


def test_vectors_norms_and_routers_are_kept() -> None:
    assert allows("blk.0.attn_q.weight", (2, 256), "llama")
    assert not allows("blk.0.attn_q.weight", (1, 256), "llama")  # ggml stores a matrix of one row as a vector
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight", "position_embd.weight", "blk.0.attn_q.bias"):
        assert not allows(name, (2, 256), "llama")
    assert allows("blk.0.attn_k_b.weight", (2, 2, 256), "deepseek2")
    assert not allows("blk.0.attn_k_b.weight", (2, 2, 256), "glm5-next")
