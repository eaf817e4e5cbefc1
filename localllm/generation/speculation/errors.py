"""Errors of speculative decoding."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting


class SpeculationError(LocalLLMError):
    """Speculative decoding is not possible as requested."""


class NoDrafts(SpeculationError):
    """The model does not support speculative decoding. `what` names the kind of model in the message."""

    def __init__(self, what: str) -> None:
        super().__init__(Notice(f"{what} does not support drafts; leave ", Setting("spec"), " out"))
        self.what = what
