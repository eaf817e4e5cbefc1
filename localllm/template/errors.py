"""The errors of chat templates."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError


class TemplateError(LocalLLMError):
    """The template is invalid or failed. The message gives the line and the reason."""


class TemplateRejected(TemplateError):
    """The template refuses the conversation (`raise_exception`)."""


class TemplateLimit(TemplateError):
    """The template exceeds a limit: it is broken or malicious."""
