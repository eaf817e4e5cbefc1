"""The hybrid backend: combines a GPU backend and the CPU backend through the common interface."""

from __future__ import annotations

from collections.abc import Collection

from localllm.backends.base import F16_CACHE, Backend, BackendError, CacheTypes, Executable, Limits, Progress
from localllm.backends.hybrid.cut import Placement, Side, cut_plan
from localllm.backends.hybrid.executable import ONE_PLACE, HybridExecutable
from localllm.plan import Plan, Value


class HybridBackend:
    """Binds plans to two backends according to `placement`, and owns both backends."""

    def __init__(self, gpu: Backend, host: Backend, placement: Placement) -> None:
        self.gpu, self.host, self.placement = gpu, host, placement
        self.name = f"{gpu.name}+{host.name}"

    def describe(self) -> str:
        return f"{self.gpu.describe()}; {self.host.describe()}"

    def bind(
        self,
        plan: Plan,
        limits: Limits,
        cache: CacheTypes = F16_CACHE,
        progress: Progress | None = None,
        keep: Collection[Value] = (),
    ) -> Executable:
        """Bind the whole plan to one side if the placement says so, otherwise split it over both sides.

        Raises BackendError if a side cannot be bound, or if the plan is split and values are to be kept.
        """
        split = cut_plan(plan, self.placement)
        backends: dict[Side, Backend] = {"host": self.host, "gpu": self.gpu}
        if len(split.plans) == 1:
            return backends[split.order[0]].bind(plan, limits, cache, progress, keep)
        if keep:
            raise BackendError(ONE_PLACE)
        bound: dict[Side, Executable] = {}
        try:
            for side, own in split.plans.items():
                bound[side] = backends[side].bind(own, limits, cache, _told(progress, backends[side].name))
        except BaseException:
            for executable in bound.values():
                executable.close()
            raise
        return HybridExecutable(split, bound, limits)

    def close(self) -> None:
        self.gpu.close()
        self.host.close()


def _told(progress: Progress | None, where: str) -> Progress | None:
    """Return a progress function that adds the side's name to the phase."""

    def report(what: str, done: int, total: int) -> None:
        assert progress is not None
        progress(f"{what} ({where})", done, total)

    return report if progress is not None else None
