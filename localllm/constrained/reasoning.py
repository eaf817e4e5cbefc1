"""Reasoning before an answer: whether the prompt has begun it, grammars that apply after it, and a token budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localllm.constrained.grammar import Grammar
from localllm.template.format import AnswerFormat
from localllm.template.reasoning import ReasoningState

if TYPE_CHECKING:
    from localllm.constrained.constraint import GrammarVocabulary
    from localllm.sampling.constraint import Constraint

Mask = NDArray[np.bool_]

_MOST_BEFORE = 64  # maximum characters of output before reasoning


# -- grammars --------------------------------------------------------------------------------------------------------


def after_reasoning(
    grammar: Grammar, format_: AnswerFormat, state: ReasoningState, vocabulary: GrammarVocabulary
) -> Grammar:
    """Return the grammar of optional reasoning followed by text that matches `grammar`."""
    if state == "over":
        return grammar
    rules = [*ended_text("thought", format_.thinking.end, vocabulary), r"gap: /[ \t\r\n]{0,8}/"]
    after = f"{vocabulary.spelled(format_.thinking.resume)} gap" if format_.thinking.resume else "gap"
    if state == "open":
        start = f"thought {after} {grammar.start}"
    else:
        rules.append(f"begun: gap {vocabulary.spelled(format_.thinking.start)} thought {after}")
        start = f"begun? {grammar.start}"
    return Grammar("\n".join([grammar.rules, *rules]), grammar.parts, start)


def ended_text(name: str, end: str, vocabulary: GrammarVocabulary) -> list[str]:
    """Return rules for `name`: any text, followed by the end marker."""
    plain = _plain_start(end, vocabulary)
    if not plain:
        return [f"{name}: TEXT_{name.upper()} {vocabulary.spelled(end)}", f"TEXT_{name.upper()}: /(?s:.*)/"]
    rest = end.removeprefix(plain)
    lazy = f"{name}_text[lazy]: /(?s:.*){regex_escaped(plain)}/"
    return [f"{name}: {name}_text {vocabulary.spelled(rest) if rest else ''}".rstrip(), lazy]


def _plain_start(text: str, vocabulary: GrammarVocabulary) -> str:
    """Return the part of `text` before the first control token."""
    plain = ""
    for part in vocabulary.parts(text):
        if isinstance(part, int):
            break
        plain += part
    return plain


def regex_escaped(text: str) -> str:
    """Return `text` escaped for a regular expression between slashes."""
    return "".join(f"\\{letter}" if letter in _SIGNS else _ESCAPES.get(letter, letter) for letter in text)


_SIGNS = r"\.+*?()|[]{}^$#&-~/"
_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}


# -- watching ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReasoningProgress:
    """The parse state of the output. It is immutable, so that drafts can be tried."""

    state: ReasoningState
    tail: bytes = b""
    seen: int = 0  # bytes of the output before reasoning


class ReasoningTracker:
    """Tracks whether the output is inside reasoning."""

    def __init__(self, format_: AnswerFormat) -> None:
        thinking = format_.thinking
        self._start, self.end = thinking.start.encode(), thinking.end.encode()
        self._anywhere = thinking.anywhere or format_.channels is not None

    def after(self, state: ReasoningProgress, piece: bytes) -> ReasoningProgress:
        """Return the state after a token's bytes."""
        if state.state == "over":
            return state
        tail = (state.tail + piece)[-len(piece) - max(len(self._start), len(self.end)) :]
        if state.state == "open":
            if self.end not in tail:
                return ReasoningProgress("open", tail)
            return ReasoningProgress("possible" if self._anywhere else "over")
        seen = state.seen + len(piece)
        if self._start and self._start in tail:
            return ReasoningProgress("open")
        return ReasoningProgress("possible" if self._anywhere or seen < _MOST_BEFORE else "over", tail, seen)


# -- budget ----------------------------------------------------------------------------------------------------------


class ReasoningBudget:
    """Ends reasoning after `budget` tokens. From then on, only the tokens of the end marker are allowed.

    An optional `inner` constraint sees all tokens and must allow this end.
    """

    def __init__(
        self,
        format_: AnswerFormat,
        state: ReasoningState,
        budget: int,
        vocabulary: GrammarVocabulary,
        inner: Constraint | None = None,
    ) -> None:
        self._watch = ReasoningTracker(format_)
        self._vocabulary, self._inner, self._budget = vocabulary, inner, budget
        self._forced = vocabulary.tokenizer.encode(format_.thinking.end, add_special=False, parse_special=True)
        self._state = _State(ReasoningProgress(state))

    def allowed(self) -> Mask | None:
        """Return the mask (V,) of allowed next tokens, or None if all are allowed."""
        token = self._next(self._state)
        if token is None:
            return self._inner.allowed() if self._inner is not None else None
        mask = np.zeros(self._vocabulary.width, np.bool_)
        mask[token] = True
        return mask

    def accept(self, token: int) -> None:
        self._state = self._after(self._state, token)
        if self._inner is not None:
            self._inner.accept(token)

    def validate(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that are allowed."""
        most = len(tokens) if self._inner is None else self._inner.validate(tokens)
        state = self._state
        for count, token in enumerate(tokens[:most]):
            forced = self._next(state)
            if forced is not None and forced != token:
                return count
            state = self._after(state, token)
        return most

    @property
    def finished(self) -> bool:
        return self._inner is not None and self._inner.finished

    def _next(self, state: _State) -> int | None:
        """Return the only allowed next token, if there is one. An end marker that the model has begun is not forced."""
        if state.watched.state != "open" or state.count < self._budget or state.forced == len(self._forced):
            return None
        end, tail = self._watch.end, state.watched.tail
        if not state.forced and any(tail.endswith(end[:size]) for size in range(1, len(end))):
            return None
        return self._forced[state.forced]

    def _after(self, state: _State, token: int) -> _State:
        """Return the state after a token."""
        watched = self._watch.after(state.watched, self._vocabulary.piece(token))
        if state.watched.state != "open" or watched.state != "open":
            return _State(watched, state.count)
        return _State(watched, state.count + 1, state.forced + (self._next(state) is not None))


@dataclass(frozen=True, slots=True)
class _State:
    watched: ReasoningProgress
    count: int = 0  # tokens of reasoning
    forced: int = 0  # tokens of the end marker written so far


def budgeted(
    format_: AnswerFormat,
    state: ReasoningState,
    budget: int | None,
    vocabulary: GrammarVocabulary,
    inner: Callable[[], Constraint] | None = None,
) -> Callable[[], Constraint] | None:
    """Return a factory for a constraint with a reasoning budget, or None if the output is unconstrained."""
    if budget is None or not format_.thinking.end or (state == "over"):
        return inner
    return lambda: ReasoningBudget(format_, state, budget, vocabulary, inner() if inner is not None else None)
