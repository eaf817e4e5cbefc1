"""The actors of Ray on a machine of the cluster: its stages, and a helper that measures and cleans up.

These are plain classes; `stages.py` makes actors of them. Calls of Ray load a stage, exchange keys
and addresses, and check that it is alive; everything else travels in the ring.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from threading import Lock, Thread
from typing import Any

from localllm.backends.base import BackendError
from localllm.base.notices import said
from localllm.base.printable import printable
from localllm.cluster.errors import ClusterError
from localllm.cluster.stage import Stage
from localllm.cluster.worker import Assignment, Source, open_stage
from localllm.distributed.files import has, parts_folder, reader
from localllm.distributed.killing import guarded, kill
from localllm.distributed.measure import Facts, Request, measure
from localllm.distributed.parts import Needed, fetch

ENDING = 10.0  # seconds for a stage to finish the step of a ring that was given up


class Helper:
    """Measures its machine. Also ends processes of it that no longer answer."""

    def measure(self, request: Request, most_threads: int) -> Facts:
        return measure(request, most_threads)

    def end(self, process: int) -> None:
        """Kill a process that hangs, which Ray would only ask to leave."""
        kill(process)


class StageProcess(Helper):
    """One stage of a model. Its ring runs in a separate thread, so that this object can answer meanwhile. Before it has
    a stage, it measures the machine; later, the process that waits to replace it ends it if it hangs.
    """

    def __init__(self) -> None:
        self._stage: Stage | None = None
        self._thread: Thread | None = None
        self._endpoint: Any = None
        self._opening = Lock()
        self._ended = ""

    def process(self) -> int:
        """Return the process number: a sign of life."""
        return os.getpid()

    def node(self) -> str:
        """Return Ray's id of the node of this process."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def prepare(self, request: Request) -> None:
        """Import the modules that opening a stage needs."""
        with suppress(BackendError):
            request.opened(1).close()

    def has(self, model: Source) -> bool:
        """Return whether this machine has a file under the same path, with the same content."""
        return has(model)

    def open(
        self,
        given: Assignment,
        request: Request,
        threads: int,
        parts: tuple[Needed | None, ...],
        servers: tuple[Any, ...],
    ) -> str:
        """Load the stage. Return "", or why it cannot be loaded. `parts` are to be fetched, of model and drafter, each
        from its server.
        """
        with self._opening, guarded():
            try:
                self._open(given, request, threads, parts, servers)
            except Exception as error:  # types of errors may be unknown to the front
                return printable(str(said(error)), None) or type(error).__name__
            return ""

    def _open(
        self,
        given: Assignment,
        request: Request,
        threads: int,
        parts: tuple[Needed | None, ...],
        servers: tuple[Any, ...],
    ) -> None:
        sources = [given.model, given.drafter]
        for number, part in enumerate(parts):
            if part is not None:
                path = fetch(parts_folder(), part, reader(servers[number]))
                sources[number] = Source(str(path), "", part.absent)
        model = sources[0]
        assert model is not None
        backend = request.opened(threads)
        try:
            self._stage = open_stage(replace(given, model=model, drafter=sources[1]), backend)
        except BaseException:
            backend.close()
            raise

    # -- rings -----------------------------------------------------------------------------------------------------

    def listen(self, host: str, ports: tuple[int, int] | None) -> Any:
        """Begin a new ring: return the address and the public key of this process in it."""
        from localllm.cluster.zeromq import Endpoint

        if self._thread is not None:
            self._thread.join(ENDING)
            if self._thread.is_alive():
                raise ClusterError("the stage still works on a step of the ring before")
        assert self._stage is not None, "open comes first"
        self._endpoint = Endpoint(self._stage.most_bytes, host, ports=ports)
        return self._endpoint.peer

    def accept(self, key: bytes) -> None:
        """Accept messages of the process before, with this public key."""
        self._endpoint.accept(key)

    def serve(self, following: Any) -> None:
        """Connect to the process after, and handle messages until the ring ends."""
        from localllm.cluster.watchdog import Watchdog
        from localllm.cluster.zeromq import serve

        stage, endpoint = self._stage, self._endpoint
        assert stage is not None, "open comes first"
        endpoint.connect(following)

        def run() -> None:
            # a hanging process cannot leave its ring, so it ends; a process that waits for a card seems to hang
            watchdog = Watchdog(lambda: os._exit(1)) if stage.description.backend == "cpu" else None
            try:
                self._ended = str(serve(stage, endpoint, watchdog))
            finally:
                endpoint.close()
                if watchdog is not None:
                    watchdog.close()

        self._thread = Thread(target=run, name="stage", daemon=True)
        self._thread.start()
