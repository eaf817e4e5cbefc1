"""Decides which layers go to a GPU: as many as requested, or as many as fit its free memory.

`-ngl N` counts as in llama.cpp: the last N layers, the output being one more; all of them include the embeddings. A
request that does not fit fails here, before any weight is read, and the error says what would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localllm.backends import open_backend
from localllm.backends.base import Backend, BackendError, CacheTypes, Card, Executable, Limits, Memory
from localllm.backends.hybrid.backend import HybridBackend
from localllm.backends.hybrid.cut import Placement, cut, most_layers
from localllm.backends.hybrid.executable import HybridExecutable
from localllm.plan import Plan

RESERVE, SHARE = 1 << 30, 20  # bytes to leave free at most, and the share of the device's memory if that is less
SMALLEST_CONTEXT = 256  # tokens; the smallest context worth proposing
SMALLER_TYPE = "q8_0"  # the cache type to propose

LimitsAt = Callable[[int], Limits]  # by context size


class DoesNotFit(BackendError):
    """The request needs more memory than the device has free."""


@dataclass(frozen=True, slots=True)
class Offload:
    """The request: layers on the GPU, first layers whose experts stay on the CPU, and which GPU."""

    layers: int | str = "auto"  # or "all"
    host_experts: int = 0
    device: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.layers, str) and self.layers not in ("auto", "all"):
            raise BackendError(f"-ngl {self.layers}: give a number of layers, all or auto")
        if (isinstance(self.layers, int) and self.layers < 0) or self.host_experts < 0:
            raise BackendError("-ngl and -ncmoe: give numbers of layers of at least 0")

    @property
    def asked(self) -> str:
        """Return the options that require a GPU; "" if there are none."""
        layers = f"-ngl {self.layers}" if self.layers not in ("auto", 0) else ""
        experts = f"-ncmoe {self.host_experts}" if self.host_experts else ""
        return " ".join(part for part in (layers, experts) if part)

    def check(self, backend: str) -> None:
        """BackendError if the named backend has no GPUs."""
        if self.asked and backend in ("cpu", "reference"):
            raise BackendError(f"{self.asked}: the {backend} backend has no GPU; omit one of the two")


AUTOMATIC = Offload()


@dataclass(frozen=True, slots=True)
class Planner:
    """A plan and a GPU, before anything is loaded."""

    card: Card
    name: str  # on the GPU
    plan: Plan
    limits_at: LimitsAt
    context: int
    cache: CacheTypes

    def needs(self, placement: Placement, context: int = 0, cache: CacheTypes | None = None) -> Memory | None:
        """Return the memory that the GPU's part of a placement needs; None if the GPU has no part."""
        own = cut(self.plan, placement).plans.get("card")
        if own is None:
            return None
        return self.card.plan_memory(own, self.limits_at(context or self.context), cache or self.cache)

    def fits(self, placement: Placement, context: int = 0, cache: CacheTypes | None = None) -> bool:
        needed = self.needs(placement, context, cache)
        return needed is None or _total(needed) <= self.room

    @property
    def room(self) -> int:
        free = self.card.free_memory()
        return free - min(RESERVE, free // SHARE)

    def place(self, offload: Offload) -> Placement:
        """Place every layer; DoesNotFit if more layers were requested than fit."""
        most = most_layers(self.plan)
        if offload.layers == "auto":
            return Placement(self.most_that_fit(offload.host_experts), offload.host_experts)
        layers = offload.layers if isinstance(offload.layers, int) else most
        wanted = Placement(min(layers, most), offload.host_experts)
        if not self.fits(wanted):
            raise DoesNotFit(self._refusal(wanted))
        return wanted

    def most_that_fit(self, host_experts: int) -> int:
        return _largest(0, most_layers(self.plan), lambda layers: self.fits(Placement(layers, host_experts)))

    def _refusal(self, wanted: Placement) -> str:
        needed = self.needs(wanted)
        assert needed is not None, "nothing always fits"
        proposals = ", or ".join(self._proposals(wanted))
        return (
            f"{self.name}: {wanted.layers} of {most_layers(self.plan)} layers need {_size(_total(needed))} "
            f"({_parts(needed)}), {_size(self.card.free_memory())} are free and {_size(max(self.room, 0))} of them to "
            f"be used; {f'what fits is {proposals}' if proposals else 'nothing of it fits: use --backend cpu'}"
        )

    def _proposals(self, wanted: Placement) -> Iterator[str]:
        """Return changes to the request, each of which alone makes it fit."""
        if layers := self.most_that_fit(wanted.host_experts):
            yield f"-ngl {layers}"
        count = most_layers(self.plan) - 1
        if self.fits(Placement(wanted.layers, count)):
            fewest = -_largest(-count, 0, lambda n: self.fits(Placement(wanted.layers, -n)))
            yield f"-ncmoe {fewest}"
        steps = self.context // SMALLEST_CONTEXT
        context = SMALLEST_CONTEXT * _largest(0, steps, lambda n: not n or self.fits(wanted, n * SMALLEST_CONTEXT))
        if context:
            yield f"-c {context}"
        try:
            if self.fits(wanted, cache=CacheTypes(SMALLER_TYPE, SMALLER_TYPE)):
                yield f"-ctk {SMALLER_TYPE} -ctv {SMALLER_TYPE}"
        except BackendError:  # the GPU does not support this cache type
            return


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `high` that fits, given that `low` fits and that fitting is monotonic."""
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
    """A backend to bind a plan to, and the line to print about it."""

    backend: Backend
    card: str = ""  # which GPU; "" if none
    placed: str = ""  # the layers on it, in words
    note: str = ""

    def line(self, executable: Executable) -> str:
        """What runs where, if a GPU takes part or was requested; else ""."""
        if not self.card:
            return self.note
        if not isinstance(executable, HybridExecutable):
            return f"{self.card}: {self.placed}, {_parts(executable.memory)}"
        card, host = executable.sides["card"], executable.sides["host"]
        return f"{self.card}: {self.placed}, {_parts(card)}; the rest on the CPU: {_parts(host)}"


def arrange(
    opened: Backend, offload: Offload, planner: Callable[[Card, str], Planner], threads: int | None
) -> Arrangement:
    """Combine a GPU and the CPU as requested. Takes ownership of `opened`, and closes it if it is not used.

    BackendError if the request is impossible.
    """
    if not isinstance(opened, Card):
        why = f"no graphics card is used ({opened.describe()}); localllm devices lists what there is"
        return Arrangement(opened, note=f"{offload.asked}: {why}" if offload.asked else "")
    try:
        plan = planner(opened, opened.describe())
        placement = plan.place(offload)
        where = cut(plan.plan, placement).plans
        host = open_backend("cpu", threads) if "host" in where else None
    except BaseException:
        opened.close()
        raise
    most = most_layers(plan.plan)
    placed = f"{placement.layers} of {most} layers"
    if placement.host_experts:
        placed += f" but for the experts of the first {min(placement.host_experts, most - 1)}"
    if host is None:
        return Arrangement(opened, plan.name, placed)
    if "card" in where:
        return Arrangement(HybridBackend(opened, host, placement), plan.name, placed)
    why = "-ngl 0" if offload.layers == 0 else f"no layer fits into the {_size(max(plan.room, 0))} to be used"
    opened.close()
    return Arrangement(host, note=f"{plan.name}: {why}; all runs on {host.describe()}")
