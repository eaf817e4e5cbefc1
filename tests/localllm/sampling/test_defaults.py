"""Sampling defaults in a GGUF: llama.cpp's keys, overridden by the user, and ignored if invalid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm as api
from localllm.options import SamplingOptions
from localllm.options.sampling import ORDER
from localllm.sampling.defaults import file_defaults
from tests.localllm.support import localllm, write_model

FILE: dict[str, Any] = {
    "general.sampling.temp": np.float32(0.25),
    "general.sampling.top_k": np.int32(7),
    "general.sampling.top_p": np.float32(0.5),
    "general.sampling.min_p": np.float32(0.125),
    "general.sampling.xtc_probability": np.float32(0.5),
    "general.sampling.xtc_threshold": np.float32(0.25),
    "general.sampling.penalty_last_n": np.int32(9),
    "general.sampling.penalty_repeat": np.float32(1.5),
    "general.sampling.sequence": "top-k;temp;minp;typ;infill",
    "general.sampling.mirostat": np.int32(2),
    "general.sampling.mirostat_tau": np.float32(4.5),
    "general.sampling.mirostat_eta": np.float32(0.25),
}


def test_every_key_of_llama_cpp_arrives() -> None:
    found = file_defaults({key: getattr(value, "item", lambda value=value: value)() for key, value in FILE.items()})
    assert found.notes == ()
    assert found.options({}) == SamplingOptions(
        temperature=0.25, top_k=7, top_p=0.5, min_p=0.125, xtc_probability=0.5, xtc_threshold=0.25, repeat_last_n=9,
        repeat_penalty=1.5, samplers=("top_k", "temperature", "min_p", "typ_p", "infill"),
        mirostat=2, mirostat_tau=4.5, mirostat_eta=0.25,
    )  # fmt: skip


def test_what_is_asked_for_goes_first_also_where_it_is_the_program_s_default() -> None:
    found = file_defaults({"general.sampling.temp": 0.25, "general.sampling.top_k": 7})
    assert found.options({"temperature": 0.8}) == SamplingOptions(temperature=0.8, top_k=7)


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        ("temp", "hot", "general.sampling.temp is 'hot' and does not count: it must be a finite number"),
        ("temp", float("nan"), "finite"),
        ("top_p", 7.0, "it must be a number from 0 to 1"),
        ("top_k", 2.5, "whole number"),
        ("penalty_last_n", -1, "0 or more"),
        ("sequence", "top_k;best", "known are penalties;".replace(";", ", ")),
        ("sequence", "", "known are"),
        ("sequence", 5, "known are"),
        ("sequence", "x" * 10**6, "known are"),
        ("mirostat", 3, "it must be 0, 1 or 2"),
        ("temp", np.zeros(3), "ndarray"),
    ],
)
def test_what_cannot_be_honoured_is_told_and_left(key: str, value: Any, note: str) -> None:
    found = file_defaults({"general.sampling." + key: value})
    assert found.options({}) == SamplingOptions()
    assert len(found.notes) == 1
    assert note in found.notes[0]
    assert len(found.notes[0]) < 300


def test_a_file_without_them_says_nothing() -> None:
    assert file_defaults({"general.name": "x"}) == file_defaults({})


def test_the_program_goes_by_them(tmp_path: Path) -> None:
    greedy = write_model(tmp_path / "m.gguf", extra=FILE | {"general.sampling.temp": np.float32(0.0)})
    broken = write_model(tmp_path / "b.gguf", extra={"general.sampling.top_p": np.float32(7.0)})
    said = {localllm("run", greedy, "one", "-n", 8, "-s", seed).stdout for seed in (1, 2, 3)}
    assert len(said) == 1
    asked = {
        localllm("run", greedy, "one", "-n", 8, "-s", n, "--temp", 5, "--top-k", 0, "--min-p", 0).stdout for n in (1, 2)
    }
    assert len(asked) == 2
    with api.load(greedy) as model:
        texts = {"".join(p.text for p in model.generate("one", max_tokens=8)) for _ in range(3)}
    assert len(texts) == 1
    shown = localllm("show", greedy)
    assert "temperature 0.0, top_k 7" in shown.stdout
    assert "samplers top_k;temperature;min_p;typ_p;infill" in shown.stdout
    assert "mirostat 2, mirostat_tau 4.5" in shown.stdout
    facts = json.loads(localllm("show", broken, "--json").stdout)
    assert facts["sampling"]["defaults"] == {}
    warned = localllm("run", broken, "one", "-n", 2)
    assert warned.returncode == 0
    assert "note: the file's general.sampling.top_p is 7.0 and does not count" in warned.stderr


@pytest.mark.parametrize("spec", ["off", "ngram"])
def test_suppressed_tokens_of_the_file(spec: str, tmp_path: Path) -> None:
    """The expected greedy answers are llama-server's for the same two GGUFs. The second GGUF suppresses "$", "n" and
    "x".
    """
    plain = write_model(tmp_path / "plain.gguf")
    suppressed = {"tokenizer.ggml.suppress_tokens": np.array([265, 339, 349], np.int32)}
    without = write_model(tmp_path / "without.gguf", extra=suppressed)
    for path, answer in ((plain, "r?\\nzgx?\\nzgx5:Yv31$1$4n"), (without, "r?\\5:::Yv+RvI[I[I[I[I[I[")):
        with api.load(path, ctx_size=64, spec=spec) as model:
            pieces = model.generate("Hello you", temperature=0, max_tokens=24, ignore_eos=True)
            assert "".join(piece.text for piece in pieces) == answer


def test_every_name_of_a_sampler_is_known() -> None:
    for name in ORDER:
        for spelling in (name, name.replace("_", "-"), name.replace("_", "")):
            assert file_defaults({"general.sampling.sequence": spelling}).values == {"samplers": (name,)}
