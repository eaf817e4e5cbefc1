"""A process that stops working while it handles a message is noticed. Work and waiting for messages are not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep, thread_time

import pytest

from localllm.cluster import watchdog
from localllm.cluster.watchdog import Watchdog


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "HUNG", 0.4)


def noticed(handle: Callable[[], None], elsewhere: bool = False) -> bool:
    """Return whether a watchdog calls its function while `handle` runs, or while no message is handled."""
    called = threading.Event()
    one = Watchdog(called.set)
    if elsewhere:
        handle()
    else:
        with one.handling():
            handle()
    one.close()
    return called.is_set()


def wait(seconds: float) -> None:
    until = monotonic() + seconds
    while monotonic() < until:  # several calls: the message stays the same
        sleep(0.1)


def compute() -> None:
    """Use a second of processor time, however long that takes."""
    began = thread_time()
    while thread_time() - began < 1:
        pass


def test_a_message_that_waits_is_noticed() -> None:
    began = monotonic()
    called = threading.Event()
    one = Watchdog(called.set)
    with one.handling():
        assert called.wait(10)
    assert monotonic() - began > 0.4
    one.close()


def test_work_and_waiting_for_messages_are_not_noticed() -> None:
    assert not noticed(compute)
    assert not noticed(lambda: wait(1.0), elsewhere=True)


def test_messages_one_after_the_other_are_not_one_message() -> None:
    called = threading.Event()
    one = Watchdog(called.set)
    for _ in range(6):
        with one.handling():
            sleep(0.2)
    assert not called.is_set()
    one.close()


def test_without_proc_the_processor_time_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_others_work", lambda: False)
    assert not noticed(compute)
    assert noticed(lambda: wait(1.2))
