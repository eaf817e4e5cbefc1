"""Run code on hostile input in a child process with limits, where it cannot take this process down."""

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
