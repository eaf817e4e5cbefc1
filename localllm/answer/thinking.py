"""How to ask a model to think: by variables of its template. Each template knows some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SWITCHES = frozenset(("enable_thinking", "thinking"))  # variables of templates that switch thinking on or off


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model thinks before it answers. By default it does if it can (`with_thinking`)."""

    enabled: bool | None = None
    effort: str = ""  # low, medium, high: for templates that know it; "none": not at all
    budget: int | None = None  # tokens; then the thought is ended
    inline: bool | None = None  # the thought stays in the content, as the model writes it; None: as the server does

    @classmethod
    def of(cls, think: bool | int | str | None) -> Thinking:
        """Return what the option `think` says: on, off, a number of tokens or an effort."""
        if isinstance(think, str):
            return cls(effort=think)
        return cls(think) if think is None or isinstance(think, bool) else cls(budget=think)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of a chat template; it ignores those that it does not know."""
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


def with_thinking(template: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a chat template. If its model can think, it does so unless the variables say otherwise.

    Some templates take an undefined `enable_thinking` for "off", though their models were trained to think.
    """
    from localllm.answer.formats import find_format

    if not SWITCHES.isdisjoint(variables) or not find_format(template).thinks:
        return dict(variables)
    return {"enable_thinking": True, **variables}
