"""Downloads from the hub. Clients that ask for the same model share one download, which ends when the last one leaves.

A stopped download keeps its bytes, so that the next one continues there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.base.printable import printable
from localllm.hub.errors import StoreError
from localllm.hub.reference import Reference
from localllm.server.bridge import in_daemon
from localllm.server.errors import Draining, TooManyRequests
from localllm.server.turn import Json

if TYPE_CHECKING:
    from localllm.hub.client import Remote
    from localllm.hub.pull import Pulled

MOST_PULLS = 4  # maximum downloads at the same time
SPARE = 1 << 30  # bytes of disk space that downloads leave free
LOOK_SECONDS = 0.1  # time from one report of progress to the next
MOST_LINES = 1000  # maximum messages of a download that are kept
RETRY_SECONDS = 30


class _Stopped(StoreError):
    """All clients have left the download."""


@dataclass(eq=False, slots=True)
class _Pull:
    """A download. Its thread writes the fields, and clients read them."""

    stop: threading.Event = field(default_factory=threading.Event)
    lines: list[str] = field(default_factory=list)  # messages
    files: dict[str, tuple[int, int]] = field(default_factory=dict)  # digest -> total and received bytes
    current: str = ""  # digest of the file that is being received
    clients: int = 0
    task: asyncio.Task[Pulled] | None = None

    def begin(self, file: Remote) -> None:
        self._check()
        self.current = f"{'sha256' if len(file.digest) == 64 else 'sha1'}:{file.digest}"
        self.files[self.current] = file.size, 0

    def progress(self, name: str, done: int, total: int) -> None:
        self._check()
        self.files[self.current] = total, done

    def tell(self, line: str) -> None:
        self._check()
        if len(self.lines) < MOST_LINES:
            self.lines.append(line)

    def wait(self, seconds: float) -> None:
        self.stop.wait(seconds)
        self._check()

    def _check(self) -> None:
        if self.stop.is_set():
            raise _Stopped("the download was stopped; the same request continues it")


class Pulls:
    """The running downloads of a server. Use it from the event loop only."""

    def __init__(self, cache: Path, free: Callable[[], int], endpoint: str | None = None) -> None:
        """Create an empty set. `cache` is the folder to download to, and `free` returns the bytes of free memory. The
        hub is `endpoint`, or else HF_ENDPOINT."""
        self._cache, self._free, self._endpoint = cache, free, endpoint
        self._open: dict[str, _Pull] = {}
        self.stopping: Callable[[], bool] = lambda: False  # whether the server is stopping

    def running(self, repo: str) -> bool:
        """Return whether a model of this repository is being downloaded."""
        return any(key.partition(":")[0] == repo.lower() for key in self._open)

    async def follow(self, asked: Reference) -> AsyncGenerator[Json, None]:
        """Download a model, or join a download, and yield its progress in Ollama's format. Closing the iterator leaves
        the download."""
        pull = await self._joined(asked)
        assert pull.task is not None
        pull.clients += 1
        told, seen = 0, dict[str, tuple[int, int]]()
        try:
            yield {"status": "pulling manifest"}
            while True:
                done = pull.task.done()
                for line in pull.lines[told:]:
                    yield {"status": printable(line, 500)}
                    told += 1
                for digest, (total, completed) in list(pull.files.items()):
                    if seen.get(digest) != (total, completed):
                        seen[digest] = total, completed
                        short = digest.partition(":")[2][:12]
                        yield {"status": f"pulling {short}", "digest": digest, "total": total, "completed": completed}
                if done:
                    break
                if self.stopping():
                    raise Draining("the server is stopping; the same request continues the download", RETRY_SECONDS)
                await asyncio.wait([pull.task], timeout=LOOK_SECONDS)
            pull.task.result()  # raises the error
            yield {"status": "verifying sha256 digest"}
            yield {"status": "writing manifest"}
        finally:
            pull.clients -= 1
            if not pull.clients:
                pull.stop.set()

    async def _joined(self, asked: Reference) -> _Pull:
        key = str(asked).lower()
        while (found := self._open.get(key)) is not None and found.stop.is_set() and found.task is not None:
            await asyncio.wait([found.task])  # a download that its clients have left is about to end
        if found is not None:
            return found
        if len(self._open) >= MOST_PULLS:
            raise TooManyRequests(f"{MOST_PULLS} downloads are running, which is the limit", RETRY_SECONDS)
        made = self._open[key] = _Pull()
        made.task = asyncio.create_task(in_daemon(partial(self._run, asked, made), lambda pulled: None))
        made.task.add_done_callback(partial(self._ended, key))
        return made

    def _run(self, asked: Reference, pull: _Pull) -> Pulled:
        from localllm.hub.client import Hub
        from localllm.hub.fetch import FetchHooks
        from localllm.hub.pull import pull_model

        hooks = FetchHooks(pull.progress, pull.tell, pull.wait, pull.begin, SPARE)
        return pull_model(Hub(self._endpoint), asked, self._cache, self._free(), hooks)

    def _ended(self, key: str, task: asyncio.Task[Pulled]) -> None:
        self._open.pop(key, None)
        if not task.cancelled():
            task.exception()  # clients that follow have it
