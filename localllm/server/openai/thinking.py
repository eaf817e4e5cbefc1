"""Reasoning options: OpenAI's `reasoning_effort`, and the fields of llama.cpp, vLLM and others."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from localllm.server.openai.generation import GenerationBody
from localllm.server.structs import MAX_INT, Body, read
from localllm.server.turn import Json, Thinking

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: dict[Effort, str] = {"none": "", "minimal": "low", "xhigh": "high", "max": "high"}  # others stay
SWITCHES = {"enabled": True, "disabled": False}  # values of `thinking`; others leave the choice to the model
# value of `reasoning_format` -> whether reasoning stays in the content
FORMATS = {"auto": None, "deepseek": False, "deepseek-legacy": False, "none": True}
Budget = Annotated[int, Meta(ge=-1, le=MAX_INT)]


class Switch(Body):
    """Whether the model reasons."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]


class Variables(Body):
    """The template variables that decide whether the model reasons."""

    enable_thinking: bool | None = None


class ThinkingBody(GenerationBody):
    """The reasoning fields of chat completions."""

    reasoning_format: Literal["auto", "deepseek", "deepseek-legacy", "none"] = "auto"
    enable_thinking: bool | None = None
    thinking: Switch | None = None
    thinking_budget_tokens: Budget | None = None
    reasoning_budget_tokens: Budget | None = None
    reasoning_budget: Budget | None = None
    reasoning_effort: Effort | None = None


def read_thinking(body: ThinkingBody, variables: Json) -> Thinking:
    """Read the reasoning fields of chat completions. The template `variables` may have `enable_thinking`."""
    enabled = read(variables, Variables, "chat_template_kwargs").enable_thinking
    if body.enable_thinking is not None:
        enabled = body.enable_thinking
    if body.thinking is not None:
        enabled = SWITCHES.get(body.thinking.type)
    budgets = (body.thinking_budget_tokens, body.reasoning_budget_tokens, body.reasoning_budget)
    budget = next((each for each in budgets if each is not None), -1)
    inline = FORMATS[body.reasoning_format]
    return with_effort(body.reasoning_effort, enabled, None if budget == -1 else budget, inline)


def with_effort(
    effort: Effort | None, enabled: bool | None = None, budget: int | None = None, inline: bool | None = None
) -> Thinking:
    """Return the options for a reasoning effort: "none" disables reasoning, other values enable it."""
    if effort is None:
        return Thinking(enabled, "", budget, inline)
    level = EFFORTS.get(effort, effort)
    return Thinking(bool(level) if enabled is None else enabled, level, budget, inline)
