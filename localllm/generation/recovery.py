"""Restores a lost executable in a thread, so that requests can be queued and cancelled meanwhile."""

from __future__ import annotations

import threading

from localllm.backends.base import BackendError, ExecutableLost
from localllm.base.errors import LocalLLMError
from localllm.base.notices import said
from localllm.engine import Engine

POLL_SECONDS = 0.05  # longest wait of a step for the restored executable


class Recovery:
    """An attempt to restore the executable of an engine. `error` says why it failed."""

    def __init__(self, engine: Engine, lost: ExecutableLost) -> None:
        self._engine, self._lost = engine, lost
        self.error: LocalLLMError | None = None
        self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)
        self._thread.start()

    def over(self) -> bool:
        """Wait a little, and return whether the attempt has ended."""
        self._thread.join(POLL_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._engine.restore()
        except Exception as error:  # the stepping thread reports it
            known = isinstance(error, BackendError | LocalLLMError)
            reason = said(error) if known else f"{type(error).__name__}: {error}"
            text = f"{said(self._lost)}; it could not be restored ({reason}); the next request tries again"
            self.error = LocalLLMError(text)
