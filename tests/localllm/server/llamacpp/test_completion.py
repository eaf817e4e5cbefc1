"""/completion in llama.cpp's format (tools/server/README.md and tests/unit/test_completion.py of llama.cpp)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from localllm.generation.request import Prefilled, Started
from localllm.server.settings import ServerSettings
from localllm.server.turn import Completion, Structure
from tests.localllm.server.calls import call, events
from tests.localllm.server.llamacpp.completing import asked, complete
from tests.localllm.server.scripted import ScriptedService, done, said, script

# -- whole answers ---------------------------------------------------------------------------------------------------


def test_timings() -> None:
    assert complete()["timings"] == {
        "cache_n": 2, "prompt_n": 3, "prompt_ms": 10.0, "prompt_per_token_ms": pytest.approx(10 / 3),
        "prompt_per_second": pytest.approx(300), "predicted_n": 2, "predicted_ms": 20.0, "predicted_per_token_ms": 20.0,
        "predicted_per_second": pytest.approx(50),
    }  # fmt: skip


def test_a_full_context_is_truncated() -> None:
    for tokens, truncated in ((4096 - 5, True), (4096 - 6, False)):
        assert complete([Started(5, 0), *said("a"), done("length", answer_tokens=tokens)])["truncated"] is truncated


def test_the_first_token_takes_no_step() -> None:
    timings = complete([Started(5, 0), *said("a"), done("length", answer_tokens=1)])["timings"]
    assert (timings["predicted_per_second"], timings["predicted_per_token_ms"]) == (0.0, 0.0)
    assert all(value is not None and value >= 0 for value in timings.values())


# -- streams ---------------------------------------------------------------------------------------------------------


def test_progress_and_timings() -> None:
    steps = [Started(50, 10), Prefilled(10), Prefilled(30), Prefilled(50), *said("a", "b"), done(prompt=50, reused=10)]
    found = events(
        call(
            ScriptedService(steps),
            "/completion",
            {"prompt": "x", "stream": True, "return_progress": True, "timings_per_token": True},
        )
    )
    progress = [each["prompt_progress"] for each in found if "prompt_progress" in each]
    assert [(each["total"], each["cache"], each["processed"]) for each in progress] == [
        (50, 10, 10), (50, 10, 30), (50, 10, 50),
    ]  # fmt: skip
    assert all(type(each["time_ms"]) is int and each["time_ms"] >= 0 for each in progress)
    first = found[0]["timings"]
    assert (first["prompt_n"], first["prompt_ms"], first["predicted_n"], first["predicted_ms"]) == (0, 0.0, 0, 0.0)
    times = [each["timings"] for each in found[:-1]]
    assert [each["prompt_n"] for each in times] == [0, 20, 40, 40, 40]
    assert [each["predicted_n"] for each in times] == [0, 0, 0, 1, 2]
    assert [each["prompt_ms"] for each in times] == sorted(each["prompt_ms"] for each in times)
    assert all(value is not None and value >= 0 for each in times for value in each.values())


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[1, 97, 98]]),
        ("", [[1]]),
        ([12, 34], [[12, 34]]),
        ([12, "ab", 34], [[12, 97, 98, 34]]),
        (["ab", 34], [[1, 97, 98, 34]]),
        ({"prompt_string": "ab"}, [[1, 97, 98]]),
        (["a", "b"], [[1, 97], [1, 98]]),
        (["a", [12, 34], {"prompt_string": "b"}], [[1, 97], [12, 34], [1, 98]]),
        ([[12, "a"], [34]], [[12, 97], [34]]),
        ("a<s>", [[1, 97, 1]]),
    ],
)
def test_shapes_of_prompts(prompt: Any, ids: list[list[int]]) -> None:
    service = ScriptedService(script("a"))
    body = call(service, "/completion", {"prompt": prompt}).json()
    assert [list(each.prompt) for each in service.asked if isinstance(each, Completion)] == ids
    assert (len(body) if len(ids) > 1 else 1) == len(ids)
    if len(ids) > 1:
        assert [each["index"] for each in body] == list(range(len(ids)))


# -- fields ----------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    generation = asked().generation
    assert (generation.sampling, generation.max_tokens, generation.stops) == ({}, None, ())
    assert generation.reuse
    assert generation.structure is None
    settings = complete()["generation_settings"]
    assert settings["seed"] == 4294967295
    assert settings["temperature"] == 0.8
    assert settings["samplers"][:2] == ["penalties", "dry"]
    assert settings["logit_bias"] == []


def test_sampling_fields() -> None:
    generation = asked(
        temperature=-1, top_k=-5, top_p=7, min_p=0.1, seed=42, repeat_last_n=8, dynatemp_exponent=2, dry_base=0.5,
        dry_sequence_breakers=["a"], samplers=["top-k", "nucleus", "unknown", "Infill", "adaptive-p", "temp"],
        typical_p=None, mirostat=2, mirostat_tau=3, mirostat_eta=0.5, adaptive_target=2, adaptive_decay=0.5,
    ).generation  # fmt: skip
    assert generation.sampling == {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.1, "seed": 42, "repeat_last_n": 8, "dynatemp_exp": 2.0,
        "dry_sequence_breaker": ("a",), "samplers": ("top_k", "top_p", "infill", "adaptive_p", "temperature"),
        "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5, "adaptive_target": 1.0, "adaptive_decay": 0.5,
    }  # fmt: skip
    assert asked(samplers="kpt?").generation.sampling == {"samplers": ("top_k", "top_p", "temperature")}
    assert asked(samplers="kia").generation.sampling == {"samplers": ("top_k", "infill", "adaptive_p")}
    assert asked(seed=4294967295).generation.sampling == {"seed": -1}
    assert asked(seed=-5).generation.sampling == {"seed": 2**64 - 5}
    assert asked(seed=-1).generation.sampling == {"seed": -1}
    settings = complete(temperature=0.0, seed=7, dynatemp_exponent=2)["generation_settings"]
    assert (settings["temperature"], settings["seed"], settings["dynatemp_exponent"]) == (0.0, 7, 2.0)


def test_the_limit_and_the_end() -> None:
    assert asked(n_predict=5).generation.max_tokens == 5
    assert asked(max_tokens=6).generation.max_tokens == 6
    assert asked(n_predict=0).generation.max_tokens == 0
    assert asked(n_predict=-1).generation.max_tokens is None
    assert asked(stop=["a", "", "b"]).generation.stops == ("a", "b")
    assert asked(stop="a").generation.stops == ("a",)
    assert asked(ignore_eos=True).generation.ignore_eos
    assert not asked(cache_prompt=False).generation.reuse
    service = ScriptedService(script("a"))
    body = call(service, "/completion", {"prompt": "x"}, settings=ServerSettings(max_tokens=64)).json()
    assert body["generation_settings"]["n_predict"] == 64


def test_grammars() -> None:
    assert asked(grammar='root ::= "a"').generation.structure == Structure(gbnf='root ::= "a"')
    assert asked(json_schema={"type": "string"}).generation.structure == Structure(schema={"type": "string"})
    assert asked(json_schema={}).generation.structure == Structure(any_object=True)
    assert asked(grammar="g", json_schema={"a": 1}).generation.structure == Structure(gbnf="g")
    assert asked(grammar="").generation.structure is None
    assert complete(grammar="g")["generation_settings"]["grammar"] == "g"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[97, -100]], {97: -100.0}),
        ([["ab", -0.5], [97, 1]], {97: 0.5, 98: -0.5}),
        ([[97, False]], {97: -math.inf}),
        ([[97, True], [97], "x", [300, 1], [-1, 1], [97, None]], {}),
        ({"97": 2, "b": False}, {97: 2.0, 98: -math.inf}),
        ([], {}),
    ],
)
def test_logit_bias(given: Any, expected: dict[int, float]) -> None:
    assert asked(logit_bias=given).generation.sampling == {"logit_bias": expected}


def test_ignore_eos_bans_the_tokens_that_end_an_answer() -> None:
    biases = complete(ignore_eos=True, logit_bias=[[97, 2]])["generation_settings"]["logit_bias"]
    assert biases == [{"bias": 2.0, "token": 97}, {"bias": None, "token": 2}, {"bias": None, "token": 3}]
