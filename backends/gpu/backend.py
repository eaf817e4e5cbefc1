"""Code that GPU backends share: chooses a device from a list, and binds plans to it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from localllm.backends.base import F16_CACHE, BackendError, CacheTypes, Limits, Memory, Progress
from localllm.backends.checks import check_cache
from localllm.backends.gpu import bind
from localllm.backends.gpu.budget import memory_of
from localllm.backends.gpu.cachetypes import CACHE
from localllm.backends.gpu.conformance.verdicts import Conformance
from localllm.backends.gpu.device import Device
from localllm.backends.gpu.executable import GpuExecutable
from localllm.backends.gpu.program import Program
from localllm.base.notices import Notice, Setting
from localllm.plan import Plan, Value


class GpuBackend:
    """A backend on one GPU.

    With `conformance` it binds a plan only if the device passes the check of the plan's kernels.
    """

    name = ""

    def __init__(self, device: Device, conformance: Conformance | None = None) -> None:
        self.device, self.conformance = device, conformance

    def describe(self) -> str:
        facts = self.device.facts
        return f"{self.name}: {facts.name} ({facts.compute}), {facts.memory / 2**30:.1f} GiB"

    def free_memory(self) -> int:
        return self.device.facts.free

    def plan_memory(self, plan: Plan, limits: Limits, cache: CacheTypes) -> Memory:
        check_cache(cache, CACHE)
        facts = self.device.facts
        return memory_of(bind.program(plan, limits, cache, (), facts.compute, facts.local_memory), plan, limits, cache)

    def bind(
        self,
        plan: Plan,
        limits: Limits,
        cache: CacheTypes = F16_CACHE,
        progress: Progress | None = None,
        keep: Collection[Value] = (),
    ) -> GpuExecutable:

        def check(program: Program) -> None:
            if self.conformance is not None:
                self.conformance.require(self.device, plan, limits, cache, keep, program, progress)

        return GpuExecutable(self.device, plan, limits, cache, progress, keep, check)

    def close(self) -> None:
        self.device.close()


def pick(backend: str, names: Sequence[str], asked: str | int) -> int:
    """Return the index of the requested device in `names`: by number, in the form `cuda0`, or by part of its name.

    "" selects the first device. If no device or several devices match, BackendError lists the devices.
    """
    text = str(asked)
    number = re.fullmatch(rf"(?:{backend})?:?\s*(\d+)", text, re.IGNORECASE)
    if not text:
        found = list(range(len(names)))[:1]
    elif number:
        found = [int(number[1])] if int(number[1]) < len(names) else []
    else:
        found = [i for i, name in enumerate(names) if text.casefold() in name.casefold()]
    if len(found) != 1:
        there = "; ".join(f"{backend}{i} is {name}" for i, name in enumerate(names))
        which = f"{len(found)} devices of {backend} match" if found else f"{backend} has no such device"
        raise BackendError(Notice(Setting("device", text), f": {which}; {there}"))
    return found[0]
