"""Restores a lost executable in a thread, so that requests can be queued and cancelled meanwhile."""

from __future__ import annotations

import threading
import time

from localllm.backends.base import BackendError, ExecutableLost
from localllm.base.errors import LocalLLMError
from localllm.base.notices import said
from localllm.engine import Engine

POLL_SECONDS = 0.05  # longest wait of a step for the restored executable
ATTEMPTS = 5  # because a part may be lost again while it is restored
_LONGEST = 60.0  # seconds within which further attempts begin
_PAUSE = 0.2  # seconds before the second attempt; before each later one twice as long


class Recovery:
    """Restores the executable of an engine. `error` says why that failed."""

    def __init__(self, engine: Engine, lost: ExecutableLost) -> None:
        self._engine, self._lost = engine, lost
        self.began = time.monotonic()
        self.error: LocalLLMError | None = None
        self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)
        self._thread.start()

    def over(self) -> bool:
        """Wait a little, and return whether the executable is restored, or cannot be."""
        self._thread.join(POLL_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        until = time.monotonic() + _LONGEST
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._engine.restore()
                return
            except Exception as error:  # the stepping thread reports it
                if isinstance(error, ExecutableLost) and attempt < ATTEMPTS and time.monotonic() < until:
                    time.sleep(_PAUSE * 2 ** (attempt - 1))
                    continue
                known = isinstance(error, BackendError | LocalLLMError)
                reason = said(error) if known else f"{type(error).__name__}: {error}"
                text = f"{said(self._lost)}; it could not be restored ({reason}); the next request tries again"
                self.error = LocalLLMError(text)
                return
