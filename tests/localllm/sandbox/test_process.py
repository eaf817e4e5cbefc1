"""The confined child process: resource limits, the error that the caller gets when they are exceeded, and the
end of the child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.sandbox import BLOB, Confined, ConfinedCrash, ConfinedError, ConfinedLimit, ResourceLimits
from tests.processes import gone

TASK = "tests.localllm.sandbox.tasks"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def child() -> Iterator[Confined]:
    with Confined(TASK, ResourceLimits(seconds=0.3, wall=5, memory=64 << 20, answer=1 << 20)) as confined:
        yield confined


def test_one_child_answers_every_call(child: Confined) -> None:
    first = child.call({"do": "pid"})["pid"]
    assert first != os.getpid()
    assert [child.call({"do": "echo", "n": n})["n"] for n in range(3)] == [0, 1, 2]
    assert child.call({"do": "pid"})["pid"] == first


def test_raw_data_goes_both_ways(child: Confined) -> None:
    """Data of any size and any bytes, without a copy in the JSON."""
    for data in (b"", b"\0\n{}\xff", bytes(range(256)) * 3000):
        answer = child.call({"do": "reverse", "n": [1], BLOB: data})
        assert (answer["n"], bytes(answer.get(BLOB, b""))) == ([1], data[::-1])
    with pytest.raises(ConfinedLimit, match="exceeds 1 MB"):
        child.call({"do": "reverse", BLOB: bytes(2 << 20)})
    assert child.call({"do": "echo", "n": 7}) == {"n": 7}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"do": "spin"}, r"^it takes more than 0\.3 s$"),
        ({"do": "fill", "n": 256 << 20}, "needs more than 64 MB of memory"),
        ({"do": "say", "n": 2 << 20}, "exceeds 1 MB"),
    ],
)
def test_limits_are_errors_and_the_next_call_works(child: Confined, request_: dict[str, object], message: str) -> None:
    with pytest.raises(ConfinedLimit, match=message):
        child.call(request_)
    assert child.call({"do": "echo", "n": 7}) == {"n": 7}


def test_a_child_that_waits_is_ended_too() -> None:
    with Confined(TASK, ResourceLimits(wall=0.5)) as confined:
        with pytest.raises(ConfinedLimit, match=r"takes more than 0\.5 s on the clock"):
            confined.call({"do": "sleep", "n": 60})
        assert confined.call({"do": "echo", "n": 7}) == {"n": 7}


def test_limits_are_for_each_call(child: Confined) -> None:
    """Time and memory limits apply to each call. Forty calls together exceed both limits, but no single call does."""
    start = time.process_time()
    for _ in range(40):
        assert child.call({"do": "fill", "n": 32 << 20})["n"] == 32 << 20
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"do": "die", "n": signal.SIGSEGV}, f"crashes its process .signal {int(signal.SIGSEGV)}"),
        ({"do": "leave", "n": 3}, "ends without an answer .exit code 3"),
        ({"do": "raise"}, "ends without an answer .exit code 1"),
    ],
)
def test_a_death_of_the_child_is_an_error(child: Confined, request_: dict[str, object], message: str) -> None:
    with pytest.raises(ConfinedCrash, match=message):
        child.call(request_)
    assert child.call({"do": "echo", "n": 7}) == {"n": 7}


@pytest.mark.parametrize("do", ["open", "write", "connect"])
def test_the_child_opens_nothing(child: Confined, do: str) -> None:
    assert child.call({"do": do})["problem"] in ("OSError", "PermissionError")


def test_what_the_child_prints_is_not_taken_for_an_answer(child: Confined) -> None:
    assert child.call({"do": "print"}) == {}


def test_an_unknown_task_is_an_error() -> None:
    with Confined("tests.localllm.no_such_task") as confined, pytest.raises(ConfinedError, match="exit code 1"):
        confined.call({})


def test_threads_take_turns(child: Confined) -> None:
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: got.append(child.call({"do": "echo", "n": n})["n"])) for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(20))


def test_ctrl_c_within_a_call_leaves_no_old_answer_behind() -> None:
    with Confined(TASK) as confined:
        confined.call({"do": "echo"})
        alarm = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            alarm.start()
            with pytest.raises(KeyboardInterrupt):
                confined.call({"do": "sleep", "n": 5})
        finally:
            signal.signal(signal.SIGINT, before)
        assert confined.call({"do": "echo", "n": 1}) == {"n": 1}


@pytest.mark.parametrize("busy", [False, True])
def test_the_child_ends_with_its_parent(busy: bool) -> None:
    """The child exits after its parent is killed: an idle child reads end-of-file, and a busy one reaches its time
    limit.
    """
    do = "threading.Thread(target=lambda: c.call({'do': 'spin'})).start(); " if busy else ""
    code = (
        "import threading, time; from localllm.sandbox import BLOB, Confined, ResourceLimits; "
        f"c = Confined('{TASK}', ResourceLimits(1)); "
        f"print(c.call({{'do': 'pid'}})['pid'], flush=True); {do}time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    if not gone(pid):
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the child outlived its parent by 10 s")
