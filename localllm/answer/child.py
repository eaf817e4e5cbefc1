"""The child process that checks clients' grammars: it compiles them within limits of time and memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from typing import Any

from localllm.answer.compiling import vocabulary_request
from localllm.answer.structure import NotFinished, StructureError
from localllm.confined import Confined, ConfinedCrash, ConfinedLate, ConfinedLimit, ConfinedSlow, ResourceLimits

SECONDS = 2.0  # of processor time; large schemas of real programs take a few tenths
_LIMITS = ResourceLimits(seconds=SECONDS, wall=4 * SECONDS, memory=256 << 20, answer=4 << 20)
_VOCABULARY = ResourceLimits(seconds=30, wall=60, memory=1 << 30)


class GrammarChild:
    """Compiles grammars of one vocabulary in a child, which starts with the first. One thread at a time uses it."""

    def __init__(self, tokens: Sequence[bytes], special: Collection[int], ends: Sequence[int]) -> None:
        self._key = hashlib.sha256(b"\0".join(tokens)).hexdigest()
        self._tokens, self._special, self._ends = tokens, special, ends
        self._child = Confined("localllm.answer.compiling", _VOCABULARY)

    def compile(self, source: str, stop: threading.Event) -> tuple[str, int]:
        """Return a grammar without GBNF, and the memory that it takes, in bytes.

        StructureError if it is broken or takes too much; ConfinedStopped when `stop` is set; ConfinedError if no child
        can be started.
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
        """End the child, and a compilation under way."""
        self._child.close()
