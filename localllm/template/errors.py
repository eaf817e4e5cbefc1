"""The errors of chat templates."""

from __future__ import annotations

from localllm.errors import LocalLLMError


class TemplateError(LocalLLMError):
    """The template cannot be used or failed; says which line of it and why."""


class TemplateRejected(TemplateError):
    """The template itself refuses the conversation (`raise_exception`)."""


class TemplateLimit(TemplateError):
    """The template does more than a template may: it is broken, or made to do harm."""
