"""Which layers go to a graphics card: as many as were asked for, or as fit beside what is free there.

`-ngl N` counts as llama.cpp's: the last N of the model's layers and its output, which is one more; with all of them go
the embeddings. What is asked for and does not fit fails here, before a weight is read, and what would fit is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localllm.backends import open_backend
from localllm.backends.base import Backend, BackendError, CacheTypes, Card, Executable, Limits, Memory
from localllm.backends.hybrid.backend import HybridBackend
from localllm.backends.hybrid.cut import Placement, cut, most_layers
from localllm.backends.hybrid.executable import HybridExecutable
from localllm.errors import LocalLLMError
from localllm.plan import Plan

RESERVE, SHARE = 1 << 30, 20  # bytes left free at most, and the share of the device's memory where that is less
SMALLEST_CONTEXT = 256  # tokens that are worth a proposal
SMALLER_TYPE = "q8_0"  # of the cache, for a proposal

LimitsAt = Callable[[int], Limits]  # by tokens of context


class DoesNotFit(LocalLLMError):
    """What was asked for is more than the device has free."""


@dataclass(frozen=True, slots=True)
class Offload:
    """What was asked for: layers on the card, first layers whose experts are not, and which card."""

    layers: int | str = "auto"  # or "all"
    host_experts: int = 0
    device: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.layers, str) and self.layers not in ("auto", "all"):
            raise LocalLLMError(f"-ngl {self.layers}: give a number of layers, all or auto")
        if (isinstance(self.layers, int) and self.layers < 0) or self.host_experts < 0:
            raise LocalLLMError("-ngl and -ncmoe: give numbers of layers from 0 up")

    @property
    def asked(self) -> str:
        """The options that only a card can follow; "" where there are none."""
        layers = f"-ngl {self.layers}" if self.layers not in ("auto", 0) else ""
        experts = f"-ncmoe {self.host_experts}" if self.host_experts else ""
        return " ".join(part for part in (layers, experts) if part)

    def check(self, backend: str) -> None:
        """LocalLLMError where a backend is named that has no cards."""
        if self.asked and backend in ("cpu", "reference"):
            raise LocalLLMError(f"{self.asked}: the {backend} backend has no card for it; leave one of the two out")


AUTOMATIC = Offload()


@dataclass(frozen=True, slots=True)
class Planner:
    """A plan and a card, before anything is loaded."""

    card: Card
    name: str  # of the card
    plan: Plan
    limits_at: LimitsAt
    context: int
    cache: CacheTypes

    def needs(self, placement: Placement, context: int = 0, cache: CacheTypes | None = None) -> Memory | None:
        """What the card's side of a placement takes; None where nothing is there."""
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
        """Where everything goes; DoesNotFit where more layers were asked for than fit."""
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
        """One change of what was asked for each, that makes it fit."""
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
        except BackendError:  # the card has no such cache
            return


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `high` that fits, where `low` does and what does not fit grows."""
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
    """A backend to bind a plan to, and what is to be said of it."""

    backend: Backend
    card: str = ""  # which; "": there is none
    placed: str = ""  # layers on it, in words
    note: str = ""

    def line(self, executable: Executable) -> str:
        """What runs where, where a card takes part or was asked for; else ""."""
        if not self.card:
            return self.note
        if not isinstance(executable, HybridExecutable):
            return f"{self.card}: {self.placed}, {_parts(executable.memory)}"
        card, host = executable.sides["card"], executable.sides["host"]
        return f"{self.card}: {self.placed}, {_parts(card)}; the rest on the CPU: {_parts(host)}"


def arrange(
    opened: Backend, offload: Offload, planner: Callable[[Card, str], Planner], threads: int | None
) -> Arrangement:
    """Put a card and the CPU together as was asked for. Takes `opened` over: it is closed where it is of no use.

    LocalLLMError where what was asked for cannot be.
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
