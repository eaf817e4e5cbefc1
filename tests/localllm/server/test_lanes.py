"""Lanes for background work: accounts alternate, jobs of disconnected callers are dropped, and large jobs do not delay
small ones.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from localllm.server import lanes
from localllm.server.accounts import ACCOUNT
from localllm.server.lanes import LARGE, Lane, is_large

WAIT = 20  # seconds after which a test counts as hanging


async def as_account(account: str, lane: Lane, job: Callable[[], Any]) -> Any:
    ACCOUNT.set(account)
    return await lane.run(job)


def test_another_accounts_job_comes_after_one_of_the_busy_one() -> None:
    done: list[str] = []
    free = threading.Event()

    def job(name: str) -> Callable[[], None]:
        def work() -> None:
            assert free.wait(WAIT)
            done.append(name)

        return work

    async def main() -> None:
        lane = Lane("test")
        tasks = [asyncio.create_task(as_account("a", lane, job(f"a{number}"))) for number in range(5)]
        await asyncio.sleep(0.05)  # now the first job runs
        tasks += [asyncio.create_task(as_account("b", lane, job(f"b{number}"))) for number in range(2)]
        await asyncio.sleep(0.05)
        free.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert done[:2] == ["a0", "b0"]
    assert [name for name in done if name[0] == "a"] == [f"a{number}" for number in range(5)]


def test_an_account_that_waits_keeps_its_used_time_when_many_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    free = threading.Event()
    clock = [0.0]
    monkeypatch.setattr(lanes, "MOST_ACCOUNTS", 2)
    monkeypatch.setattr(lanes, "monotonic", lambda: clock[0])

    def job(name: str) -> Callable[[], None]:
        def work() -> None:
            assert free.wait(WAIT)
            clock[0] += 1.0
            done.append(name)

        return work

    async def main() -> None:
        lane = Lane("test")
        tasks = []
        for name in ("a0", "a1", "a2", "b0", "c0"):
            tasks.append(asyncio.create_task(as_account(name[0], lane, job(name))))
            await asyncio.sleep(0.05)
        free.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert done == ["a0", "b0", "c0", "a1", "a2"]


def test_results_and_errors_come_back() -> None:
    async def main() -> None:
        lane = Lane("test")
        assert await lane.run(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await lane.run(lambda: 1 // 0)
        assert await lane.run(lambda: threading.current_thread().name) == "test"
        lane.close()
        with pytest.raises(RuntimeError):
            await lane.run(lambda: 5)

    asyncio.run(main())


def test_a_caller_that_is_gone_has_its_waiting_job_dropped_and_its_running_one_stopped() -> None:
    began, stopped, ran, told = threading.Event(), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        stopped.wait(WAIT)

    async def main() -> None:
        lane = Lane("test")
        first = asyncio.create_task(lane.run(work, stopped.set))
        second = asyncio.create_task(lane.run(ran.set, told.set))
        await asyncio.to_thread(began.wait, WAIT)
        second.cancel()
        await asyncio.sleep(0)
        assert told.is_set()  # the worker may have started the job just before
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert stopped.is_set()
        assert await lane.run(lambda: 5) == 5

    asyncio.run(main())
    assert not ran.is_set()


def test_closing_waits_for_the_running_job_and_drops_the_others() -> None:
    free, began, ran = threading.Event(), threading.Event(), threading.Event()

    async def main() -> None:
        lane = Lane("test")

        def work() -> None:
            began.set()
            free.wait(WAIT)

        first, second = asyncio.create_task(lane.run(work)), asyncio.create_task(lane.run(ran.set))
        await asyncio.to_thread(began.wait, WAIT)
        closing = asyncio.create_task(asyncio.to_thread(lane.close))
        await asyncio.sleep(0.05)
        assert not closing.done()
        free.set()
        await closing
        await first
        with pytest.raises(asyncio.CancelledError):
            await second

    asyncio.run(main())
    assert not ran.is_set()


@pytest.mark.parametrize(
    ("value", "large"),
    [
        ("a" * (LARGE - 10), False),
        ("a" * LARGE, True),
        (["a" * 100] * (LARGE // 100), True),
        ([{"role": "user", "content": "a"}] * 10, False),
        ([{"role": "user", "content": "a"}] * LARGE, True),
        ({"a" * LARGE: 1}, True),
        ([1] * LARGE, False),
        ([1] * (17 * LARGE), True),
        ([1, "a" * LARGE], True),
        ({"a": [{"b": ["c" * LARGE]}]}, True),
        (None, False),
    ],
)  # fmt: skip
def test_sizes(value: Any, large: bool) -> None:
    assert is_large(value) is large
    assert is_large("x", value, 1) is large
