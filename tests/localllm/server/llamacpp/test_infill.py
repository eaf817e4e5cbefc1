"""/infill, the /completion fields that editors use, and log-probabilities, in llama.cpp's format
(tools/server/README.md).
"""

from __future__ import annotations

import math

import pytest

from localllm.generation.request import Started
from localllm.server.llamacpp.answer import Cut
from localllm.server.turn import Completion
from tests.localllm.server.calls import call
from tests.localllm.server.llamacpp.completing import asked, complete
from tests.localllm.server.scripted import Model, ScriptedService, done, likely, said, script

# -- log-probabilities -----------------------------------------------------------------------------------------------

PROBABILITY = likely(97, -0.25, ((97, -0.25), (200, -math.inf)))


def test_probabilities() -> None:
    assert asked(n_probs=2).generation.logprobs == 2
    assert asked(logprobs=3).generation.logprobs == 3
    assert asked().generation.logprobs is None
    assert asked(n_probs=2, post_sampling_probs=True).generation.sampled
    assert not asked(n_probs=2).generation.sampled


def test_the_tokens_of_a_stop_string_have_none() -> None:
    steps = [Started(5, 0), *said("a", "", "", logprob=PROBABILITY), done("stop", stop="xy")]
    [found] = complete(steps, n_probs=2)["completion_probabilities"]
    assert found["token"] == "a"


# -- fields that editors use -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indent", "texts", "kept"),
    [
        (4, ["a\n", "    b\n", "c", "d"], "a\n    b\n"),
        (4, ["a\n    b\n  c"], "a\n    b\n  "),
        (4, ["a\n  ", "  b"], "a\n    b"),
        (4, ["a\n\tb"], "a\n\t"),
        (1, ["  a", "\n b\n\nc"], "  a\n b\n"),
        (0, ["a\nb"], "a\nb"),
    ],
)
def test_indentation(indent: int, texts: list[str], kept: str) -> None:
    cut, found = Cut(indent, -1), ""
    for text in texts:
        new, ends = cut.take(text, 0)
        found += new
        if ends:
            break
    assert found == kept


def test_an_answer_ends_at_its_indentation_and_the_service_is_told() -> None:
    service = ScriptedService([Started(5, 0), *said("a\n", "b", "c"), 3600.0])
    body = call(service, "/completion", {"prompt": "x", "n_indent": 2}).json()
    assert (body["content"], body["stop_type"], body["tokens_predicted"]) == ("a\n", "limit", 2)
    assert service.closed == 1


def test_an_answer_that_was_cut_off_stays_so_while_its_siblings_go_on() -> None:
    steps = [
        Started(5, 0, 0),
        Started(5, 5, 1),
        *said("a\nb", "c", choice=0),
        *said("d", choice=1),
        done(choice=1),
        3600.0,
    ]
    service = ScriptedService(steps)
    body = call(service, "/completion", {"prompt": "x", "n_indent": 2, "n": 2}).json()
    assert [each["content"] for each in body] == ["a\n", "d"]
    assert [each["stop_type"] for each in body] == ["limit", "eos"]
    assert service.closed == 1


def test_the_time_limit_waits_for_a_line_break() -> None:
    assert Cut(0, 100).take("a", 1000) == ("a", False)
    assert Cut(0, 100).take("a\n", 99) == ("a\n", False)
    assert Cut(0, 100).take("a\n", 101) == ("a\n", True)
    assert Cut(0, -1).take("a\n", 10**9) == ("a\n", False)


# -- /infill ---------------------------------------------------------------------------------------------------------


def test_infill() -> None:
    service = ScriptedService(script("b"))
    body = {"input_prefix": "a", "prompt": "p", "input_suffix": "c", "n_predict": 4, "samplers": ["top_k", "infill"],
            "input_extra": [{"filename": "f", "text": "t"}, {"text": "u"}]}  # fmt: skip
    response = call(service, "/infill", body)
    assert response.json()["content"] == "b"
    found = service.asked[-1]
    assert isinstance(found, Completion)
    assert (found.prompt, found.suffix, found.extra) == ("ap", "c", (("f", "t"), ("tmp", "u")))
    assert found.generation.max_tokens == 4
    assert found.generation.sampling == {"samplers": ("top_k", "infill")}


def test_a_model_without_infill_tokens() -> None:
    service = ScriptedService(all_models=[Model(capabilities=("completion",))])
    response = call(service, "/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert response.status_code == 501
    assert "not supported by this model" in response.json()["error"]["message"]
