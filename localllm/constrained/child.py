"""The child process that validates clients' grammars. It compiles them with limits on time and memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from typing import Any

from localllm.constrained.compiling import vocabulary_request
from localllm.options.structure import NotFinished, StructureError
from localllm.sandbox import Confined, ConfinedCrash, ConfinedLate, ConfinedLimit, ConfinedSlow, ResourceLimits

SECONDS = 2.0  # CPU time; large schemas of real programs take a few tenths of a second
_LIMITS = ResourceLimits(seconds=SECONDS, wall=4 * SECONDS, memory=256 << 20, answer=4 << 20)
_VOCABULARY = ResourceLimits(seconds=30, wall=60, memory=1 << 30)


class GrammarChild:
    """Compiles grammars for one vocabulary in a child process, which starts on first use. Not thread-safe."""

    def __init__(self, tokens: Sequence[bytes], special: Collection[int], ends: Sequence[int]) -> None:
        self._key = hashlib.sha256(b"\0".join(tokens)).hexdigest()
        self._tokens, self._special, self._ends = tokens, special, ends
        self._child = Confined("localllm.constrained.compiling", _VOCABULARY)

    def compile(self, source: str, stop: threading.Event) -> tuple[str, int]:
        """Return the grammar without GBNF parts, and its memory in bytes.

        Raises StructureError if it is invalid or exceeds a limit, ConfinedStopped when `stop` is set, and ConfinedError
        if the child cannot be started.
        """
        request = {"key": self._key, "grammar": source}
        if not (answer := self._answer(request, stop)):
            vocabulary = vocabulary_request(self._key, self._tokens, self._special, self._ends)
            self._child.call(vocabulary, _VOCABULARY, stop)
            answer = self._answer(request, stop)
        if "error" in answer:
            raise StructureError(str(answer["error"]))
        return str(answer["source"]), int(answer["bytes"])

    def _answer(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        try:
            return self._child.call(request, _LIMITS, stop)
        except ConfinedLate as error:
            raise NotFinished(f"the grammar or schema was not compiled: {error}; try again") from None
        except ConfinedSlow:
            needs = f"takes more than {_LIMITS.seconds:g} s to compile"
            raise StructureError(f"the grammar or schema {needs}; make it smaller") from None
        except (ConfinedLimit, ConfinedCrash) as error:
            raise StructureError(f"the grammar or schema cannot be used: {error}; make it smaller") from None

    def close(self) -> None:
        """End the child and any running compilation."""
        self._child.close()
