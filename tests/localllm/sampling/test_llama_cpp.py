"""Mirostat, adaptive-p and infill give the same probabilities as llama.cpp's library at every token.

`make_llama_cpp.py` wrote data/llama_cpp.json: llama.cpp's probabilities for the logits of `llama_cpp_cases.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.options import SamplingOptions
from localllm.sampling.errors import SamplingError
from localllm.sampling.sampler import Sampler
from tests.localllm.sampling.llama_cpp_cases import FOLLOWING, INFILL, LISTED, infill_logits, logits

FACTS = json.loads(Path(__file__).with_name("data").joinpath("llama_cpp.json").read_text())


@pytest.fixture(scope="module")
def demo() -> Iterator[localllm.Model]:
    with localllm.load("demo", ctx_size=128, spec="off") as model:
        yield model


def options_of(case: str) -> SamplingOptions:
    changed = {"top_k": 0, "min_p": 0.0, **FOLLOWING[case]}
    chain = () if "mirostat" in case else ("adaptive_p", "top_k", "min_p", "temperature")
    return SamplingOptions(seed=1, samplers=chain, **changed)


@pytest.mark.parametrize("case", FOLLOWING)
def test_probabilities_follow_the_tokens_chosen_so_far(case: str) -> None:
    sampler = Sampler(options_of(case))
    for step, (chosen, count, likely) in enumerate(FACTS["following"][case]):
        ids, p = sampler.distribution(logits(case, step))
        found = dict(zip(ids.tolist(), p.tolist(), strict=True))
        assert len(found) == count
        expected = {int(token): value for token, value in likely.items()}
        assert {token: found.get(token, 0.0) for token in expected} == pytest.approx(expected, rel=2e-4, abs=1e-6)
        assert sorted(found.values())[-LISTED:] == pytest.approx(sorted(expected.values()), rel=2e-4, abs=1e-6)
        sampler.write(chosen)


def test_infill_keeps_what_llama_cpp_keeps(demo: localllm.Model) -> None:
    tokenizer = demo.tokenizer
    pieces = list(map(partial(tokenizer.piece, special=False), range(tokenizer.vocab_size)))
    seen = set()
    for case in range(INFILL):
        row, most = infill_logits(case, pieces, sorted(tokenizer.eog))
        sampler = demo.sampler(SamplingOptions(samplers=("top_k", "infill"), top_k=most))
        ids, p = sampler.distribution(row)
        expected = {int(token): value for token, value in FACTS["infill"][case].items()}
        assert dict(zip(ids.tolist(), p.tolist(), strict=True)) == pytest.approx(expected, rel=2e-4)
        seen.add((len(expected), bool(expected.keys() & tokenizer.eog)))
    assert {(1, False), (1, True), (2, False)} <= seen  # a text, the end token, and a choice


def test_infill_of_a_whole_vocabulary(demo: localllm.Model) -> None:
    """llama.cpp compares every pair of candidates. With a whole vocabulary, one request could then block all others."""
    row = np.zeros(demo.tokenizer.vocab_size, np.float32)
    row[5] = 60.0
    sampler = demo.sampler(SamplingOptions(samplers=("infill",), temperature=1.0))
    assert sampler.distribution(row)[0].tolist() == [5, *sorted(demo.tokenizer.eog)]


@pytest.mark.parametrize(
    "changed",
    [
        {"mirostat": 1, "mirostat_tau": 3.0},
        {"mirostat": 2, "mirostat_tau": 3.0},
        {"adaptive_target": 0.3, "samplers": ("top_k", "temperature", "adaptive_p")},
    ],
    ids=["mirostat", "mirostat 2", "adaptive-p"],
)
def test_answers_do_not_depend_on_drafts(demo: localllm.Model, changed: dict[str, Any]) -> None:
    """The prompt is repetitive, so that n-gram drafts match. Some answers have a grammar."""
    prompt = "one two three one two three one two three one two"
    with localllm.load("demo", ctx_size=128, spec="ngram") as drafting:
        for seed in range(4):
            given: dict[str, Any] = {"max_tokens": 24, "seed": seed, "ignore_eos": True, **changed}
            if seed == 3:
                given["grammar"] = 'root ::= (("one" | "two" | "three") " "){20}'
            told = [[piece.token for piece in model.generate(prompt, **given)] for model in (demo, drafting)]
            assert told[0] == told[1]


def test_infill_needs_a_vocabulary() -> None:
    with pytest.raises(SamplingError, match="leave it out"):
        Sampler(SamplingOptions(samplers=("infill",))).distribution(np.zeros(4, np.float32))


@pytest.mark.parametrize("case", ["mirostat", "mirostat 2", "adaptive-p"])
def test_only_written_tokens_count(case: str) -> None:
    """Drafts, repeated sampling and prompt tokens do not change later probabilities. `reset` starts over."""
    plain, busy = Sampler(options_of(case)), Sampler(options_of(case))
    for token in (5, 6, 7):
        busy.accept(token)
    first = plain.distribution(logits(case, 0))[1].tolist()
    for step in range(6):
        row = logits(case, step)
        with busy.drafting():
            before = busy.snapshot()
            busy.accept(busy.sample(row[::-1].copy()))
            busy.restore(before)
        expected = plain.distribution(row)
        list(busy.stages(row))
        found = busy.distribution(row)
        assert found[0].tolist() == expected[0].tolist()
        assert found[1].tolist() == expected[1].tolist()
        token = int(expected[0][expected[1].argmin()])
        plain.write(token)
        busy.write(token)
    assert plain.distribution(logits(case, 0))[1].tolist() != first
    plain.reset()
    assert plain.distribution(logits(case, 0))[1].tolist() == first
