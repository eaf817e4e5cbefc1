"""Reasoning: whether it is open at the end of the prompt, and a token budget that ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from localllm.options.structure import Structure
from localllm.options.thinking import Thinking
from localllm.sampling.constraint import Constraint
from localllm.template.reasoning import reasoning_state
from localllm.tokenizer import Tokenizer
from tests.localllm.output.support import asked, byte_tokenizer, named

MARKED = byte_tokenizer("<think>", "</think>")
SPELLED = byte_tokenizer()
HERMES, HARMONY = named("hermes"), named("harmony", "<|channel|>")


@pytest.mark.parametrize(
    ("format_", "tail", "thought"),
    [
        (HERMES, "assistant\n", "possible"),
        (HERMES, "assistant\n<think>\n", "open"),
        (HERMES, "assistant\n<think>\n\n</think>\n\n", "over"),
        (HERMES, "What is <think>?\nassistant\n", "possible"),
        (named("hermes", ""), "assistant\n", "over"),  # the template has no reasoning marker
        (HARMONY, "<|start|>assistant", "possible"),
        (HARMONY, "<|start|>assistant<|channel|>analysis<|message|>", "open"),
        (HARMONY, "<|start|>assistant<|channel|>final<|message|>", "over"),
        (named("functionary-v3.2"), ">>>", "over"),
        (named("list", "[BEGIN FINAL RESPONSE]"), "Here are my reasoning steps:\n", "open"),
    ],
)
def test_the_end_of_a_prompt_says_whether_a_thought_has_begun(format_: Any, tail: str, thought: str) -> None:
    assert reasoning_state(format_, tail) == thought


def budget(
    tokens: int, tokenizer: Tokenizer = MARKED, tail: str = "<think>\n", format_: Any = HERMES, **more: Any
) -> Any:
    return asked(format_, tail, tokenizer, reasoning_tokens=tokens, **more)


def written(make: Callable[[], Constraint], tokenizer: Tokenizer, wanted: str) -> str:
    """Simulate a model that prefers `wanted`, and takes the forced token wherever the constraint rejects its choice."""
    constraint, left, answer = make(), tokenizer.encode(wanted, add_special=False, parse_special=True), list[int]()
    while left:
        allowed = constraint.allowed()
        if allowed is not None and not allowed[left[0]]:
            choices = np.flatnonzero(allowed).tolist()
            assert len(choices) == 1, tokenizer.decode(choices, special=True)
            assert constraint.validate([choices[0], left[0]]) >= 1
            assert constraint.validate([left[0]]) == 0
            answer.append(choices[0])
        else:
            answer.append(left.pop(0))
        constraint.accept(answer[-1])
    return tokenizer.decode(answer, special=True)


@pytest.mark.parametrize("tokenizer", [MARKED, SPELLED], ids=["control token", "spelled"])
@pytest.mark.parametrize(
    ("tokens", "tail", "wanted", "text"),
    [
        (4, "<think>\n", "abcdefg", "abcd</think>efg"),
        (0, "<think>\n", "abc", "</think>abc"),
        (4, "", "abcdefg", "abcdefg"),  # no reasoning
        (4, "", "<think>abcdefg", "<think>abcd</think>efg"),
        (9, "<think>\n", "ab</think>cdefghijklmn", "ab</think>cdefghijklmn"),
        (4, "<think></think>", "abcdefg", "abcdefg"),
    ],
)
def test_a_thought_ends_with_its_budget(tokenizer: Tokenizer, tokens: int, tail: str, wanted: str, text: str) -> None:
    make = budget(tokens, tokenizer, tail)
    assert make is None or written(make, tokenizer, wanted) == text
    assert make is not None or wanted == text


def test_every_thought_of_an_answer_takes_from_the_budget() -> None:
    first, second = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"
    make = budget(3, SPELLED, "<|start|>assistant", HARMONY)
    assert written(make, SPELLED, f"{first}abcd") == f"{first}abc<|end|>d"
    assert written(make, SPELLED, f"{first}ab<|end|>{second}cdef").startswith(f"{first}ab<|end|>{second}")


def test_a_structure_comes_after_a_thought_with_a_budget() -> None:
    make = budget(4, structure=Structure(regex="[0-9]{2}"))
    assert written(make, MARKED, "abcdefg</think>12"[:4] + "12") == "abcd</think>12"
    constraint = make()
    for token in MARKED.encode("a</think>1", add_special=False, parse_special=True):
        constraint.accept(token)
    assert [constraint.validate(MARKED.encode(text)) for text in ("2", "x", "23")] == [1, 0, 1]
    assert not constraint.finished
    constraint.accept(MARKED.encode("2")[0])
    assert constraint.finished


def test_validate_stops_where_the_budget_ends() -> None:
    constraint = budget(3)()
    end = MARKED.special["</think>"]
    tokens = MARKED.encode("abcdef")
    assert constraint.validate(tokens) == 3
    assert constraint.validate([*tokens[:3], end, *tokens]) == 10
    assert constraint.validate([]) == 0


def test_variables_of_templates() -> None:
    assert Thinking().variables == {}
    assert Thinking(False).variables == {"enable_thinking": False, "thinking": False}
    assert Thinking(effort="low").variables["reasoning_effort"] == "low"
    assert Thinking(effort="low").variables["enable_thinking"] is True
    assert Thinking(budget=100).variables["enable_thinking"] is True
    assert Thinking(True, "none").variables == Thinking(False).variables
