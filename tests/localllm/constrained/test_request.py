"""The demo model's answers under a schema, a grammar or a reasoning budget, with and without speculative decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.options import AnswerOptions, OptionError
from localllm.options.structure import StructureError
from localllm.template import ChatTemplate

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "animals": {"type": "array", "items": {"enum": ["cat", "dog", "cow"]}, "minItems": 2, "maxItems": 5},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["animals", "count"],
    "additionalProperties": False,
}
# repetitive, so that n-gram drafts match
LIST = 'root ::= item{2,9} "end"\nitem ::= "- " ("red" | "green" | "blue") " fish swims\\n"\n'
THINKER = (  # a template that opens the reasoning; the demo's vocabulary has no tokens for the markers
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    "{% if enable_thinking %}<think>{% endif %}{# </think> #}"
)


@pytest.fixture(scope="module")
def demo() -> Iterator[localllm.Model]:
    with localllm.load("demo", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def guessing() -> Iterator[localllm.Model]:
    """The demo model with n-gram drafts and the small draft model."""
    with localllm.load("demo", threads=1, model_draft="draft") as opened:
        yield opened


def text_of(pieces: Iterable[Any]) -> str:
    return "".join(piece.text for piece in pieces)


def tokens_of(model: localllm.Model, prompt: str, **options: Any) -> tuple[list[int], Any]:
    reply = model.generate(prompt, **options)
    return reply.tokens, reply.end


def check(value: Any) -> None:
    """Assert that a value matches SCHEMA."""
    assert list(value) == ["animals", "count"]
    assert 2 <= len(value["animals"]) <= 5
    assert set(value["animals"]) <= {"cat", "dog", "cow"}
    assert type(value["count"]) is int
    assert 0 <= value["count"] <= 99


@pytest.mark.parametrize("seed", range(4))
def test_answers_match_their_schema(demo: localllm.Model, seed: int) -> None:
    check(json.loads(text_of(demo.chat("Which animals?", json_schema=SCHEMA, temperature=2.0, seed=seed))))
    check(json.loads(text_of(demo.generate("Animals: ", json_schema=SCHEMA, temperature=2.0, seed=seed))))


def test_an_answer_ends_with_its_grammar(demo: localllm.Model) -> None:
    pieces = list(demo.generate("Say it: ", grammar='root ::= "yes" | "no"', ignore_eos=True, max_tokens=50))
    assert text_of(pieces) in ("yes", "no")
    assert pieces[-1].finished.reason == "end"


ENDS = {0: 100.0, 1: 100.0}  # logit biases that favor EOS


def test_ignore_eos_holds_while_a_grammar_allows_anything_else(demo: localllm.Model) -> None:
    def written(grammar: str, **options: Any) -> tuple[str, str]:
        pieces = list(demo.generate("Say: ", grammar=grammar, logit_bias=ENDS, max_tokens=20, **options))
        return text_of(pieces), pieces[-1].finished.reason

    endless = "root ::= [a-z]+"
    assert written(endless)[1] == "end"
    text, reason = written(endless, ignore_eos=True)
    assert reason == "length"
    assert re.fullmatch("[a-z]{20,}", text)
    text, reason = written("root ::= [a-z]{1,7}", ignore_eos=True)
    assert reason == "end"
    assert re.fullmatch("[a-z]{7}", text)
    assert written('root ::= ""', ignore_eos=True) == ("", "end")


def test_ignore_eos_holds_where_only_a_thought_is_limited(demo: localllm.Model) -> None:
    demo.__dict__["template"] = (ChatTemplate(THINKER, "", "<|im_end|>"), None)
    try:
        for ignore, reason in ((False, "end"), (True, "length")):
            pieces = list(demo.chat("Which?", think=5, max_tokens=30, logit_bias=ENDS, ignore_eos=ignore))
            assert pieces[-1].finished.reason == reason
    finally:
        del demo.__dict__["template"]


@pytest.mark.parametrize("source", [LIST, 'start: ITEM{2,9} "end"\nITEM: /- (red|green|blue) fish swims\\n/'])
def test_grammars_of_both_kinds(demo: localllm.Model, source: str) -> None:
    text = text_of(demo.generate("Fish:\n", grammar=source, temperature=1.0, seed=1))
    assert re.fullmatch(r"(- (red|green|blue) fish swims\n){2,9}end", text)


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}, {"temperature": 1.0, "top_k": 5}]
)
def test_drafts_change_no_token(demo: localllm.Model, guessing: localllm.Model, options: dict[str, Any]) -> None:
    """Speculation under a grammar gives the tokens of plain decoding, because a draft token is accepted only if it
    equals the sampled token.
    """
    assert guessing.speculation is not None
    held = {"grammar": LIST, "max_tokens": 60, "seed": 1, **options}
    plain, _ = tokens_of(demo, "Fish:\n", **held)
    with localllm.load("demo", threads=1, spec="ngram") as repeating:
        assert tokens_of(repeating, "Fish:\n", **held)[0] == plain
    assert tokens_of(guessing, "Fish:\n", **held)[0] == plain


@pytest.mark.parametrize("seed", range(3))
def test_sampled_drafts_of_a_model_match_the_schema(guessing: localllm.Model, seed: int) -> None:
    tokens, statistics = tokens_of(guessing, "Animals: ", json_schema=SCHEMA, temperature=1.5, seed=seed)
    check(json.loads(guessing.detokenize(tokens)))
    assert statistics.reason == "end"


def test_a_conversation_is_held_every_turn(demo: localllm.Model) -> None:
    from localllm.chat import Conversation

    options = AnswerOptions(json_schema=SCHEMA)
    with_template = Conversation(demo, demo.template[0], demo.sampling_defaults.options({"seed": 1}), print, options)
    for question in ("Which animals?", "And others?"):
        check(json.loads(text_of(with_template.say(question))))
    check(json.loads(text_of(with_template.again())))


def test_an_answer_that_was_cut_goes_on_within_its_grammar(demo: localllm.Model) -> None:
    from localllm.chat import Conversation

    conversation = Conversation(
        demo,
        demo.template[0],
        demo.sampling_defaults.options({"seed": 1}),
        print,
        AnswerOptions(grammar=LIST, max_tokens=7),
    )
    begun = text_of(conversation.say("Fish?"))
    assert not begun.endswith("end")
    while not conversation.messages[-1]["content"].endswith("end"):
        text_of(conversation.go_on())
    assert re.fullmatch(r"(- (red|green|blue) fish swims\n){2,9}end", conversation.messages[-1]["content"])
    conversation.messages[-1]["content"] = "Something else"
    conversation._answered = []
    with pytest.raises(LocalLLMError, match="cannot be continued"):
        text_of(conversation.go_on())


def test_a_thought_is_limited_and_not_shown_before_a_structure(demo: localllm.Model) -> None:
    demo.__dict__["template"] = (ChatTemplate(THINKER, "", "<|im_end|>"), None)
    try:
        check(json.loads(text_of(demo.chat("Which?", json_schema=SCHEMA, think=12, seed=1))))
        on = {0: -100.0, 1: -100.0}  # logit biases against EOS
        reply = demo.chat("Which?", think=12, max_tokens=60, seed=1, logit_bias=on)
        thought, end, content = "".join(piece.raw for piece in reply).partition("</think>")
        assert end
        assert len(demo.tokenize(thought)) <= 12 + 1
        assert (reply.reasoning, reply.text) == (thought.strip(), content.strip())
        assert "</think>" not in text_of(demo.chat("Which?", think=False, max_tokens=30, seed=1, logit_bias=on))
    finally:
        del demo.__dict__["template"]


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (None, {}),
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
    ],
)
def test_how_a_template_is_told_to_think(think: Any, variables: dict[str, Any]) -> None:
    assert AnswerOptions(think=think).template_variables == variables
    assert AnswerOptions(think=think, chat_template_kwargs={"x": 1}).template_variables == {**variables, "x": 1}


def test_efforts_and_budgets() -> None:
    assert AnswerOptions(think="low").template_variables["reasoning_effort"] == "low"
    assert AnswerOptions(think="low").thinking.budget is None
    assert AnswerOptions(think=300).thinking.budget == 300
    assert AnswerOptions(think=True).thinking.budget is None


@pytest.mark.parametrize(
    "options",
    [{"think": "maybe"}, {"think": -1}, {"think": 1.5}, {"json_schema": ""}, {"json_schema": [1]}, {"grammar": None}],
)
def test_wrong_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        AnswerOptions(**options)


def test_a_schema_and_a_grammar_are_one_too_many(demo: localllm.Model) -> None:
    with pytest.raises(OptionError, match="both given"):
        demo.generate("x", json_schema=SCHEMA, grammar=LIST)


def test_broken_structures_are_a_line(demo: localllm.Model) -> None:
    with pytest.raises(StructureError, match="Invalid type"):
        demo.generate("x", json_schema={"type": "foo"})
    with pytest.raises(StructureError, match="foo"):
        demo.chat("x", grammar="root ::= foo")
