"""Reasoning options: OpenAI's `reasoning_effort`, and the fields of llama.cpp, vLLM and others."""

from __future__ import annotations

from dataclasses import replace

from localllm.server.fields import Fields
from localllm.server.turn import Json, Thinking

EFFORTS = {  # value in a request: value in templates
    "none": "",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
BUDGETS = ("thinking_budget_tokens", "reasoning_budget_tokens", "reasoning_budget")
SWITCHES = {"enabled": True, "disabled": False, "auto": None, "adaptive": None}  # values of `thinking`
# value of `reasoning_format` -> whether reasoning stays in the content
FORMATS = {"auto": None, "deepseek": False, "deepseek-legacy": False, "none": True}
MAX_BUDGET = 2**31 - 1


def read_thinking(fields: Fields, variables: Json) -> Thinking:
    """Read the reasoning fields of chat completions. The template `variables` may have `enable_thinking`."""
    inline = FORMATS[fields.choice("reasoning_format", tuple(FORMATS), "auto")]
    inner = Fields(variables, "chat_template_kwargs")
    enabled = inner.optional_flag("enable_thinking")
    if fields.has("enable_thinking"):
        enabled = fields.flag("enable_thinking")
    if fields.has("thinking"):
        enabled = SWITCHES[fields.inner("thinking").choice("type", tuple(SWITCHES))]
    budget = next((fields.integer(name, None, -1, MAX_BUDGET) for name in BUDGETS if fields.has(name)), -1)
    found = with_effort(fields, "reasoning_effort", enabled, None if budget == -1 else budget)
    return replace(found, inline=inline)


def with_effort(fields: Fields, name: str, enabled: bool | None = None, budget: int | None = None) -> Thinking:
    """Return the options for a reasoning effort: "none" disables reasoning, other values enable it."""
    if not fields.has(name):
        return Thinking(enabled, "", budget)
    effort = EFFORTS[fields.choice(name, tuple(EFFORTS))]
    return Thinking(bool(effort) if enabled is None else enabled, effort, budget)
