"""The generation fields that all endpoints share: their meaning, and refusals that name the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from localllm.options import SamplingOptions
from localllm.server.openai.generation import GenerationBody, read_generation
from localllm.server.turn import Structure
from tests.localllm.server.openai.support import fields


@pytest.mark.parametrize(
    ("name", "value", "option", "expected"),
    [
        ("temperature", 0, "temperature", 0.0),
        ("temperature", 1.5, "temperature", 1.5),
        ("top_p", 0.9, "top_p", 0.9),
        ("top_k", 20, "top_k", 20),
        ("top_k", -1, "top_k", -1),
        ("min_p", 0.1, "min_p", 0.1),
        ("typical_p", 0.5, "typical_p", 0.5),
        ("repeat_penalty", 1.1, "repeat_penalty", 1.1),
        ("repetition_penalty", 1.2, "repeat_penalty", 1.2),
        ("presence_penalty", -2, "presence_penalty", -2.0),
        ("frequency_penalty", 2, "frequency_penalty", 2.0),
        ("dynatemp_exponent", 2, "dynatemp_exp", 2.0),
        ("dry_multiplier", 0.8, "dry_multiplier", 0.8),
        ("dry_sequence_breakers", ["\n", "x"], "dry_sequence_breaker", ("\n", "x")),
        ("xtc_probability", 0.5, "xtc_probability", 0.5),
        ("seed", 42, "seed", 42),
        ("seed", -5, "seed", 2**64 - 5),
        ("samplers", ["top_k", "temp", "min-p"], "samplers", ("top_k", "temperature", "min_p")),
        (
            "samplers",
            "edkypmxt",
            "samplers",
            ("penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
        ),
    ],
)
def test_sampling(name: str, value: Any, option: str, expected: Any) -> None:
    sampling = read_generation(fields(GenerationBody, **{name: value}), "").sampling
    assert sampling == {option: expected}
    assert getattr(SamplingOptions.of(sampling), option) == expected


def test_unknown_fields_and_null_are_ignored() -> None:
    plain = read_generation(
        fields(
            GenerationBody,
        ),
        "me",
    )
    assert (
        read_generation(fields(GenerationBody, unheard_of=[1], temperature=None, stop=None, n=None, metadata={}), "me")
        == plain
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 5, "max_tokens": 7}, 5),
        ({"n_predict": 3, "max_completion_tokens": 5}, 3),
        ({"max_tokens": 10**300}, 2**31 - 1),
    ],
)
def test_max_tokens(body: dict[str, Any], expected: int | None) -> None:
    assert read_generation(fields(GenerationBody, **body), "").max_tokens == expected


def test_stops_are_one_text_or_many_and_empty_ones_end_nothing() -> None:
    assert read_generation(fields(GenerationBody, stop="END"), "").stops == ("END",)
    assert read_generation(fields(GenerationBody, stop=["a", "", "b", "a"]), "").stops == ("a", "b")


def test_the_client_is_the_connections_and_the_user_that_it_names() -> None:
    def client(**body: str) -> str:
        return read_generation(fields(GenerationBody, **body), "10.0.0.1").client

    assert client() == "10.0.0.1"
    assert client(user="u") == "10.0.0.1/u"
    assert client(prompt_cache_key="k", user="u") == "10.0.0.1/u"
    assert client(safety_identifier="s", user="u") == "10.0.0.1/s"
    assert len(client(user="u" * 100_000)) <= 256


def test_priority_and_reuse() -> None:
    asked = read_generation(fields(GenerationBody, service_tier="flex", cache_prompt=False), "")
    assert (asked.priority, asked.reuse) == (-1, False)
    assert read_generation(fields(GenerationBody, service_tier="default"), "").priority == 0


# -- biases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "tokens", "texts"),
    [
        ({"7": -100}, {7: -100.0}, {}),
        ([[7, 1.5], [8, False]], {7: 1.5, 8: -math.inf}, {}),
        ({"ab": -1, "7": 2}, {7: 2.0}, {"ab": -1.0}),
        ([["ab", -1], [-1, 5]], {-1: 5.0}, {"ab": -1.0}),
    ],
)
def test_biases_are_of_tokens_or_texts(value: Any, tokens: dict[int, float], texts: dict[str, float]) -> None:
    found = read_generation(fields(GenerationBody, logit_bias=value), "")
    assert (found.sampling.get("logit_bias", {}), found.biases) == (tokens, texts)


# -- structures ------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structure(any_object=True)),
        ({"response_format": {"type": "json_object", "schema": None}}, Structure(any_object=True)),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, Structure(any_object=True)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Structure(schema=SCHEMA)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            Structure(schema=SCHEMA),
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, Structure(schema=SCHEMA)),
        ({"json_schema": SCHEMA}, Structure(schema=SCHEMA)),
        ({"json_schema": {}}, Structure(any_object=True)),
        ({"grammar": 'root ::= "a"'}, Structure(gbnf='root ::= "a"')),
        ({"grammar": ""}, None),
        ({"guided_json": SCHEMA}, Structure(schema=SCHEMA)),
        ({"guided_regex": "a+"}, Structure(regex="a+")),
        ({"guided_choice": ["a.b", "c|d"]}, Structure(regex="a\\.b|c\\|d")),
        ({"guided_grammar": 'root ::= "a"'}, Structure(gbnf='root ::= "a"')),
        ({"guided_grammar": 'start: "a"'}, Structure(lark='start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, Structure(schema=SCHEMA)),
        ({"structured_outputs": {"regex": "a"}}, Structure(regex="a")),
        ({"structured_outputs": {"choice": ["x", "y"]}}, Structure(regex="x|y")),
        ({"structured_outputs": {"json_object": True}}, Structure(any_object=True)),
    ],
)
def test_structures(body: dict[str, Any], expected: Structure | None) -> None:
    assert read_generation(fields(GenerationBody, **body), "").structure == expected
