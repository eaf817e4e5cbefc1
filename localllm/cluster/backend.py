"""A backend whose plans run in stages: the first stage here, on its own backend, and the others wherever `connect`
starts them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from threading import Thread

from localllm.backends.base import F16_CACHE, Backend, CacheTypes, Limits, Progress
from localllm.cluster.cut import Cut
from localllm.cluster.executable import SplitExecutable
from localllm.cluster.ring import Connect, Ring
from localllm.cluster.stage import Layout, bind_stage
from localllm.loading.splitting import CPU_STAGES
from localllm.plan import Plan, Value


class SplitBackend:
    """Cuts plans with `cut` and binds the first stage to `first`, which it owns.

    `connect` starts the other stages. After a stage was lost, it is called again: it restarts what died.
    """

    def __init__(
        self,
        first: Backend,
        cut: Callable[[Plan], Cut],
        connect: Connect,
        others: str = "cpu",
        together: bool = False,
    ) -> None:
        """`others` names the backend of the other stages; "": they differ. `together`: they load while the first one
        does, in other processes.
        """
        self._together = together
        self.first, self._cut, self._connect = first, cut, connect
        self.name = CPU_STAGES if first.name == others == "cpu" else "stages"

    def describe(self) -> str:
        return f"stages: the first on {self.first.describe()}"

    def bind(
        self,
        plan: Plan,
        limits: Limits,
        cache: CacheTypes = F16_CACHE,
        progress: Progress | None = None,
        keep: Collection[Value] = (),
    ) -> SplitExecutable:
        """Cut the plan, and bind its stages. Raises ClusterError if the plan cannot be cut so."""
        cut = self._cut(plan)
        layout = Layout(cut.firsts, limits, cache, tuple(sorted({value.index for value in keep})))
        connected = _in_thread(lambda: self._connect(cut, layout)) if self._together else None
        try:
            first = bind_stage(0, cut, layout, self.first, progress)
            try:
                ring = connected.result() if connected is not None else self._connect(cut, layout)
            except BaseException:
                first.close()
                raise
        except BaseException:
            if connected is not None:
                connected.add_done_callback(_close)  # not waited for: the others may load for minutes
            raise
        try:
            return SplitExecutable(cut, layout, first, ring, lambda: self._connect(cut, layout))
        except BaseException:
            ring.close()
            first.close()
            raise

    def close(self) -> None:
        self.first.close()


def _in_thread(call: Callable[[], Ring]) -> Future[Ring]:
    """Return the result of a call in another thread, which ends with the program."""
    found: Future[Ring] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=run, name="stages", daemon=True).start()
    return found


def _close(connected: Future[Ring]) -> None:
    """Close an unused ring."""
    if connected.exception() is None:
        connected.result().close()
