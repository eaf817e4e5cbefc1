"""A Ray cluster of two nodes on this machine, which all tests of this folder share, and replicas without Ray.

Tests that use the cluster need `pytestmark = pytest.mark.xdist_group("ray")`, so that one process of pytest-xdist runs
them all, first. The cluster ends with the last of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import localllm
from localllm.quant.codecache import default_folder, private_folder
from tests.localllm.distributed.computers import worker
from tests.localllm.distributed.servers import Server, end, listening, started, until
from tests.ports import free_ports
from tests.processes import below, gone

if TYPE_CHECKING:
    from localllm.distributed.remote import RemoteScheduler
    from tests.localllm.distributed.local_replicas import Front


class TwoNodes(NamedTuple):
    """The cluster. This process is a driver on the first node."""

    ray: Any
    address: str
    nodes: tuple[str, str]  # Ray's ids; the first one is the node of this process
    homes: tuple[Path, Path]  # XDG_CACHE_HOME of the first computer, and of the other one
    port: int  # the first of 200 that belong to them
    said: tuple[str, str]  # by their `localllm worker`

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]


REPLICA, STAGE, PROMPTS = "ray::ServeReplica:", "ray::StageProcess", "ray::PromptReplica"  # titles of processes
FOREIGN = re.compile(r"Traceback|\(raylet\)|^\[|ray::|_raylet|\.cc:", re.MULTILINE)  # lines that are not localllm's
Starting = tuple[Path, subprocess.Popen[str]]  # the log of a server, and its process


def actors(cluster: TwoNodes, *titles: str) -> dict[int, str]:
    """Return the processes with these titles on the cluster of this test run, without zombies."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            ours = str(cluster.homes[0].parent).encode() in (folder / "environ").read_bytes()
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
            if ours and title.startswith(titles):
                found[int(folder.name)] = title
    return found


def front_of(title: str) -> str:
    """Return the name of the server to which a replica belongs, from the replica's title."""
    return title.removeprefix(REPLICA).split(":")[0]


@pytest.fixture(scope="session")
def ray() -> Any:
    """The package, which reads its token when it is imported: tests import it only here."""
    if find_spec("ray") is None or find_spec("zmq") is None:
        pytest.skip("several machines need ray and pyzmq")
    from localllm.distributed.membership import LOOPBACK, new_token, use
    from localllm.distributed.package import ray_package

    use(new_token(), LOOPBACK)
    return ray_package()


@pytest.fixture(scope="package")
def computers(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """Two computers, made with `localllm worker` as users do. At the end, the other computer leaves with Ctrl-C, and
    then the first one is killed: it takes all of Ray with it.
    """
    from localllm.distributed.attach import connect

    if "PYTEST_XDIST_WORKER" in os.environ:
        only = tmp_path_factory.getbasetemp().parent / "cluster"
        assert not only.exists(), "another process of this test run has a cluster; see tests/groups.py"
        only.mkdir()
    root, port = Path(tempfile.mkdtemp(prefix="lr-", dir="/tmp")), free_ports()  # short: it also has Ray's sockets
    homes = _home(root / "first"), _home(root / "second")
    try:
        with worker(homes[0], "--port", str(port)) as (head, said):
            joining = re.search(r"localllm worker --join (\S+)", said)
            assert joining is not None, said
            join = "--join", joining[1], "--port", str(port + 100)
            with worker(homes[1], *join, token=os.environ["RAY_AUTH_TOKEN"]) as (joined, answer):
                connect(ray, joining[1])
                own = ray.get_runtime_context().get_node_id()
                other = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != own)
                yield TwoNodes(ray, joining[1], (own, other), homes, port, (said, answer))
                ray.shutdown()
            assert joined.returncode == 0
            assert not (homes[1] / "localllm" / "ray" / "cluster.json").exists()
            assert len(ray_folders(root)) == 2  # the folder of the first, and its log
            children = below(head.pid)
            assert len(children) > 4
            head.kill()
        assert [child for child in children if not gone(child)] == []
        assert not ray_folders(root)
    finally:
        ray.shutdown()
        shutil.rmtree(root, ignore_errors=True)


def _home(folder: Path) -> Path:
    """Make the cache folder of a computer. All have the same compiled kernels, and the same token."""
    (folder / "localllm" / "ray").mkdir(mode=0o700, parents=True)
    (folder / "localllm").chmod(0o700)
    if (kernels := private_folder(default_folder("kernels"))) is not None:
        (folder / "localllm" / "kernels").symlink_to(kernels)
    token = folder / "localllm" / "ray" / "token"
    token.touch(0o600)
    token.write_text(os.environ["RAY_AUTH_TOKEN"] + "\n")
    return folder


def ray_folders(root: Path) -> set[Path]:
    """Return the folders of Ray's nodes, and their logs."""
    from localllm.distributed.membership import PREFIX

    return set(root.glob(f"{PREFIX}*"))


SERVERS = {"served": ("--replicas", "2", "--prefill-replicas", "1"), "staged": ("--stages", "2")}


@pytest.fixture(scope="package")
def cluster(computers: TwoNodes, request: pytest.FixtureRequest) -> TwoNodes:
    """The cluster. The servers that later tests need start meanwhile."""
    if any(SERVERS.keys() & each.fixturenames for each in request.session.items if isinstance(each, pytest.Function)):
        request.getfixturevalue("starting")
    return computers


@pytest.fixture(scope="package")
def starting(computers: TwoNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Starting]]:
    """The servers with Ray. They start together, because each mostly waits for Ray."""
    folder = tmp_path_factory.mktemp("ray")
    found = {}
    for name, words in SERVERS.items():
        found[name] = folder / name, started(folder / name, "--ray", computers.address, *words)
    yield found
    for _, process in found.values():
        end(process)
    until(lambda: not actors(computers, REPLICA, PROMPTS))


@contextmanager
def ready(log: Path, process: subprocess.Popen[str]) -> Iterator[Server]:
    with listening(log, process) as found:
        yield found
    assert process.returncode == 0
    assert not FOREIGN.search(log.read_text()), log.read_text()


@pytest.fixture(scope="package")
def served(starting: dict[str, Starting]) -> Iterator[Server]:
    """Two replicas, and one for prompts of 64 tokens or more."""
    with ready(*starting["served"]) as found:
        until(lambda: found.metrics()["localllm_replicas"] == 2)
        yield found


@pytest.fixture(scope="package")
def staged(starting: dict[str, Starting]) -> Iterator[Server]:
    """One replica in two stages."""
    with ready(*starting["staged"]) as found:
        yield found


@pytest.fixture(scope="package")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without Ray, whose answers the others must give."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with listening(log, started(log)) as found:
        yield found


# -- replicas in this process ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> Iterator[list[localllm.Model]]:
    found = [localllm.load("demo", ctx_size=512, threads=1, sequences=3, spec="off") for _ in range(3)]
    yield found
    for model in found:
        model.close()


@pytest.fixture
def front(models: list[localllm.Model], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Front]]:
    from tests.localllm.distributed import local_replicas as local  # needs pyzmq

    monkeypatch.setattr(local.LocalReplica, "_where", local.LocalReplica.where)
    made: list[Front] = []

    def start(count: int = 2, **limits: int) -> Front:
        made.append(local.Front(models, replace(local.LIMITS, **limits), count))
        return made[-1]

    yield start
    for each in made:
        each.scheduler.close()
        for replica in each.wire.replicas.values():
            replica._scheduler.close()


@pytest.fixture
def unanswered() -> Iterator[RemoteScheduler]:
    from tests.localllm.distributed import local_replicas as local

    with local.unanswered() as scheduler:
        yield scheduler
