"""From what is asked of an answer to its constraint, for all who write answers. Grammars load when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from localllm.generation.statistics import Piece

if TYPE_CHECKING:
    from localllm.answer.constraint import GrammarVocabulary
    from localllm.answer.content import Parted
    from localllm.answer.structure import Asked, Structure
    from localllm.scheduler.request import Constraint
    from localllm.template import ChatTemplate
    from localllm.tokenizer import Tokenizer

_TAIL = 1000  # characters


class Worded(Protocol):
    """The part of a model that is needed here."""

    @property
    def words(self) -> Tokenizer: ...
    @property
    def grammars(self) -> GrammarVocabulary: ...


def end_of(prompt: str) -> str:
    """Return the end of a prompt, which says whether a thought has begun."""
    return str.__str__(prompt)[-_TAIL:]


def held_text(model: Worded, structure: Structure | None) -> Callable[[], Constraint] | None:
    """Return what makes the constraint of a plain text; None without a structure. StructureError if it is broken."""
    if structure is None:
        return None
    from localllm.answer.asked import structured

    return structured(model.grammars, structure)


def held(model: Worded, asked: Asked, template: ChatTemplate, tail: str) -> Callable[[], Constraint] | None:
    """Return what makes the constraint of an answer to messages, whose prompt ends with `tail`; None if it is free."""
    if not asked.forced and not model.words.eog:  # no grammar can end, but nobody asked for one
        asked = replace(asked, tools=())
    if asked.free:
        return None
    from localllm.answer.asked import constrained
    from localllm.answer.formats import find_format

    return constrained(model.grammars, find_format(template.source), tail, asked)


def without_thought(
    pieces: Iterator[Piece], model: Worded, template: ChatTemplate, tail: str, stops: tuple[str, ...]
) -> Iterator[Piece]:
    """Yield the pieces of an answer without the text of a thought before it."""
    from localllm.answer.content import content_only
    from localllm.answer.formats import find_format

    return content_only(pieces, model.words, find_format(template.source), tail, stops)


def parted(
    model: Worded, template: ChatTemplate, tail: str, stops: tuple[str, ...], begun: Sequence[int] = ()
) -> Parted:
    """Return what cuts the pieces of an answer into thought and content; its first tokens, `begun`, came before."""
    from localllm.answer.content import Parted
    from localllm.answer.formats import find_format

    return Parted(model.words, find_format(template.source), tail, stops, begun)
