"""Reasoning in prompts: whether a prompt has opened it, how to continue it, and the template
variables that enable it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localllm.options.thinking import SWITCHES
from localllm.template.format import SPACES, AnswerFormat, ReasoningMarkers


def with_thinking(template: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a chat template. Reasoning is enabled if the model supports it, unless the variables
    disable it.

    Some templates treat an undefined `enable_thinking` as off, although their models were trained to reason.
    """
    from localllm.template.formats import find_format

    if not SWITCHES.isdisjoint(variables) or not find_format(template).thinks:
        return dict(variables)
    return {"enable_thinking": True, **variables}


ReasoningState = Literal["open", "possible", "over"]  # of the reasoning when the answer starts


def reasoning_state(format_: AnswerFormat, prompt_tail: str) -> ReasoningState:
    """Return the state of reasoning at the start of an answer, from the end of the prompt."""
    thinking, tail = format_.thinking, prompt_tail.rstrip(SPACES)
    if not thinking.start or tail.endswith(thinking.end):
        return "over"
    if tail.endswith(thinking.start.rstrip()):
        return "open"
    if format_.channels is not None and not tail.endswith(format_.channels.start):
        return "over"  # the prompt has begun a message that is not reasoning
    return "possible" if format_.thinks else "over"


@dataclass(frozen=True, slots=True)
class Begun:
    """The text at the end of a prompt that begins the answer: `opening`, thought, `closing` and content, in this order.

    It replaces the last `cut` characters of the prompt. `opening` and `closing` are markers as the template writes
    them; thought and content are model output.
    """

    cut: int = 0
    opening: str = ""
    reasoning: str = ""
    closing: str = ""
    content: str = ""


def begin(format_: AnswerFormat, prompt_tail: str, reasoning: str, content: str | None) -> Begun:
    """Return the text that begins an answer with this reasoning and content, after a prompt ending in `prompt_tail`.

    If content is None, the answer continues the reasoning. Reasoning is dropped if the format does not support it.
    """
    thinking = format_.thinking
    lead, before, after = thinking.spaces
    open_ = reasoning_state(format_, prompt_tail) == "open"
    if not (reasoning and format_.thinks) and not (open_ and content is not None):
        return Begun(closing=before_content(format_, prompt_tail) if content else "", content=content or "")
    cut, opening = (0, "") if open_ else (_closed_reasoning(thinking, prompt_tail), thinking.start + lead)
    if content is None:
        return Begun(cut, opening, reasoning)
    closing = f"{before}{thinking.end}{after}{thinking.resume}{format_.around[0]}"
    return Begun(cut, opening, reasoning, closing, content)


def _closed_reasoning(thinking: ReasoningMarkers, prompt_tail: str) -> int:
    """Return the length of an empty reasoning block or a lone end marker at the end of the prompt; 0 without either."""
    tail = prompt_tail.rstrip(SPACES)
    if not tail.endswith(thinking.end):
        return 0
    rest = tail.removesuffix(thinking.end)
    empty = rest.rstrip(SPACES)
    return len(prompt_tail) - len(empty.removesuffix(thinking.start) if empty.endswith(thinking.start) else rest)


def before_content(format_: AnswerFormat, prompt_tail: str) -> str:
    """Return the marker that precedes content after this prompt, or ""."""
    before, channels = format_.around[0], format_.channels
    tail = prompt_tail.rstrip(SPACES)
    begun = channels is not None and not tail.endswith(channels.start)
    return "" if begun or tail.endswith(before.rstrip()) else before
