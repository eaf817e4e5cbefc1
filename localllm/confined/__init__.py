"""Runs code on hostile input in a child process with limits, where nothing can take this process down."""

from __future__ import annotations

from localllm.confined.process import Confined, ConfinedCrash, ConfinedError, ConfinedLimit, ResourceLimits

__all__ = ["Confined", "ConfinedCrash", "ConfinedError", "ConfinedLimit", "ResourceLimits"]
