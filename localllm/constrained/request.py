"""Build the decoding constraint of a request (schema, grammar, tool calls). Grammar modules are imported when they are
needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from localllm.constrained.constraint import GrammarVocabulary
    from localllm.options.structure import ConstraintSpec, Structure
    from localllm.sampling.constraint import Constraint
    from localllm.template import ChatTemplate
    from localllm.tokenizer import Tokenizer

_TAIL = 1000  # characters at the end of a prompt that are checked for reasoning


class ConstraintSource(Protocol):
    """The parts of a model that constraints need."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def grammars(self) -> GrammarVocabulary: ...


def prompt_tail(prompt: str) -> str:
    """Return the end of a prompt, which shows whether reasoning has begun."""
    return str.__str__(prompt)[-_TAIL:]


def text_constraint(model: ConstraintSource, structure: Structure | None) -> Callable[[], Constraint] | None:
    """Return a factory for the constraint on a plain text, or None without a structure. Raises StructureError."""
    if structure is None:
        return None
    from localllm.constrained.build import structured

    return structured(model.grammars, structure)


def answer_constraint(
    model: ConstraintSource, asked: ConstraintSpec, template: ChatTemplate, tail: str
) -> Callable[[], Constraint] | None:
    """Return a factory for the constraint on an answer, or None if it is unconstrained. `tail` is the end of the
    prompt."""
    if not asked.forced and not model.tokenizer.eog:  # no token could end the grammar of an optional call
        asked = replace(asked, tools=())
    if asked.free:
        return None
    from localllm.constrained.build import constrained
    from localllm.template.formats import find_format

    return constrained(model.grammars, find_format(template.source), tail, asked)
