"""A plan on the CPU: kernel calls in order, the readers of every value, fusions, and barriers between threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.backends.cpu.buffers import Buffer, Buffers
from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.kernels.attention import Shape
from localllm.plan import Rope, Value

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


@dataclass(frozen=True, slots=True)
class PartCalls:
    """The calls of a part, and the locations of values that cross its edges."""

    calls: slice
    enters: tuple[tuple[Value, Buffer], ...]
    leaves: tuple[tuple[Value, Buffer], ...]


@dataclass(slots=True)
class Program:
    """Everything that binding decides before it allocates memory."""

    calls: list[Call]
    buffers: Buffers
    kernels: dict[str, Kernel]
    logits: Buffer
    lists: dict[str, int]  # address name -> bytes, for memory that belongs to one call
    kept: dict[int, Buffer]  # value -> rows that are used for nothing else
    routings: dict[int, tuple[str, Buffer]]  # kept result of experts -> (address name of the choices, hidden rows)
    parts: list[PartCalls]


def place_barriers(calls: list[Call], parts: list[PartCalls]) -> None:
    """Place a barrier before a call that touches what another thread may still read or write, and after a part."""
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
    for part in parts:
        for call in calls[part.calls][-1:]:
            call.barrier = True
