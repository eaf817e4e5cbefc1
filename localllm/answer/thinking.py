"""How templates are told to think: by variables, of which each template knows some."""

from __future__ import annotations

from typing import Any


def thinking_variables(enabled: bool | None, effort: str = "", budget: int | None = None) -> dict[str, Any]:
    """Return the variables by which templates learn how to think; a template ignores those that it does not know."""
    if enabled is None and (effort or budget is not None):
        enabled = True
    found: dict[str, Any] = {} if enabled is None else {"enable_thinking": enabled, "thinking": enabled}
    if effort:
        found |= {"reasoning_effort": effort, "thinking_effort": effort, "reasoning_strength": effort}
    if budget is not None:
        found["thinking_budget"] = budget
    return found
