"""`localllm worker`: two computers (here: two nodes, with separate homes) become a cluster, and refuse strangers."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir

import pytest

from localllm.distributed.membership import LOOPBACK, PREFIX
from tests.localllm.distributed.test_stages import gone
from tests.localllm.support import REPOSITORY
from tests.localllm.support import localllm as cli

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(find_spec("ray") is None or find_spec("zmq") is None, reason="needs ray and pyzmq"),
]
RUN = ["run", "demo", "Hello", "--seed", "1", "-n", "8"]
WORKER = [sys.executable, "-m", "localllm", "worker"]  # in the local network, as users do: Ray replaces 127.0.0.1


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a user with this cache folder, without settings of this process's own cluster."""
    (home / "localllm").mkdir(mode=0o700, parents=True, exist_ok=True)
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "XDG_CACHE_HOME": str(home)
    }


def free_ports() -> int:
    """Return the number of a port that is free, like the next nine."""
    for first in range(21_000, 32_000, 100):
        try:
            for number in range(first, first + 10):
                with socket.create_server(("", number)):
                    pass
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@contextmanager
def worker(home: Path, *words: str, token: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a worker until the block ends, and yield it with its output until it was ready."""
    with subprocess.Popen(
        [*WORKER, *words], cwd=REPOSITORY, env=environment(home), text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{token}\n")
        process.stdin.close()
        said = ""
        for line in process.stdout:
            said += line
            if "localllm run" in line:
                break
        try:
            yield process, said
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def refused(home: Path, *words: str, token: str = "") -> str:
    """Run a worker that does not start, and return its only line on stderr, besides what it is about to do."""
    done = subprocess.run(
        [*WORKER, *words], cwd=REPOSITORY, env=environment(home), text=True, input=f"{token}\n", capture_output=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert len(done.stderr.splitlines()) <= 2
    return errors[0]


def ran(home: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Answer a prompt with these options."""
    words = [sys.executable, "-m", "localllm", *RUN, *more]
    return subprocess.run(
        words, cwd=REPOSITORY, env=environment(home), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def test_two_computers_in_two_commands(tmp_path: Path) -> None:
    """The other computer leaves with Ctrl-C, and then the first one is killed: it takes all of Ray with it."""
    first, second, port = tmp_path / "first", tmp_path / "second", free_ports()
    folders = set(Path(gettempdir()).glob(f"{PREFIX}*"))
    with ThreadPoolExecutor() as pool, worker(first, "--port", str(port)) as (head, said):
        joining = re.search(r"localllm worker --join (\S+)", said)
        token = re.search(r"token:\n\n    (\w+)", said)
        assert joining is not None
        assert token is not None
        host = joining[1].split(":")[0]
        assert joining[1] == f"{host}:{port}"
        assert "The token lets anyone run any program" in said
        third = tmp_path / "third"  # meanwhile, others are refused
        wrong = pool.submit(refused, third, "--join", joining[1], "--port", str(port + 200), token="wrong")
        taken = pool.submit(refused, third, "--port", str(port))
        twice = pool.submit(refused, first)
        with worker(second, "--join", joining[1], "--port", str(port + 100), token=token[1]) as (joined, answer):
            assert f"belongs to the cluster at {joining[1]}" in answer
            alone, done = cli(*RUN), ran(second, "--ray", "auto", "--stages", "2")
            assert done.returncode == 0, done.stderr
            assert alone.stdout == done.stdout
            assert f"on {host} (node 2) (cpu)" in done.stderr
            assert (second / "localllm" / "ray" / "cluster.json").exists()
        assert joined.returncode == 0
        assert not (second / "localllm" / "ray" / "cluster.json").exists()
        assert "does not accept this token" in wrong.result()
        assert f"port {port} of this computer is in use" in taken.result()
        assert "already belongs to the cluster" in twice.result()
        assert len(set(Path(gettempdir()).glob(f"{PREFIX}*")) - folders) == 2  # the folder of the first, and its log
        assert (first / "localllm" / "ray" / "token").stat().st_mode & 0o077 == 0
        children = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _is_below(int(pid), head.pid)]
        assert len(children) > 4
        made = [each for each in set(Path(gettempdir()).glob(f"{PREFIX}*")) - folders if each.is_dir()]
        assert [each.stat().st_mode & 0o077 for each in made] == [0]  # Ray lets all users write to its own below it
        head.kill()
    assert [child for child in children if not (gone(child) or gone(child))] == []
    assert set(Path(gettempdir()).glob(f"{PREFIX}*")) <= folders


def _is_below(process: int, ancestor: int) -> bool:
    """Return whether `ancestor` started a process, directly or not."""
    while process > 1:
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
        if process == ancestor:
            return True
    return False


def test_wrong_addresses_and_hosts(tmp_path: Path) -> None:
    nowhere = f"{LOOPBACK}:{free_ports()}"
    assert f"nothing answers at {nowhere}" in refused(tmp_path, "--join", nowhere, token="word")
    assert "stdin: not a token" in refused(tmp_path, "--join", nowhere)
    assert "--host 198.51.100.1: this computer has no such address" in refused(tmp_path, "--host", "198.51.100.1")
