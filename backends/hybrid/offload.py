"""Decides which layers go to a GPU: the requested number, or the largest number that fits into its free memory.

`gpu_layers=N` counts as in llama.cpp: it offloads the last N layers, and the output counts as one more layer.
Offloading all of them includes the embeddings. A request that does not fit fails here, before any weight is read, and
the error suggests settings that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localllm.backends import open_backend
from localllm.backends.base import (
    Backend,
    BackendError,
    CacheTypes,
    DeviceBackend,
    Executable,
    Limits,
    Memory,
    WrongResults,
)
from localllm.backends.hybrid.backend import HybridBackend
from localllm.backends.hybrid.cut import Placement, cut_plan, most_layers, whole
from localllm.backends.hybrid.executable import HybridExecutable
from localllm.base.notices import Notice, Setting, Together
from localllm.plan import Plan

RESERVE, SHARE = 1 << 30, 20  # bytes to leave free: RESERVE, or 1/SHARE of the free memory if that is smaller
SMALLEST_CONTEXT = 256  # smallest context in tokens that is worth proposing
SMALLER_TYPE = "q8_0"  # cache type to propose

LimitsAt = Callable[[int], Limits]  # maps a context size to limits


class DoesNotFit(BackendError):
    """Raised if a request needs more memory than the device has free."""


@dataclass(frozen=True, slots=True)
class Offload:
    """The offload request: layers on the GPU, the number of first layers whose experts stay on the CPU, and the GPU."""

    gpu_layers: int | str = "auto"  # a number of layers, "auto" or "all"
    n_cpu_moe: int = 0
    device: str = ""

    @property
    def asked(self) -> Together:
        """Return the options in use that require a GPU."""
        named = (Setting("gpu_layers", self.gpu_layers), Setting("n_cpu_moe", self.n_cpu_moe))
        return Together(setting for setting in named if setting.value not in ("auto", 0))

    def check(self, backend: str) -> None:
        """Raise BackendError if the named backend has no GPUs."""
        if self.asked and backend in ("cpu", "reference"):
            raise BackendError(Notice(self.asked, f": the {backend} backend has no GPU; omit one of the two"))


@dataclass(frozen=True, slots=True)
class Planner:
    """A plan and a GPU, before any weight is loaded."""

    gpu: DeviceBackend
    name: str  # the GPU's name
    plan: Plan
    limits_at: LimitsAt
    context: int
    cache: CacheTypes

    def needs(self, placement: Placement, context: int = 0, cache: CacheTypes | None = None) -> Memory | None:
        """Return the memory that the GPU's part of a placement needs, or None if no layer runs on the GPU."""
        own = cut_plan(self.plan, placement).plans.get("gpu")
        if own is None:
            return None
        return self.gpu.plan_memory(own, self.limits_at(context or self.context), cache or self.cache)

    def fits(self, placement: Placement, context: int = 0, cache: CacheTypes | None = None) -> bool:
        needed = self.needs(placement, context, cache)
        return needed is None or _total(needed) <= self.room

    @property
    def room(self) -> int:
        free = self.gpu.free_memory()
        return free - min(RESERVE, free // SHARE)

    def place(self, offload: Offload) -> Placement:
        """Place every layer. Raises DoesNotFit if more layers were requested than fit."""
        most = most_layers(self.plan)
        if offload.gpu_layers == "auto":
            return Placement(self.most_that_fit(offload.n_cpu_moe), offload.n_cpu_moe)
        layers = offload.gpu_layers if isinstance(offload.gpu_layers, int) else most
        wanted = Placement(min(layers, most), offload.n_cpu_moe)
        if not self.fits(wanted):
            raise DoesNotFit(self._refusal(wanted))
        return wanted

    def undivided(self, offload: Offload) -> bool:
        """Return whether the whole plan goes to the GPU, or none of it."""
        try:
            placement = self.place(offload)
        except DoesNotFit:
            return False
        return whole(self.plan, placement) or offload.gpu_layers == 0

    def most_that_fit(self, host_experts: int) -> int:
        return _largest(0, most_layers(self.plan), lambda layers: self.fits(Placement(layers, host_experts)))

    def _refusal(self, wanted: Placement) -> Notice:
        needed = self.needs(wanted)
        assert needed is not None, "no layers always fit"
        counts = (
            f"{self.name}: {wanted.layers} of {most_layers(self.plan)} layers need {_size(_total(needed))} "
            f"({_parts(needed)}), {_size(self.gpu.free_memory())} are free, {_size(max(self.room, 0))} of them "
            "usable; "
        )
        proposals = list(self._proposals(wanted))
        if not proposals:
            return Notice(counts, "no layer fits: use ", Setting("backend", "cpu"))
        others = (part for proposal in proposals[1:] for part in (", or ", proposal))
        return Notice(counts, "these settings fit: ", proposals[0], *others)

    def _proposals(self, wanted: Placement) -> Iterator[Together]:
        """Yield alternative changes to the request. Each change alone makes the request fit."""
        if layers := self.most_that_fit(wanted.host_experts):
            yield Together([Setting("gpu_layers", layers)])
        count = most_layers(self.plan) - 1
        if self.fits(Placement(wanted.layers, count)):
            fewest = -_largest(-count, 0, lambda n: self.fits(Placement(wanted.layers, -n)))
            yield Together([Setting("n_cpu_moe", fewest)])
        steps = self.context // SMALLEST_CONTEXT
        context = SMALLEST_CONTEXT * _largest(0, steps, lambda n: not n or self.fits(wanted, n * SMALLEST_CONTEXT))
        if context:
            yield Together([Setting("ctx_size", context)])
        try:
            if self.fits(wanted, cache=CacheTypes(SMALLER_TYPE, SMALLER_TYPE)):
                yield Together(CacheTypes(SMALLER_TYPE, SMALLER_TYPE).settings)
        except BackendError:  # the GPU does not support this cache type
            return


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `high` that fits.

    `low` must fit, and smaller numbers must fit if larger ones do.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _total(memory: Memory) -> int:
    return memory.weights + memory.cache + memory.scratch


def _parts(memory: Memory) -> str:
    return f"weights {_size(memory.weights)}, cache {_size(memory.cache)}, activations {_size(memory.scratch)}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A backend to bind a plan to, and the text to print about the placement."""

    backend: Backend
    gpu: str = ""  # name of the GPU, or ""
    placed: str = ""  # describes the layers on the GPU
    note: str = ""

    def line(self, executable: Executable) -> str:
        """Return a line on the placement if a GPU is used or was requested, otherwise ""."""
        if not self.gpu:
            return self.note
        if not isinstance(executable, HybridExecutable):
            return f"{self.gpu}: {self.placed}, {_parts(executable.memory)}"
        card, host = executable.sides["gpu"], executable.sides["host"]
        return f"{self.gpu}: {self.placed}, {_parts(card)}; the rest on the CPU: {_parts(host)}"


def bind(
    arranged: Arrangement, bound: Callable[[Backend], Executable], instead: bool, threads: int | None
) -> tuple[Arrangement, Executable]:
    """Bind a plan with `bound`. If the GPU fails its check and `instead` is set, bind to the CPU and add a note.

    Closes the backend if it cannot be bound.
    """
    try:
        return arranged, bound(arranged.backend)
    except WrongResults as error:
        arranged.backend.close()
        if not (instead and arranged.gpu):
            raise
        reason = error.reason
    except BaseException:
        arranged.backend.close()
        raise
    host = open_backend("cpu", threads)
    note = Notice(f"{reason}; everything runs on {host.describe()}; localllm doctor ", Setting("gpu"), " shows more")
    return bind(Arrangement(host, note=note), bound, False, threads)


def arrange(
    opened: Backend, offload: Offload, planner: Callable[[DeviceBackend, str], Planner], threads: int | None
) -> Arrangement:
    """Combine a GPU and the CPU as requested. Takes ownership of `opened`, and closes it if it is not used.

    Raises BackendError if the request is impossible.
    """
    if not isinstance(opened, DeviceBackend):
        why = f"no graphics card is used ({opened.describe()}); localllm devices lists the devices"
        return Arrangement(opened, note=Notice(offload.asked, f": {why}") if offload.asked else "")
    try:
        plan = planner(opened, opened.describe())
        placement = plan.place(offload)
        where = cut_plan(plan.plan, placement).plans
        host = open_backend("cpu", threads) if "host" in where else None
    except BaseException:
        opened.close()
        raise
    most = most_layers(plan.plan)
    placed = f"{placement.layers} of {most} layers"
    if placement.host_experts:
        placed += f" except the experts of the first {min(placement.host_experts, most - 1)}"
    if host is None:
        return Arrangement(opened, plan.name, placed)
    if "gpu" in where:
        return Arrangement(HybridBackend(opened, host, placement), plan.name, placed)
    none_fits = f"no layer fits into the usable {_size(max(plan.room, 0))}"
    why = Notice(Setting("gpu_layers", 0)) if offload.gpu_layers == 0 else none_fits
    if plan.plan.encodes and offload.gpu_layers != 0:
        why = (
            f"a model with an encoder runs on one device and cannot be split ({placement.layers} of {most} layers "
            "requested)"
        )
    opened.close()
    return Arrangement(host, note=Notice(f"{plan.name}: ", why, f"; everything runs on {host.describe()}"))
