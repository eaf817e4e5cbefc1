"""A child process with limits for code that processes hostile input: chat templates, grammars, tokenizers of
checkpoints, pictures and sound.

May import: base.
Begin with: process.py (the parent), then worker.py (the child) and rights.py (the rights it drops).
"""

from __future__ import annotations

from localllm.sandbox.process import (
    Confined,
    ConfinedCrash,
    ConfinedError,
    ConfinedLate,
    ConfinedLimit,
    ConfinedSlow,
    ConfinedStopped,
    ResourceLimits,
)
from localllm.sandbox.wire import BLOB

__all__ = [
    "BLOB",
    "Confined",
    "ConfinedCrash",
    "ConfinedError",
    "ConfinedLate",
    "ConfinedLimit",
    "ConfinedSlow",
    "ConfinedStopped",
    "ResourceLimits",
]
