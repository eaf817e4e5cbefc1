"""Build the decoding constraint of a request (schema, grammar, tool calls). Grammar modules are imported when they are
needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from localllm.constrained.constraint import GrammarVocabulary
    from localllm.options.structure import ConstraintSpec, Structure
    from localllm.sampling.constraint import Constraint
    from localllm.tokenizer import Tokenizer

_TAIL = 1000  # characters at the end of a prompt that are checked for reasoning


class ConstraintSource(Protocol):
    """The parts of a model that constraints need."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def grammars(self) -> GrammarVocabulary: ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to build a constraint: plain data, from which any process with the same model builds the same one."""

    spec: ConstraintSpec
    template: str | None = None  # source of the chat template; None: the constraint is on plain text
    tail: str = ""  # end of the prompt

    def made(self, model: ConstraintSource) -> Constrained | None:
        """Return the factory of the constraint, or None if the answer is unconstrained. Raises StructureError."""
        if self.template is None:
            begin = text_constraint(model, self.spec.structure)
        else:
            begin = answer_constraint(model, self.spec, self.template, self.tail)
        return None if begin is None else Constrained(self, begin)


@dataclass(frozen=True, slots=True)
class Constrained:
    """Starts the constraint of an answer, and knows how it was built."""

    recipe: Recipe
    begin: Callable[[], Constraint]

    def __call__(self) -> Constraint:
        return self.begin()


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
    model: ConstraintSource, asked: ConstraintSpec, template: str, tail: str
) -> Callable[[], Constraint] | None:
    """Return a factory for the constraint on an answer, or None if it is unconstrained. `template` is the source of the
    chat template, `tail` the end of the prompt."""
    if not asked.forced and not model.tokenizer.eog:  # no token could end the grammar of an optional call
        asked = replace(asked, tools=())
    if asked.free:
        return None
    from localllm.constrained.build import constrained
    from localllm.template.formats import find_format

    return constrained(model.grammars, find_format(template), tail, asked)
