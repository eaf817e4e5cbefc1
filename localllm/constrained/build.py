"""Build the constraint on the output from the request: a structure, tool calls, a reasoning budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.constrained.constraint import GrammarVocabulary
from localllm.constrained.forced_calls import forced_calls
from localllm.constrained.grammar import Grammar, compile_structure
from localllm.constrained.offered_calls import offered_calls
from localllm.constrained.reasoning import after_reasoning, budgeted
from localllm.options.structure import ConstraintSpec, Structure, StructureError
from localllm.template.format import AnswerFormat
from localllm.template.reasoning import before_content, reasoning_state

if TYPE_CHECKING:
    from localllm.sampling.constraint import Constraint


def constrained(
    vocabulary: GrammarVocabulary, format_: AnswerFormat, prompt_tail: str, asked: ConstraintSpec
) -> Callable[[], Constraint] | None:
    """Return a factory for the constraint on an answer to messages, or None if the answer is unconstrained.

    `prompt_tail` is the end of the prompt. The output may contain reasoning before the constrained part. Raises a
    one-line StructureError if the grammar does not compile.
    """
    structure = asked.structure
    if structure is not None and asked.tools and asked.forced:
        raise StructureError("a structured answer cannot also be a forced tool call; request only one of them")
    state = reasoning_state(format_, prompt_tail)
    grammar: Grammar | None = None
    make: Callable[[], Constraint] | None = None
    if structure is not None:
        grammar = _as_content(compile_structure(structure), format_, prompt_tail, vocabulary)
    elif asked.tools and asked.forced:
        grammar = forced_calls(format_, asked.tools, vocabulary, asked.parallel)
    elif asked.tools:
        make = offered_calls(format_, asked.tools, state, vocabulary, asked.parallel)
    if grammar is not None:
        make = vocabulary.begin(after_reasoning(grammar, format_, state, vocabulary))
    return budgeted(format_, state, asked.reasoning_tokens, vocabulary, make)


def structured(vocabulary: GrammarVocabulary, structure: Structure) -> Callable[[], Constraint]:
    """Return a factory for the constraint on plain text with a structure."""
    return vocabulary.begin(compile_structure(structure))


def _as_content(grammar: Grammar, format_: AnswerFormat, prompt_tail: str, vocabulary: GrammarVocabulary) -> Grammar:
    """Wrap a grammar in the format's markers for content."""
    before, after = before_content(format_, prompt_tail), format_.around[1]
    parts = [vocabulary.spelled(before) if before else "", grammar.start]
    if after:
        parts.append(f"({vocabulary.spelled(after)})?")
    return replace(grammar, start=" ".join(filter(None, parts)))
