"""Optional tool calls: free text that is constrained by the call grammar from the start marker of a call.

Small models often call a tool with an unknown name, or with arguments that do not match its schema. The constraint
starts when the model begins a call. Text before a call, reasoning, and answers without a call stay unconstrained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localllm.constrained.constraint import GrammarVocabulary, Mask
from localllm.constrained.forced_calls import MOST_TOOLS, forced_calls
from localllm.constrained.reasoning import ReasoningProgress, ReasoningTracker, regex_escaped
from localllm.options.structure import StructureError
from localllm.template.format import AnswerFormat
from localllm.template.reasoning import ReasoningState

if TYPE_CHECKING:
    from localllm.sampling.constraint import Constraint

_MOST_LEAD = 64  # maximum characters before the marker in the token in which the marker begins


def offered_calls(
    format_: AnswerFormat,
    tools: Sequence[Mapping[str, Any]],
    state: ReasoningState,
    vocabulary: GrammarVocabulary,
    parallel: bool = True,
) -> Callable[[], Constraint] | None:
    """Return a factory for the constraint on an answer that may call one of the `tools`.

    Return None if calls cannot be constrained: the format has no start marker, or no grammar exists for the schemas.
    """
    marker = _marker(format_)
    if not marker or not 0 < len(tools) <= MOST_TOOLS:
        return None
    lead = f"LEAD: /[^{regex_escaped(marker[0])}]{{1,{_MOST_LEAD}}}/"
    try:
        grammar = forced_calls(format_, tools, vocabulary, parallel)
        begin = vocabulary.begin(replace(grammar, rules=f"{grammar.rules}\n{lead}", start=f"LEAD? {grammar.start}"))
    except StructureError:
        return None  # an unconstrained call is better than none
    return lambda: OfferedCalls(ReasoningTracker(format_), state, marker, vocabulary, begin)


def _marker(format_: AnswerFormat) -> str:
    """Return the text that begins calls, or "" if the format lacks such a text or uses headers."""
    opens = format_.calls.opens if format_.channels is None else ()
    return opens[0].strip() if opens else ""


class OfferedCalls:
    """The state of an answer that may call tools: a `localllm.sampling.constraint.Constraint`."""

    def __init__(
        self,
        watch: ReasoningTracker,
        state: ReasoningState,
        marker: str,
        vocabulary: GrammarVocabulary,
        begin: Callable[[], Constraint],
    ) -> None:
        self._watch, self._marker, self._vocabulary, self._begin = watch, marker.encode(), vocabulary, begin
        self._state = _State(ReasoningProgress(state))
        self._calls: Constraint | None = None

    def allowed(self) -> Mask | None:
        """Return the mask (V,) of allowed next tokens, or None if all are allowed."""
        return None if self._calls is None else self._calls.allowed()

    def accept(self, token: int) -> None:
        if self._calls is not None:
            self._calls.accept(token)
            return
        self._state = self._after(self._state, token)
        begun = self._begun(self._state)
        if not begun:
            return
        calls = self._begin()
        if calls.validate(begun) == len(begun):  # otherwise the parser would not recognize the call
            for each in begun:
                calls.accept(each)
            self._calls = calls
        self._state = replace(self._state, recent=())

    def validate(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that are allowed, stopping after the token that completes a call's
        opening marker."""
        if self._calls is not None:
            return self._calls.validate(tokens)
        state = self._state
        for count, token in enumerate(tokens, 1):
            state = self._after(state, token)
            if self._begun(state):
                return count
        return len(tokens)

    @property
    def finished(self) -> bool:
        return self._calls is not None and self._calls.finished

    def _after(self, state: _State, token: int) -> _State:
        """Return the state after a token."""
        watched = self._watch.after(state.watched, self._vocabulary.piece(token))
        if "open" in (watched.state, state.watched.state):
            return _State(watched)
        recent = (*state.recent, token)
        while self._length(recent[1:]) >= len(self._marker):
            recent = recent[1:]
        return _State(watched, recent)

    def _length(self, tokens: Sequence[int]) -> int:
        return sum(len(self._vocabulary.piece(token)) for token in tokens)

    def _begun(self, state: _State) -> Sequence[int]:
        """Return the tokens from the token in which the marker begins. The result is empty if the marker is missing."""
        text = b"".join(map(self._vocabulary.piece, state.recent))
        at = text.find(self._marker)
        if at < 0:
            return ()
        tokens = state.recent
        while (size := len(self._vocabulary.piece(tokens[0]))) <= at:
            tokens, at = tokens[1:], at - size
        return tokens


@dataclass(frozen=True, slots=True)
class _State:
    """An immutable state, so that drafts can be tried."""

    watched: ReasoningProgress
    recent: tuple[int, ...] = ()  # tokens in which a marker may begin
