"""A plan on the CPU: kernel calls in order, with a barrier before a thread reads or writes another thread's data."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from localllm.backends.allocation import Buffer
from localllm.backends.cpu.arguments import Place, Struct
from localllm.backends.cpu.buffers import Buffers
from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.places import ListOf, Scratch, Shared
from localllm.backends.cpu.weights import RepackedWeight
from localllm.backends.stages import Stage
from localllm.plan import Operation

# How threads divide the work of a kernel: by batch rows or logit rows, by tasks, or by rows while they read other
# threads' rows ("select").
Domain = Literal["batch", "logits", "tasks", "select"]


@dataclass(slots=True)
class KernelCall:
    """One kernel call."""

    kernel: str
    arguments: Struct
    domain: Domain
    label: str
    products: int = 0  # multiplications of a task per row, if the kernel is a product whose rows can be divided
    barrier: bool = False
    reads: set[Shared] = field(default_factory=set)
    writes: set[Shared] = field(default_factory=set)

    def __post_init__(self) -> None:
        for place, written in self.arguments.places:
            if isinstance(place, Shared):
                (self.writes if written else self.reads).add(place.memory)


@dataclass(frozen=True)
class Program:
    """The result of binding before memory is allocated."""

    calls: list[KernelCall]
    operations: list[Operation]  # the operation of each call
    kernels: dict[str, Kernel]
    panels: dict[str, RepackedWeight]  # every matrix by name, still without an address
    scratch: dict[Scratch, int]  # bytes per thread
    buffers: Buffers
    logits: Buffer | None  # None if another device of a split plan computes the logits
    kept: dict[int, Buffer]  # value -> buffer that is never reused
    routings: dict[int, tuple[ListOf, Buffer]]  # kept output of experts -> (choices, hidden states)
    stages: list[Stage[Buffer]]

    @cached_property
    def places(self) -> dict[Place, None]:
        """Return the places that the calls use, in order of first use."""
        return {place: None for call in self.calls for place, _ in call.arguments.places}


def place_barriers(calls: list[KernelCall], stages: list[Stage[Buffer]]) -> None:
    """Place a barrier before each call that touches memory that other threads may still use, and after each stage."""
    since: list[KernelCall] = []
    for number, call in enumerate(calls):
        for earlier in since:
            same_share = earlier.domain == call.domain and call.domain in ("batch", "logits")
            touched = earlier.writes & (call.reads | call.writes) or earlier.reads & call.writes
            if touched and not same_share:
                calls[number - 1].barrier = True
                since = []
                break
        since.append(call)
    for stage in stages:
        for call in calls[stage.work][-1:]:
            call.barrier = True
