"""Optional tool calls: text is unconstrained up to a call's opening marker, and follows the tools' schemas
after the marker.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm.options.structure import Structure
from localllm.template.call_writer import written_call
from localllm.template.format import AnswerFormat
from localllm.template.formats import ROWS
from localllm.tokenizer import Tokenizer
from tests.localllm.output.support import TOOLS, asked, byte_tokenizer, follows, may_end, named, tokens_of, tool

MARKED = [row.name for row in ROWS if row.channels is None and row.calls.opens]
HERMES = named("hermes")
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
WRONG = CALL.replace("search", "seek")
SPELLED = byte_tokenizer()


def made(tokenizer: Tokenizer = SPELLED, format_: AnswerFormat = HERMES, tail: str = "", **more: Any) -> Any:
    return asked(format_, tail, tokenizer, forced=False, **{"tools": TOOLS, **more})


@pytest.mark.parametrize("special", [True, False], ids=["control tokens", "spelled"])
@pytest.mark.parametrize("name", MARKED)
def test_each_format_is_held_to_the_names_of_tools(name: str, special: bool) -> None:
    format_ = named(name)
    tokenizer = tokens_of(format_, special)
    make = made(tokenizer, format_)
    before, arguments = "Let me look. ", {"query": "a b", "deep": True}
    assert follows(make, tokenizer, before + written_call(format_.calls, "search", arguments)) is None
    refused = follows(make, tokenizer, before + written_call(format_.calls, "seek", arguments))
    assert refused is not None
    assert follows(make, tokenizer, f"{before}I could seek, or search, but need not.") is None


def test_text_without_a_call_is_free() -> None:
    constraint = made()()
    for token in SPELLED.encode("Use <tool or [x] {y}.", add_special=False):
        assert constraint.allowed() is None
        constraint.accept(token)
        assert not constraint.finished
    assert may_end(made(), SPELLED, "Done.")


def test_what_a_call_holds_is_the_schema_of_its_tool() -> None:
    assert follows(made(), SPELLED, f"Hm. {CALL}") is None
    assert follows(made(), SPELLED, f"Hm. {WRONG}") == len("Hm. ") + WRONG.index("ek")
    assert follows(made(), SPELLED, CALL.replace('"a"', "1")) == CALL.index('"a"')
    assert not may_end(made(), SPELLED, CALL[:30])
    assert may_end(made(), SPELLED, CALL)
    assert follows(made(), SPELLED, CALL + "\n" + CALL) is None
    assert follows(made(parallel=False), SPELLED, CALL + "\n" + CALL) is not None


def test_a_marker_in_a_thought_is_none() -> None:
    assert follows(made(tail="<think>\n"), SPELLED, f"{WRONG}</think>{CALL}") is None
    assert follows(made(), SPELLED, f"<think>{WRONG}</think>{CALL}") is None
    assert follows(made(tail="<think>\n"), SPELLED, f"Hm.</think>{WRONG}") is not None


def test_a_budget_for_the_thought_goes_with_it() -> None:
    make = made(tail="<think>\n", reasoning_tokens=4)
    constraint = make()
    for token in SPELLED.encode("Hmmm</think>", add_special=False):
        constraint.accept(token)
    for token in SPELLED.encode("<tool_call>", add_special=False):
        assert constraint.allowed() is None
        constraint.accept(token)
    allowed = constraint.allowed()
    assert allowed is not None
    assert set(map(SPELLED.piece, np.flatnonzero(allowed).tolist())) == {b"\n", b"{"}
    assert follows(make, SPELLED, "Hmmmm") == 4


def test_drafts_end_where_a_call_begins() -> None:
    constraint = made()()
    text = SPELLED.encode(f"So: {CALL}", add_special=False)
    assert constraint.validate(text) == len("So: <tool_call>")
    assert constraint.validate(text[:9]) == 9
    for token in text[:15]:
        constraint.accept(token)
    assert constraint.validate(text[15:]) == len(text) - 15
    wrong = SPELLED.encode(WRONG, add_special=False)[11:]
    assert constraint.validate(wrong) == WRONG.index("ek") - 11


@pytest.mark.parametrize(
    ("before", "held"),
    [(("Well.", ".<tool", "_call>\n"), True), (("a", "<tool_call>"), True), (("x<<tool_call>",), False)],
)
def test_markers_begin_and_end_within_tokens(before: tuple[str, ...], held: bool) -> None:
    """A marker may begin and end inside tokens.

    The one exception is a token with two possible starts of the marker, after which nothing is constrained.
    """
    tokenizer = byte_tokenizer(joined=(*before, '{"name": "se', "ek"))

    def tokens(*texts: str) -> list[int]:
        return [next(t for t in range(tokenizer.vocab_size) if tokenizer.piece(t) == text.encode()) for text in texts]

    constraint = made(tokenizer)()
    for token in tokens(*before):
        assert constraint.allowed() is None
        constraint.accept(token)
    assert (constraint.allowed() is not None) is held
    if held:
        for token in tokens('{"name": "se'):
            constraint.accept(token)
        allowed = constraint.allowed()
        assert allowed is not None
        assert [bool(allowed[token]) for token in tokens("a", "ek")] == [True, False]


@pytest.mark.parametrize(
    "more",
    [
        {"format_": named("llama-3")}, {"format_": named("harmony", "<|channel|>")}, {"tools": ()},
        {"tools": [TOOLS[0]] * 257},
        {"tools": [tool({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}})]},
    ],
    ids=["no marker", "headers", "no tools", "too many", "broken schema"],
)  # fmt: skip
def test_what_cannot_be_held_is_free(more: dict[str, Any]) -> None:
    assert made(**more) is None


def test_a_structure_goes_before_tools_that_may_be_called() -> None:
    make = made(structure=Structure(any_object=True))
    assert follows(make, SPELLED, '{"a": 1}') is None
    assert follows(make, SPELLED, f"Hm. {CALL}") == 0
