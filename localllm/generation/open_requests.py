"""The open requests of a scheduler, counted in total and for each account, with their limit."""

from __future__ import annotations

import threading
from collections import Counter

from localllm.generation.errors import QueueFull
from localllm.generation.request import within_share


class OpenRequests:
    """Counts requests that have not ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self._accounts: Counter[str] = Counter()

    def enter(self, account: str, most: int) -> None:
        """Count one more request, of `most` in total. Raise QueueFull if too many requests are open, in total or for
        this account.
        """
        with self._lock:
            left, mine = most - self.count, self._accounts[account]
            if left <= 0:
                raise QueueFull(f"{self.count} answers are running or waiting; try again later")
            if not within_share(mine, left):
                message = (
                    f"{mine} of your answers are running or waiting, and the rest of the queue is reserved for others"
                )
                raise QueueFull(f"{message}; wait for some to end")
            self.count += 1
            self._accounts[account] += 1

    def leave(self, account: str) -> None:
        """Count one request less."""
        with self._lock:
            self.count -= 1
            self._accounts[account] -= 1
            if not self._accounts[account]:
                del self._accounts[account]
