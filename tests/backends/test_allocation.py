"""Lifetimes of values, and the buffers assigned to them, without a device."""

from __future__ import annotations

from localllm.backends.allocation import Allocator, deaths
from localllm.plan import Value

A, B, C, D = (Value(number, 32, "batch", name) for number, name in enumerate("abcd"))


def test_a_value_dies_with_the_last_step_that_reads_it() -> None:
    assert deaths([(A,), (A, B), (B, B), ()], keep=()) == [(), (A,), (B,), ()]


def test_a_kept_value_never_dies() -> None:
    assert deaths([(A, B), (A,)], keep=(A,)) == [(B,), ()]


def test_a_buffer_is_free_for_others_only_after_its_value_died() -> None:
    allocator: Allocator[str] = Allocator()
    with allocator.operation(()):
        a = allocator.make(A, "float", 64)
    with allocator.operation((A,)):
        b = allocator.make(B, "float", 64)
    with allocator.operation((B,)):
        c = allocator.make(C, "float", 64)
    assert (a, b, c) == (allocator.buffers[0], allocator.buffers[1], a)
    assert allocator.find(A, "float") is None
    assert allocator.find(C, "float") == a


def test_a_result_replaces_what_its_operation_releases() -> None:
    allocator: Allocator[str] = Allocator()
    with allocator.operation(()):
        a, b = allocator.make(A, "float", 64), allocator.make(B, "float", 64)
    with allocator.operation((A,)):
        allocator.release(A, B)  # B is read later
        assert allocator.make(C, "float", 64) == a
    assert allocator.find(B, "float") == b
    with allocator.operation((B,)):
        assert allocator.make(D, "float", 64) not in (a, b)


def test_every_form_of_a_value_is_returned() -> None:
    allocator: Allocator[str] = Allocator()
    with allocator.operation(()):
        forms = {allocator.make(A, "float", 64), allocator.make(A, "int8", 26)}
    with allocator.operation((A,)):
        pass
    assert {allocator.take("batch", 64), allocator.take("batch", 26)} == forms
    assert allocator.take("batch", 64) not in forms


def test_buffers_of_other_sizes_or_rows_are_not_shared() -> None:
    allocator: Allocator[str] = Allocator()
    first = allocator.take("batch", 64)
    allocator.give(first)
    others = [allocator.take("logits", 64), allocator.take("batch", 32), allocator.take("batch", 64, 2)]
    assert first not in others
    for buffer in others:
        allocator.give(buffer)
    assert allocator.take("batch", 64) == first
    assert allocator.take("batch", 64) not in (first, *others)
