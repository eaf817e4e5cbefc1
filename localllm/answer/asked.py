"""What an answer is held to, from what is asked of it: a structure, calls of tools, a budget for its thought."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.answer.constraint import GrammarVocabulary
from localllm.answer.forced import forced_calls
from localllm.answer.grammars import Format
from localllm.answer.lazy import offered_calls
from localllm.answer.structure import Asked, Grammar, Structure, StructureError, compile_structure
from localllm.answer.thought import after_thought, before_content, budgeted, thought_of

if TYPE_CHECKING:
    from localllm.generation.constraint import Constraint


def constrained(
    vocabulary: GrammarVocabulary, format_: Format, prompt_tail: str, asked: Asked
) -> Callable[[], Constraint] | None:
    """Return what makes the constraint of an answer to messages, or None if it is free.

    The answer begins after a prompt that ends with `prompt_tail`; before what is asked of it, it may think.
    StructureError, in a line, for what cannot be compiled.
    """
    structure = asked.structure
    if structure is not None and asked.tools and asked.forced:
        raise StructureError("an answer cannot have a structure and be a call of a tool; ask for one of them")
    thought = thought_of(format_, prompt_tail)
    grammar: Grammar | None = None
    make: Callable[[], Constraint] | None = None
    if structure is not None:
        grammar = _as_content(compile_structure(structure), format_, prompt_tail, vocabulary)
    elif asked.tools and asked.forced:
        grammar = forced_calls(format_, asked.tools, vocabulary, asked.parallel)
    elif asked.tools:
        make = offered_calls(format_, asked.tools, thought, vocabulary, asked.parallel)
    if grammar is not None:
        make = vocabulary.begin(after_thought(grammar, format_, thought, vocabulary))
    return budgeted(format_, thought, asked.thought_tokens, vocabulary, make)


def structured(vocabulary: GrammarVocabulary, structure: Structure) -> Callable[[], Constraint]:
    """Return what makes the constraint of a plain text with a structure."""
    return vocabulary.begin(compile_structure(structure))


def _as_content(grammar: Grammar, format_: Format, prompt_tail: str, vocabulary: GrammarVocabulary) -> Grammar:
    """Return the grammar between the markers that stand around content in this format."""
    before, after = before_content(format_, prompt_tail), format_.around[1]
    parts = [vocabulary.spelled(before) if before else "", grammar.start]
    if after:
        parts.append(f"({vocabulary.spelled(after)})?")
    return replace(grammar, start=" ".join(filter(None, parts)))
