"""Schemas and grammars compiled to token masks accept exactly the matching texts, with every kind of vocabulary."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from localllm.constrained.constraint import GrammarVocabulary
from localllm.constrained.grammar import compile_structure
from localllm.gguf import open_gguf
from localllm.loading.resolve import resolve
from localllm.options.structure import Structure, StructureError
from localllm.tokenizer import Tokenizer
from tests.localllm.output.support import byte_tokenizer, follows, may_end

WORDS = byte_tokenizer("<think>", "</think>")
VOCABULARY = GrammarVocabulary(WORDS, WORDS.vocab_size)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GBNF = 'root ::= "yes" | "no" [0-9]+\n'


@pytest.fixture(scope="module")
def demo() -> GrammarVocabulary:
    with open_gguf(resolve("demo")) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    # a model may have more logits than the vocabulary has tokens
    return GrammarVocabulary(tokenizer, tokenizer.vocab_size + 7)


def begin(structure: Structure) -> Any:
    return VOCABULARY.begin(compile_structure(structure))


ACCEPTED = [  # (structure, matching texts, (text, index of the first rejected character))
    (Structure(schema=SCHEMA), ['{"name": "A", "age": 3}', '{"name":"","age":130,"tags":["a","b"]}'],
     [('{"age"', 2), ('{"name": "A", "age": 131', 23), ('{"name": "A", "x', 15),
      ('{"name": "A", "age": 3, "tags": ["c', 34)]),
    (Structure(schema={"type": "string", "pattern": "^[ab]+$"}), ['"ab"'], [('"abc', 3)]),
    (Structure(schema={"$ref": "#/$defs/n", "$defs": {"n": {"enum": [1, "x"]}}}), ["1", '"x"'], [("2", 0)]),
    (Structure(any_object=True), ["{}", '{"a": [1, null, {"b": "c"}]}'], [("[", 0), ("1", 0)]),
    (Structure(gbnf=GBNF), ["yes", "no1", "no42"], [("yeah", 2), ("noo", 2)]),
    (Structure(gbnf='root ::= ("a"{2} | "b"+){2}'), ["aaaa", "aab", "bbbaa"], [("abb", 1), ("aac", 2)]),
    (Structure(gbnf=r'root ::= ("a"{2})+ "\u0042" "\\u0043"'), [r"aaaaB\u0043"], [("aB", 1), ("aaC", 2)]),
    (Structure(gbnf=r'root ::= [\u0000-\u001F] [^\u0041-\u005A]'), ["\x01a", "\n["], [("a", 0), ("\nB", 1)]),
    (Structure(gbnf='root ::= start "c" # start\nstart ::= "start" [start] | "b" start'), ["startsc", "bstarttc"],
     [("c", 0), ("startb", 5)]),
    (Structure(gbnf='root ::= a-b "," a_b "," aB\na-b ::= "1" a-b?\na_b ::= "2"\naB ::= [3-5]{2}'), ["11,2,34"],
     [("2", 0), ("1,2,6", 4)]),
    (Structure(gbnf='root ::= Start start\nStart ::= "x" root?\nstart ::= "\\"start" | start_2\nstart_2 ::= "y"'),
     ['x"start', "xxyy"], [("y", 0), ('x"y', 2)]),
    (Structure(lark='start: "a" B*\nB: /[0-9]/'), ["a", "a12"], [("b", 0)]),
    (Structure(regex=r"\d{2}/[a-f]+"), ["12/ab"], [("1/", 1), ("12/g", 3)]),
]  # fmt: skip


@pytest.mark.parametrize(("structure", "texts", "wrong"), ACCEPTED)
def test_a_structure_lets_through_what_matches(structure: Structure, texts: list[str], wrong: list[Any]) -> None:
    make = begin(structure)
    for text in texts:
        assert follows(make, WORDS, text) is None, text
        assert may_end(make, WORDS, text), text
    for text, place in wrong:
        assert follows(make, WORDS, text) == place, text
        assert not may_end(make, WORDS, text[:place]), text


def spaced_tokenizer() -> Tokenizer:
    """Return a tokenizer that adds a space before the text, like Llama 2's."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab{}", "▁a", "aa", "▁b"]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(tokens) - 259)],
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )


@pytest.mark.parametrize("text", ["aaaaa", "a b", " a", "{}", "\nab", "é"])
def test_a_text_without_choice_in_a_vocabulary_with_a_space_before_words(text: str) -> None:
    tokenizer = spaced_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a", add_special=False), drop_space=False) == " a"
    make = GrammarVocabulary(tokenizer, tokenizer.vocab_size).begin(
        compile_structure(Structure(gbnf=f"root ::= {json.dumps(text, ensure_ascii=False)}"))
    )
    constraint, written = make(), b""
    while not constraint.finished:
        token = int(np.flatnonzero(constraint.allowed())[-1])
        constraint.accept(token)
        written += tokenizer.piece(token)
    assert written.decode() == text


def test_an_answer_is_finished_where_nothing_can_follow() -> None:
    constraint = begin(Structure(gbnf=GBNF))()
    for token in WORDS.encode("yes"):
        assert not constraint.finished
        constraint.accept(token)
    assert constraint.finished
    assert np.flatnonzero(constraint.allowed()).tolist() == [0]
    assert constraint.validate(WORDS.encode("x")) == 0
    constraint.accept(0)  # EOS
    assert constraint.finished


def test_validate_counts_and_changes_nothing() -> None:
    constraint = begin(Structure(gbnf=GBNF))()
    assert [constraint.validate(WORDS.encode(text)) for text in ("yes", "yeah", "x", "no12")] == [3, 2, 0, 4]
    assert follows(lambda: constraint, WORDS, "no1") is None


def test_answers_to_the_same_structure_do_not_share_a_state() -> None:
    make = begin(Structure(gbnf=GBNF))
    one, other = make(), make()
    one.accept(WORDS.encode("y")[0])
    assert other.validate(WORDS.encode("no1")) == 3


def test_control_tokens_are_no_text() -> None:
    allowed = begin(Structure(regex=".*"))().allowed()
    assert allowed[[0, 1, 2]].tolist() == [
        True,
        False,
        False,
    ]  # EOS is allowed, but not the control token <think>: it differs from the text "<think>"
    assert follows(begin(Structure(lark="start: <think>")), WORDS, "<think>") is None


def checked(value: Any) -> None:
    """Assert that a value matches SCHEMA."""
    assert set(value) <= {"name", "age", "tags"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 130
    assert isinstance(value.get("tags", []), list)
    assert len(value.get("tags", [])) <= 3
    assert set(value.get("tags", [])) <= {"a", "b"}


@pytest.mark.parametrize("seed", range(20))
def test_any_choice_of_allowed_tokens_ends_in_a_match(demo: GrammarVocabulary, seed: int) -> None:
    """Any sequence of allowed tokens ends in a match. Random tokens simulate the worst possible model."""
    random_, constraint = random.Random(seed), demo.begin(compile_structure(Structure(schema=SCHEMA)))()
    tokens: list[int] = []
    while not constraint.finished:
        allowed = constraint.allowed()
        assert allowed.shape == (demo.width,)
        assert not allowed[demo.tokenizer.vocab_size :].any()
        token = random_.choice(np.flatnonzero(allowed).tolist())
        assert constraint.validate([token]) == 1 or token in demo.tokenizer.eog
        if token in demo.tokenizer.eog:
            break
        constraint.accept(token)
        tokens.append(token)
        assert len(tokens) < 2000
    checked(json.loads(demo.tokenizer.decode(tokens)))


@pytest.mark.parametrize("seed", range(5))
def test_a_refused_token_is_refused_by_the_text(demo: GrammarVocabulary, seed: int) -> None:
    """The mask allows exactly the tokens whose text can still lead to a match, as computed with Python's `re`."""
    random_, constraint = random.Random(seed), demo.begin(compile_structure(Structure(regex="(ab|a c|[x-z]{2})*")))()
    partial = re.compile(r"(?:ab|a c|[x-z]{2})*(?:a|a |[x-z])?")  # matches every prefix of a match
    text = ""
    for _ in range(6):
        allowed = np.flatnonzero(constraint.allowed()).tolist()
        texts = {token: demo.tokenizer.piece(token, special=False).decode("utf-8", "replace") for token in range(4096)}
        expected = [token for token, piece in texts.items() if piece and partial.fullmatch(text + piece)]
        assert [token for token in allowed if token not in demo.tokenizer.eog] == expected
        token = random_.choice(expected)
        constraint.accept(token)
        text += texts[token]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BROKEN = [
    (Structure(), "exactly one"),
    (Structure(any_object=True, regex="a"), "exactly one"),
    (Structure(schema={"type": "foo"}), "Invalid type: foo"),
    (Structure(schema={"not": {"type": "string"}}), "not"),
    (Structure(schema={"type": "string", "pattern": "("}), "unclosed group"),
    (Structure(schema={"$ref": "http://127.0.0.1/x"}), "not present"),
    (Structure(schema={"enum": []}), "nsatisfiable"),
    (Structure(schema=deep(100)), "nested deeper"),
    (Structure(schema={"description": "x" * 300_000}), "characters"),
    (Structure(schema={"properties": {f"p{number}": {} for number in range(1001)}}), "1001 properties"),
    (Structure(schema={"const": {1, 2}}), "not JSON"),
    (Structure(gbnf="root ::= foo"), "foo"),
    (Structure(gbnf='root ::= "\\'), "cannot be read"),
    (Structure(gbnf="root ::= root"), "no text matches"),
    (Structure(lark='start: "a'), "lexer error"),
    (Structure(lark="start: <nope>"), "nope"),
    (Structure(lark="start: x\nx: x"), "no text matches"),
    (Structure(lark='start: ' + "(" * 70 + '"a"' + ")" * 70), "nested deeper"),
    (Structure(lark="\n".join(f"r{number}: r{number + 1}" for number in range(3000))), "3000 rules"),
    (Structure(regex="("), "regex"),
    (Structure(regex="a" * 100_000), "characters"),
    (Structure(regex="a\0"), "NUL"),
    (Structure(regex="\ud800"), "surrogate"),
]  # fmt: skip


@pytest.mark.parametrize(("structure", "told"), BROKEN, ids=[told for _, told in BROKEN])
def test_a_broken_structure_is_a_line(structure: Structure, told: str) -> None:
    with pytest.raises(StructureError, match=told) as caught:
        begin(structure)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_vocabulary_without_an_end_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eog = frozenset()
    with pytest.raises(StructureError, match="ends a text"):
        GrammarVocabulary(tokenizer, 10)
