"""/v1/completions: every form of prompt, echo, the four log-probability lists, and several prompts in one stream."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.base.errors import LocalLLMError
from localllm.generation.parts import Content
from localllm.generation.request import Prefilled, Started
from localllm.server.turn import Completion
from tests.localllm.server.openai.support import chunks, ok, refusal, send
from tests.localllm.server.scripted import ScriptedService, Step, done, likely, said, script, wrote

PATH = "/v1/completions"


def asked(service: ScriptedService) -> list[Completion]:
    found = []
    for each in service.asked:
        assert isinstance(each, Completion)
        found.append(each)
    return found


def test_a_whole_completion() -> None:
    body = ok(ScriptedService(script("a", "b")), PATH, prompt="Once")
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["total_tokens"] == 7
    assert "timings" in body


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        ("", [""]),
        (["ab", "c"], ["ab", "c"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ([[5], "c"], [[5], "c"]),
        ([5, "c", 6], [[5, 99, 6]]),  # the scripted tokenizer's tokens are bytes
        ([["c", 6]], [[1, 99, 6]]),  # BOS is added, because the prompt starts with text
        ({"prompt_string": "ab"}, ["ab"]),
        ([[5], {"prompt_string": "ab"}], [[5], "ab"]),
    ],
)
def test_prompts(prompt: Any, expected: list[Any]) -> None:
    service = ScriptedService()
    body = ok(service, PATH, prompt=prompt)
    assert [each.prompt for each in asked(service)] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([5, True], "prompt"),
        ([-1], "prompt"),
        ([2**31], "prompt"),
        (["a", 5.5], "prompt[1]"),
        ({"prompt_string": 5}, "prompt.prompt_string"),
        ({"prompt_string": "x <__media__>", "multimodal_data": ["AAAA"]}, "prompt.multimodal_data"),
        (["a"] * 2049, "prompt"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: Any, param: str) -> None:
    status, error = refusal(ScriptedService(), PATH, prompt=prompt)
    assert (status, error["param"]) == (400, param)


def test_several_prompts_have_n_choices_each() -> None:
    def steps(completion: Any) -> list[Step]:
        text = completion.prompt
        return [
            Started(5, 2),
            Started(5, 5, choice=1),
            *said(text + "0"),
            done(answer_tokens=1),
            *said(text + "1", choice=1),
            done(answer_tokens=1, reused=5, choice=1),
        ]

    body = ok(ScriptedService(steps), PATH, prompt=["a", "b", "c"], n=2)
    assert [choice["text"] for choice in body["choices"]] == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert body["usage"]["prompt_tokens"] == 15
    assert body["usage"]["completion_tokens"] == 6
    found = chunks(ScriptedService(steps), PATH, prompt=["a", "b", "c"], n=2, stream_options={"include_usage": True})
    texts = [""] * 6
    for chunk in found[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert found[-1]["usage"] == body["usage"]


def test_the_chunks_of_a_stream() -> None:
    found = chunks(ScriptedService(script("a", "b")), PATH, prompt="x", timings_per_token=True)
    assert [chunk["choices"] for chunk in found] == [
        [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "b", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}],
    ]
    assert {chunk["object"] for chunk in found} == {"text_completion"}
    assert all("timings" in chunk for chunk in found)


def test_progress_with_the_prompt() -> None:
    found = chunks(ScriptedService(script("a")), PATH, prompt="x", return_progress=True)
    assert [chunk["prompt_progress"]["processed"] for chunk in found[:2]] == [2, 5]


@pytest.mark.parametrize(("prompt", "text"), [("On", "On!"), ([79, 110], "On!"), ([0xC3], "\ufffd!")])
def test_echo_puts_the_prompt_before_the_answer(prompt: Any, text: str) -> None:
    assert ok(ScriptedService(script("!")), PATH, prompt=prompt, echo=True)["choices"][0]["text"] == text
    found = chunks(ScriptedService(script("!")), PATH, prompt=prompt, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in found) == text


def test_suffix_and_best_of() -> None:
    service = ScriptedService()
    ok(service, PATH, prompt="a", suffix="z", best_of=1)
    assert asked(service)[0].suffix == "z"
    assert refusal(ScriptedService(), PATH, prompt="a", best_of=2)[1]["param"] == "best_of"
    assert refusal(ScriptedService(), PATH, prompt="a", suffix=5)[1]["param"] == "suffix"


# -- log-probabilities -----------------------------------------------------------------------------------------------


def scored(completion: Any) -> list[Step]:
    """Script an answer "!" with log-probabilities for "!" and, with echo, for each prompt token after the first."""
    prompt = list(completion.prompt)
    known = tuple(likely(token, -float(token), ((token, -float(token)),)) for token in prompt[1:])
    mark = ord("!")
    return [
        Started(len(prompt), 0),
        Prefilled(len(prompt), logprobs=known if completion.echo_logprobs else ()),
        wrote((Content("!"),), mark, likely(mark, -0.5, ((66, -0.25), (mark, -0.5)))),
        done(prompt=len(prompt), reused=0, answer_tokens=1),
    ]


def test_the_lists_of_logprobs() -> None:
    body = ok(ScriptedService(scored), PATH, prompt=[79, 110], logprobs=2)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["!"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"B": -0.25, "!": -0.5}],
        "text_offset": [0],
    }


def test_logprobs_of_the_prompt_start_with_null() -> None:
    """Echoed prompts have log-probabilities, with null for the first token. lm-evaluation-harness sends token ids and
    reads this form.
    """
    expected = {
        "tokens": ["O", "n", "!"],
        "token_logprobs": [None, -110.0, -0.5],
        "top_logprobs": [None, {"n": -110.0}, {"B": -0.25, "!": -0.5}],
        "text_offset": [0, 1, 2],
    }
    service = ScriptedService(scored)
    choice = ok(service, PATH, prompt=[79, 110], logprobs=1, echo=True)["choices"][0]
    assert choice["text"] == "On!"
    assert choice["logprobs"] == expected
    assert asked(service)[0].echo_logprobs
    found = chunks(ScriptedService(scored), PATH, prompt=[79, 110], logprobs=1, echo=True)
    assert [chunk["choices"][0]["text"] for chunk in found] == ["On", "!", ""]
    lists = [chunk["choices"][0]["logprobs"] for chunk in found]
    assert {name: lists[0][name] + lists[1][name] for name in expected} == expected
    assert lists[2] is None


def test_a_token_that_is_added_before_a_text_is_not_part_of_its_echo() -> None:
    service = ScriptedService(scored)
    choice = ok(service, PATH, prompt="On", logprobs=1, echo=True)["choices"][0]
    assert asked(service)[0].prompt == [1, 79, 110]
    assert choice["text"] == "On!"
    assert choice["logprobs"]["tokens"] == ["O", "n", "!"]
    assert choice["logprobs"]["token_logprobs"] == [-79.0, -110.0, -0.5]


def test_logprobs_have_a_limit() -> None:
    assert refusal(ScriptedService(), PATH, prompt="a", logprobs=101)[1]["param"] == "logprobs"
    assert refusal(ScriptedService(), PATH, prompt="a", logprobs=True)[1]["param"] == "logprobs"


# -- merged streams ---------------------------------------------------------------------------------------------------


def test_an_error_of_one_prompt_ends_all() -> None:
    def steps(completion: Any) -> list[Step]:
        return [Started(1, 0), LocalLLMError("no") if completion.prompt == "b" else 30.0]

    service = ScriptedService(steps)
    response = send(service, PATH, {"prompt": ["a", "b", "c"]})
    assert response.status_code == 400
    assert service.closed == len(service.asked)
