"""Untrusted grammars are first compiled in a child process, within limits. Refusals are cached.

`rules` returns a grammar of a few kilobytes that takes minutes to compile: each rule names the next one three times.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import localllm
from localllm.base.machine.heap import heap_in_use
from localllm.constrained import child as child_module
from localllm.constrained.child import GrammarChild
from localllm.constrained.constraint import GrammarConstraint, GrammarVocabulary, NotCompiled
from localllm.constrained.grammar import Grammar, compile_structure
from localllm.options.structure import Structure, StructureError
from localllm.sandbox import Confined, ConfinedError, ConfinedStopped, ResourceLimits
from localllm.tokenizer import Tokenizer

GBNF = 'root ::= "yes" | "no"'


def rules(count: int) -> str:
    lines = [f"r{n} ::= r{n + 1} r{n + 1} | r{n + 1}" for n in range(count)]
    return "\n".join(["root ::= r0", *lines, f'r{count} ::= "a"'])


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=64) as model:
        yield model.tokenizer


@pytest.fixture
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def child(tokenizer: Tokenizer) -> Iterator[GrammarChild]:
    made = GrammarVocabulary(tokenizer, tokenizer.vocab_size).new_child()
    yield made
    made.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the requests to the child processes."""
    found: list[dict[str, Any]] = []
    real = Confined.call

    def call(
        self: Confined,
        request: dict[str, Any],
        limits: ResourceLimits | None = None,
        cancel: threading.Event | None = None,
    ) -> dict[str, Any]:
        found.append(request)
        return real(self, request, limits, cancel)

    monkeypatch.setattr(Confined, "call", call)
    return found


def grammar(**what: Any) -> Any:
    return compile_structure(Structure(**what))


@pytest.mark.parametrize(
    ("what", "first"),
    [
        ({"gbnf": GBNF}, b"y"),
        ({"lark": 'start: "yes" | "no"'}, b"y"),
        ({"regex": "(yes|no)"}, b"n"),
        ({"schema": {"enum": ["yes"]}}, b'"'),
        ({"any_object": True}, b"{"),
    ],
)
def test_what_passes_is_used_as_before(
    vocabulary: GrammarVocabulary, child: GrammarChild, what: dict[str, Any], first: bytes
) -> None:
    made = grammar(**what)
    with pytest.raises(NotCompiled):
        vocabulary.known().begin(made)
    allowed = vocabulary.checked(child, threading.Event()).begin(made)().allowed()
    alone = GrammarVocabulary(vocabulary.tokenizer, vocabulary.width).begin(made)().allowed()
    assert (allowed == alone).all()
    token = next(n for n in range(vocabulary.width) if vocabulary.tokenizer.piece(n) == first)
    assert allowed[token]
    assert (vocabulary.known().begin(made)().allowed() == allowed).all()  # this process compiles it now


def test_gbnf_is_converted_in_the_child_only(
    vocabulary: GrammarVocabulary, child: GrammarChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(text: str) -> str:
        raise AssertionError("converted here")

    monkeypatch.setattr("llguidance.gbnf_to_lark.gbnf_to_lark", convert)
    vocabulary.checked(child, threading.Event()).begin(grammar(gbnf=GBNF))().allowed()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"gbnf": "root ::= nowhere"}, "cannot be read: Rule 'nowhere' not found"),
        ({"lark": 'start: "a" b'}, "cannot be used"),
        ({"regex": "a{1000000000}"}, "cannot be used|failed"),
        ({"gbnf": rules(1500)}, "takes more than|cannot be used"),
    ],
)
def test_refusals_are_remembered(
    vocabulary: GrammarVocabulary, child: GrammarChild, calls: list[dict[str, Any]], what: dict[str, Any], says: str
) -> None:
    made, messages = grammar(**what), []
    for view in (vocabulary.checked(child, threading.Event()), vocabulary.known(), vocabulary):
        with pytest.raises(StructureError, match=says) as raised:
            view.begin(made)
        messages.append(str(raised.value))
    assert len(set(messages)) == 1
    # at most one check per vocabulary
    assert sum("grammar" in call and call["grammar"] == made.source for call in calls) <= 2


def test_a_grammar_that_takes_too_long_ends_and_the_next_one_is_compiled(
    vocabulary: GrammarVocabulary, child: GrammarChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "_LIMITS", ResourceLimits(seconds=0.2, wall=60, memory=256 << 20))
    checked = vocabulary.checked(child, threading.Event())
    with pytest.raises(StructureError, match=r"^the grammar or schema takes more than 0\.2 s to compile; make"):
        checked.begin(grammar(gbnf=rules(1400)))
    monkeypatch.undo()
    checked.begin(grammar(gbnf=GBNF))().allowed()


def test_a_child_that_was_killed_says_nothing_about_the_grammar(
    vocabulary: GrammarVocabulary, child: GrammarChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child killed by a timeout or for lack of memory does not mark the grammar as bad.

    The next attempt compiles the grammar.
    """
    # takes longer to compile than it takes to kill the child
    checked, made = vocabulary.checked(child, threading.Event()), grammar(gbnf=rules(400))
    monkeypatch.setattr(child_module, "_LIMITS", ResourceLimits(seconds=60, wall=0, memory=256 << 20))
    with pytest.raises(StructureError, match="killed, or takes more than 0 s on the clock; try again"):
        checked.begin(made)
    monkeypatch.undo()
    checked.begin(made)().allowed()


def test_a_grammar_that_takes_too_much_memory_is_refused(
    vocabulary: GrammarVocabulary, child: GrammarChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "_LIMITS", ResourceLimits(seconds=60, wall=60, memory=8 << 20))
    with pytest.raises(StructureError, match="make it smaller"):
        vocabulary.checked(child, threading.Event()).begin(grammar(regex="a{999999999}"))


def test_a_compilation_ends_when_nobody_waits_for_it(vocabulary: GrammarVocabulary, child: GrammarChild) -> None:
    made, stop = grammar(gbnf=rules(1450)), threading.Event()
    stop.set()
    with pytest.raises(ConfinedStopped):
        vocabulary.checked(child, stop).begin(made)
    with pytest.raises(NotCompiled):  # the refusal is not cached, so another client may retry
        vocabulary.known().begin(made)


def test_a_child_that_cannot_start_refuses_nothing_for_ever(
    vocabulary: GrammarVocabulary, child: GrammarChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*_: object) -> dict[str, Any]:
        raise ConfinedError("no child process can be started")

    with monkeypatch.context() as patch:
        patch.setattr(Confined, "call", call)
        with pytest.raises(ConfinedError):
            vocabulary.checked(child, threading.Event()).begin(grammar(gbnf=GBNF))
    vocabulary.checked(child, threading.Event()).begin(grammar(gbnf=GBNF))


def test_an_answer_that_exhausts_a_grammar_leaves_the_next_one_a_fresh_copy(vocabulary: GrammarVocabulary) -> None:
    """Copies of a compiled grammar share a lexer with a limited number of states.

    After one answer uses up the states, the next answer gets a new lexer.
    """
    made = grammar(regex="(b|c)a{1000000000}")
    for _ in range(2):
        constraint = vocabulary.begin(made)()
        first, second = (next(n for n in range(vocabulary.width) if vocabulary.tokenizer.piece(n) == letter)
                         for letter in (b"b", b"a"))  # fmt: skip
        assert constraint.allowed()[first]
        constraint.accept(first)
        with pytest.raises(StructureError, match="the grammar failed"):
            _two_steps(constraint, second)


def _two_steps(constraint: GrammarConstraint, token: int) -> None:
    """Accept the token and compute masks around it. Either mask may fail."""
    assert constraint.allowed()[token]
    constraint.accept(token)
    constraint.allowed()


def test_control_tokens_are_found_in_long_texts_in_linear_time(vocabulary: GrammarVocabulary) -> None:
    mark, token = next((text, id_) for text, id_ in vocabulary.tokenizer.special.items()
                       if vocabulary.tokenizer.is_control(id_) and text)  # fmt: skip
    text = "x" * 500_000  # would take hours in quadratic time
    assert vocabulary.parts(f"{text}{mark}{text}") == [text, token, text]
    assert vocabulary.spelled(f"a{mark}") == f'"a" <[{token}]>'


# -- memory ----------------------------------------------------------------------------------------------------------


def _multiples(of: int) -> str:
    return compile_structure(Structure(schema={"type": "integer", "multipleOf": of})).source


@pytest.mark.skipif(heap_in_use() is None, reason="the size of this C library's heap is unknown")
def test_a_grammar_has_a_size_where_freed_memory_is_used_again(child: GrammarChild) -> None:
    first, second = (child.compile(_multiples(of), threading.Event())[1] for of in (30_011, 30_013))
    assert first > 4 << 20
    assert second > 4 << 20


@pytest.mark.parametrize(("answers", "kept"), [(100, True), (700, False)])
def test_a_grammar_is_let_go_only_after_very_many_masks(
    vocabulary: GrammarVocabulary, answers: int, kept: bool
) -> None:
    """Lexers grow with every mask, which llguidance does not count.

    After very many masks a grammar is dropped and compiled again.
    """
    grammar = compile_structure(Structure(schema={"type": "array", "items": {"enum": [1]}}))
    make = vocabulary.begin(grammar)
    [one, comma, opened] = (vocabulary.tokenizer.encode(text, add_special=False)[-1] for text in ("1", ",", "["))
    for _ in range(answers):
        constraint = make()
        for token in (opened, *[one, comma] * 10):
            assert constraint.allowed()[token]
            constraint.accept(token)
    assert _is_kept(vocabulary, grammar) == kept
    vocabulary.begin(grammar)


def _is_kept(vocabulary: GrammarVocabulary, grammar: Grammar) -> bool:
    try:
        vocabulary.known().begin(grammar)
    except NotCompiled:
        return False
    return True


@pytest.mark.skipif(heap_in_use() is None, reason="the size of this C library's heap is unknown")
def test_the_largest_grammars_are_let_go_first(vocabulary: GrammarVocabulary, child: GrammarChild) -> None:
    small = compile_structure(Structure(gbnf=GBNF))
    large = [compile_structure(Structure(schema={"type": "integer", "multipleOf": of})) for of in (84_401, 84_403)]
    checked = vocabulary.checked(child, threading.Event())
    for grammar in (small, *large):
        checked.begin(grammar)
    assert _is_kept(vocabulary, small)
    assert [_is_kept(vocabulary, grammar) for grammar in large].count(True) == 1
