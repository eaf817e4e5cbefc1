"""Reasoning options of a request, and the chat template variables that express them, which differ by template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SWITCHES = frozenset(("enable_thinking", "thinking"))  # template variables that switch reasoning on or off


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model reasons before it answers. By default, it reasons if it can (`with_thinking`)."""

    enabled: bool | None = None
    effort: str = ""  # low, medium, high: for templates that support it; "none": no reasoning
    budget: int | None = None  # maximum number of reasoning tokens
    inline: bool | None = None  # leave reasoning in the content, in the model's format; None: the server's setting

    @classmethod
    def of(cls, think: bool | int | str | None) -> Thinking:
        """Return the options for `think`: on, off, a number of tokens, or an effort."""
        if isinstance(think, str):
            return cls(effort=think)
        return cls(think) if think is None or isinstance(think, bool) else cls(budget=think)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables for a chat template, which ignores unknown variables."""
        enabled, effort = self.enabled, self.effort
        if effort == "none":
            enabled, effort = False, ""
        if enabled is None and (effort or self.budget is not None):
            enabled = True
        found: dict[str, Any] = {} if enabled is None else {"enable_thinking": enabled, "thinking": enabled}
        if effort:
            found |= {"reasoning_effort": effort, "thinking_effort": effort, "reasoning_strength": effort}
        if self.budget is not None:
            found["thinking_budget"] = self.budget
        return found
