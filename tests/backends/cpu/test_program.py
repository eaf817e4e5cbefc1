"""CPU programs: every operation becomes kernel calls, with a barrier between calls whose memory accesses conflict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localllm.backends.allocation import Buffer
from localllm.backends.base import BackendError, Limits
from localllm.backends.cpu.arguments import Rows, RowsOrNone
from localllm.backends.cpu.bind import program
from localllm.backends.cpu.emit import EMITTERS
from localllm.backends.cpu.isa import host
from localllm.backends.cpu.kernels import experts, rowwise
from localllm.backends.cpu.places import (
    BufferOf,
    CountOf,
    ListOf,
    ScratchOf,
    VectorOf,
    output_to,
    rows_in,
)  # fmt: skip
from localllm.backends.cpu.program import Domain, KernelCall, place_barriers
from localllm.backends.stages import Stage
from localllm.plan import Operation, Recorder, Weight
from tests.models.support import EVERY_OPERATION, MemoryWeight

A, B, C, D, E = (Buffer(number, "batch", 64) for number in range(5))


def call(x: Buffer, y: Buffer, domain: Domain = "tasks") -> KernelCall:
    """Return a call that reads x and writes y."""
    arguments = rowwise.MapArguments(x=rows_in(x), y=output_to(y), width=16, rows=CountOf("batch"))
    return KernelCall("apply_silu", arguments, domain, "silu")


def barriers(*calls: KernelCall, stages: tuple[slice, ...] = ()) -> list[bool]:
    place_barriers(list(calls), [Stage(work) for work in stages])
    return [call.barrier for call in calls]


@pytest.mark.parametrize(
    ("first", "second", "needed"),
    [
        ((A, B), (B, C), True),  # the second call reads the output of the first
        ((A, B), (C, B), True),  # the second call overwrites the output of the first
        ((A, B), (C, A), True),  # the second call overwrites the input of the first
        ((A, B), (A, C), False),  # both calls read the same input
        ((A, B), (C, D), False),
    ],
)
def test_calls_that_touch_the_same_memory_are_kept_apart(
    first: tuple[Buffer, Buffer], second: tuple[Buffer, Buffer], needed: bool
) -> None:
    assert barriers(call(*first), call(*second)) == [needed, False]


@pytest.mark.parametrize(
    ("domains", "needed"),
    [
        (("batch", "batch"), False),
        (("logits", "logits"), False),
        (("batch", "logits"), True),
        (("batch", "tasks"), True),
        (("tasks", "tasks"), True),
        (("select", "select"), True),
    ],
)
def test_threads_that_have_the_same_rows_in_both_calls_need_no_barrier(
    domains: tuple[Domain, Domain], needed: bool
) -> None:
    assert barriers(call(A, B, domains[0]), call(B, C, domains[1])) == [needed, False]


def test_a_barrier_settles_everything_before_it() -> None:
    assert barriers(call(A, B), call(C, D), call(B, A), call(A, C), call(D, B)) == [False, True, True, False, False]


def test_the_last_call_of_a_stage_has_a_barrier() -> None:
    stages = slice(0, 1), slice(1, 1), slice(1, 3)
    assert barriers(call(A, B), call(C, D), call(A, E), stages=stages) == [True, False, True]


def test_what_a_call_reads_and_writes_follows_from_its_arguments() -> None:
    """The reads and writes of a call leave out weights and counts, which never change during a step, and scratch
    memory, which each thread has for itself. A list counts as one memory.
    """
    bias = VectorOf(Weight.of(MemoryWeight.of("bias", np.zeros(16))), 16)
    choices, chosen = ListOf(1, 64), ListOf(2, 64, offset=8)
    arguments = experts.RouteArguments(
        logits=rows_in(A), choices=choices, weights=chosen, experts=16, scale=1.0, bias=bias, rows=CountOf("batch"),
        scratch=Rows(address=ScratchOf("attention"), stride=64), groups=1, groups_used=1,
        given=RowsOrNone(address=0, stride=0),
    )  # fmt: skip
    made = KernelCall("route", arguments, "batch", "route")
    assert (made.reads, made.writes) == ({BufferOf(A)}, {choices, ListOf(2, 64)})


def test_every_operation_that_is_recorded_has_an_emitter() -> None:
    assert EMITTERS.keys() >= EVERY_OPERATION


def test_an_operation_without_an_emitter_is_refused_with_its_name() -> None:
    class Convolution(Operation):
        pass

    r = Recorder()
    plan = r.finish(r.embed(MemoryWeight.of("table", np.zeros((2, 32)))))
    plan = replace(plan, operations=(*plan.operations, Convolution()))
    with pytest.raises(BackendError, match='no kernels for convolution yet; backend="reference"'):
        program(plan, Limits(1, 1, 1, 64), 1, host())
