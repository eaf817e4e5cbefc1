"""/v1/completions: every form of prompt, echo, the four log-probability lists, and several prompts in one stream."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.base.errors import LocalLLMError
from localllm.generation.request import Started
from localllm.server.turn import Completion
from tests.localllm.server.openai.support import ok, send
from tests.localllm.server.scripted import ScriptedService, Step

PATH = "/v1/completions"


def asked(service: ScriptedService) -> list[Completion]:
    found = []
    for each in service.asked:
        assert isinstance(each, Completion)
        found.append(each)
    return found


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


def test_suffix_and_best_of() -> None:
    service = ScriptedService()
    ok(service, PATH, prompt="a", suffix="z", best_of=1)
    assert asked(service)[0].suffix == "z"


# -- log-probabilities -----------------------------------------------------------------------------------------------


# -- merged streams ---------------------------------------------------------------------------------------------------


def test_an_error_of_one_prompt_ends_all() -> None:
    def steps(completion: Any) -> list[Step]:
        return [Started(1, 0), LocalLLMError("no") if completion.prompt == "b" else 30.0]

    service = ScriptedService(steps)
    response = send(service, PATH, {"prompt": ["a", "b", "c"]})
    assert response.status_code == 400
    assert service.closed == len(service.asked)
