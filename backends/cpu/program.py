"""A plan on the CPU: kernel calls in order, the readers of every value, fusions, and barriers between threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.backends.cpu.buffers import Buffer, Buffers
from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.kernels.attention import Shape
from localllm.backends.stages import Stage
from localllm.plan import Rope

Domain = Literal["batch", "logits", "tasks", "select"]
# A number, an address name, an address name with an offset in bytes, a buffer, or a table made at the end.
Slot = int | float | str | Buffer | tuple[str, int] | tuple[Literal["rope"], Rope] | tuple[Literal["work"], Shape, int]
Resource = int | str  # a buffer's number, or a name such as "cache.3"


@dataclass(slots=True)
class Call:
    """One kernel call of the plan. Slots hold numbers, buffers, or names of addresses that are known at the end."""

    kernel: str
    size: int
    slots: dict[int, Slot]
    domain: Domain
    reads: set[Resource]
    writes: set[Resource]
    label: str
    barrier: bool = False


@dataclass(slots=True)
class Program:
    """Everything that binding decides before it allocates memory."""

    calls: list[Call]
    buffers: Buffers
    kernels: dict[str, Kernel]
    logits: Buffer | None  # None if another place of a split plan makes them
    lists: dict[str, int]  # address name -> bytes, for memory that belongs to one call
    kept: dict[int, Buffer]  # value -> rows that are used for nothing else
    routings: dict[int, tuple[str, Buffer]]  # kept result of experts -> (address name of the choices, hidden rows)
    stages: list[Stage[Buffer]]


def place_barriers(calls: list[Call], stages: list[Stage[Buffer]]) -> None:
    """Place a barrier before a call that touches what another thread may still read or write, and after a stage."""
    since: list[Call] = []
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
