"""Ends this command when the head of its Ray cluster is gone. Ray itself would wait for a minute, and then abort."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep

from localllm.cluster.errors import ClusterError
from localllm.distributed.membership import reachable

LOOK = 1.0  # seconds between two looks
GONE = 6.0  # seconds without a connection after which the head counts as gone
LEAVING, EXITING = 2.0, 5.0  # seconds for the command to leave its work after each signal, and to end


class _Head:
    """Watches the head. Its thread ends with the command."""

    def __init__(self, address: str, tell: Callable[[str], None]) -> None:
        self.gone = self.told = False
        self.problem = f"the Ray cluster at {address} is gone: its first computer does not answer"
        self._address, self._tell = address, tell
        self.over, self.telling = threading.Event(), threading.Lock()
        threading.Thread(target=self._watch, name="head", daemon=True).start()

    def _watch(self) -> None:
        since = None
        while not self.over.wait(LOOK):
            if reachable(self._address):
                since = None
                continue
            since = since or monotonic()
            if monotonic() - since > GONE:
                self._end()
                return

    def _end(self) -> None:
        """Interrupt the main thread: once, so that it leaves its work, and once more, so that it waits for nothing."""
        self.gone = True
        for number in (signal.SIGTERM, signal.SIGINT):
            _interrupt(number if callable(signal.getsignal(number)) else signal.SIGINT)
            if self.over.wait(LEAVING):
                break
        else:
            with self.telling, suppress(Exception):
                if not self.over.is_set():
                    self.told = True
                    self._tell(f"error: {self.problem}")
        sleep(EXITING)  # Ray's functions at the exit wait for the cluster
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a closed stream or pipe
                stream.flush()
        os._exit(1)


@contextmanager
def watched(address: str, tell: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Within the block, watch the head of a cluster, and yield a function that returns whether it is gone. If it is,
    the block is interrupted and ends with ClusterError.
    """
    head = _Head(address, tell)
    try:
        yield lambda: head.gone
    except (KeyboardInterrupt, SystemExit):
        if not head.gone:
            raise
    finally:
        with head.telling:
            head.over.set()
    if head.told:  # the command left its work late
        raise SystemExit(1)
    if head.gone:
        raise ClusterError(head.problem)


def _interrupt(number: int) -> None:
    """Send a signal to the main thread, which may wait for something."""
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, number)
    else:
        signal.raise_signal(number)
