"""The base of every error that is the user's to mend; `localllm.cli` turns these into one red line and an exit code."""

from __future__ import annotations


class LocalLLMError(Exception):
    """What went wrong, where, and what to do next, in one line."""
