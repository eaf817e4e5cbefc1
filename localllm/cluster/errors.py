"""The errors of this package."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError


class ClusterError(LocalLLMError):
    """A model cannot be split as requested, or its stages do not fit together."""


class StageLost(ClusterError):
    """A stage does not answer, or its connection ended. The executable cannot run further steps."""


class MessageError(ClusterError):
    """Bytes that are not a message, or a message with unsuitable content."""
