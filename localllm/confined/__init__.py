"""Run code on untrusted input in a child process with limits, where it cannot harm this process."""

from __future__ import annotations

from localllm.confined.process import (
    Confined,
    ConfinedCrash,
    ConfinedError,
    ConfinedLate,
    ConfinedLimit,
    ConfinedSlow,
    ConfinedStopped,
    ResourceLimits,
)

__all__ = [
    "Confined",
    "ConfinedCrash",
    "ConfinedError",
    "ConfinedLate",
    "ConfinedLimit",
    "ConfinedSlow",
    "ConfinedStopped",
    "ResourceLimits",
]
