"""Errors of this package."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError

INSTALL = "pip install 'localllm[media]'"


class MediaError(LocalLLMError):
    """A picture, a sound or an mmproj file cannot be used. The message names the part and the next step."""
