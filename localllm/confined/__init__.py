"""Code that works on hostile input, run where nothing can take this process down: a child process with limits."""

from __future__ import annotations

from localllm.confined.process import Confined, ConfinedCrash, ConfinedError, ConfinedLimit, Limits

__all__ = ["Confined", "ConfinedCrash", "ConfinedError", "ConfinedLimit", "Limits"]
