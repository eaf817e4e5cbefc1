"""The errors of this package."""

from __future__ import annotations

from localllm.backends.base import ExecutableLost
from localllm.base.errors import LocalLLMError


class ClusterError(LocalLLMError):
    """A model cannot be split as requested, or its stages do not fit together."""


class StageLost(ClusterError, ExecutableLost):
    """A stage does not answer, or its connection ended. The executable must be restored before it runs again."""


class MessageError(ClusterError):
    """Bytes that are not a message, or a message with unsuitable content."""
