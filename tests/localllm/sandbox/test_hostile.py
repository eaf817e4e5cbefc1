"""Exploited code in the confined child: what the sandbox refuses, and how the parent handles hostile replies."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.sandbox import Confined, ConfinedCrash, ConfinedError, ConfinedLimit, ConfinedStopped, ResourceLimits
from tests.localllm.sandbox.attacks import ATTACKS

TASK = "tests.localllm.sandbox.attacks"


@pytest.fixture(scope="module")
def child() -> Iterator[Confined]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        with Confined(TASK, ResourceLimits(seconds=5, wall=20)) as confined:
            confined.start()
            yield confined


@pytest.fixture
def fenced(child: Confined) -> Confined:
    if "seccomp" not in child.rights():
        pytest.skip("this kernel or processor has no seccomp filter")
    return child


@pytest.mark.parametrize("attack", ATTACKS)
def test_escaped_code_is_refused(fenced: Confined, tmp_path: Path, attack: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    mode = victim.stat().st_mode
    assert "refused" in fenced.call({"attack": attack, "folder": str(tmp_path)})
    assert os.listdir(tmp_path) == ["victim"]
    assert victim.read_text() == "untouched"
    assert victim.stat().st_mode == mode


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")
def test_linux_confines_with_what_its_kernel_has(child: Confined) -> None:
    rights = child.rights()
    listed = Path("/proc/sys/kernel/seccomp/actions_avail")
    assert ("seccomp" in rights) == (listed.is_file() and "errno" in listed.read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="the environment of a process is read from /proc")
def test_the_child_sees_no_secrets(child: Confined) -> None:
    variables = child.call({"attack": "environment", "folder": "/"})["done"]
    assert "hf_secret" not in variables
    assert "HOME" not in variables
    assert "PATH'" not in variables.replace("LIBRARY_PATH'", "")


# -- replies ----------------------------------------------------------------------------------------------------------

BLOCKED = ("trickle", "closed", "stopped")  # replies that block until the time limit


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ("junk", ConfinedCrash, "invalid JSON"),
        ("deep", ConfinedLimit, "more than"),
        ("deep object", ConfinedLimit, "more than 64 levels deep"),
        ("list", ConfinedCrash, "invalid reply"),
        ("text", ConfinedCrash, "invalid reply"),
        ("empty object", ConfinedCrash, "invalid reply"),
        ("an answer that is a list", ConfinedCrash, "invalid reply"),
        ("digits", ConfinedCrash, "invalid JSON"),
        ("not UTF-8", ConfinedCrash, "invalid JSON"),
        ("raw data without an answer", ConfinedCrash, "invalid reply"),
        ("negative raw data", ConfinedCrash, "invalid reply"),
        ("raw data of a text", ConfinedCrash, "invalid reply"),
        ("raw data of true", ConfinedCrash, "invalid reply"),
        ("huge raw data", ConfinedLimit, "exceeds 64 MB"),
        ("missing raw data", ConfinedCrash, "exit code 0"),
        ("many lists", ConfinedLimit, "more than 262144 values"),
        ("many texts", ConfinedLimit, "more than 262144 values"),
        ("many quotes", ConfinedCrash, "invalid JSON"),
        ("huge", ConfinedLimit, "exceeds 64 MB"),
        ("short", ConfinedCrash, "exit code 0"),
        ("unnumbered", ConfinedCrash, "unexpected message"),
        ("trickle", ConfinedLimit, "on the clock"),
        ("closed", ConfinedLimit, "on the clock"),
        ("stopped", ConfinedLimit, "on the clock"),
    ],
)
def test_a_hostile_reply_is_one_error(reply: str, error: type[ConfinedError], message: str) -> None:
    with Confined(TASK) as confined:
        confined.rights()  # waits until the child has started
        with pytest.raises(error, match=message):
            confined.call({"reply": reply}, ResourceLimits(wall=1 if reply in BLOCKED else 30, values=1 << 18))
        assert confined.call({"attack": "nothing", "folder": "/"}) == {"done": "None"}


def test_an_extra_message_is_never_the_answer_of_the_next_call() -> None:
    with Confined(TASK) as confined:
        assert confined.call({"reply": "extra", "attack": "nothing", "folder": "/"}) == {}
        with pytest.raises(ConfinedCrash, match="unexpected message"):
            confined.call({"attack": "nothing", "folder": "/"})
        assert confined.call({"attack": "nothing", "folder": "/"}) == {"done": "None"}


def test_a_long_text_with_marks_in_it_counts_as_one_value() -> None:
    """Limits on values count a string as one value, even if it is full of brackets and quotes."""
    with Confined("tests.localllm.sandbox.tasks", ResourceLimits(values=100)) as confined:
        text = '[{,"\\]}\\\\"' * 10_000
        assert confined.call({"do": "echo", "n": text}) == {"n": text}


# -- ending a call -----------------------------------------------------------------------------------------------------


def test_limits_of_one_call() -> None:
    with Confined("tests.localllm.sandbox.tasks") as confined:
        with pytest.raises(ConfinedLimit, match=r"takes more than 0\.3 s on the clock"):
            confined.call({"do": "sleep", "n": 60}, ResourceLimits(wall=0.3))
        with pytest.raises(ConfinedLimit, match="needs more than 16 MB"):
            confined.call({"do": "fill", "n": 64 << 20}, ResourceLimits(memory=16 << 20))
        assert confined.call({"do": "fill", "n": 64 << 20}) == {"n": 64 << 20}


def test_a_call_ends_when_its_caller_cancels() -> None:
    gone = threading.Event()
    with Confined("tests.localllm.sandbox.tasks") as confined:
        confined.call({"do": "echo"})
        threading.Timer(0.1, gone.set).start()
        start = time.monotonic()
        with pytest.raises(ConfinedStopped, match="it was stopped"):
            confined.call({"do": "sleep", "n": 25}, cancel=gone)
        assert time.monotonic() - start < 20
        assert confined.call({"do": "echo", "n": 1}) == {"n": 1}


def test_closing_ends_a_call_of_another_thread() -> None:
    confined = Confined("tests.localllm.sandbox.tasks")
    confined.call({"do": "echo"})
    threading.Timer(0.1, confined.close).start()
    with pytest.raises(ConfinedStopped, match="it was stopped"):
        confined.call({"do": "sleep", "n": 25})
