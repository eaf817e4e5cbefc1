"""A Ray cluster of two nodes on this machine, which all tests of this folder share, and replicas without Ray.

Tests that use the cluster need `pytestmark = pytest.mark.xdist_group("ray")`, so that one process of pytest-xdist runs
them all.
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
from localllm.quant.codecache import default_folder
from tests.localllm.distributed.servers import Server, end, listening, started, until

if TYPE_CHECKING:
    from localllm.distributed.remote import RemoteScheduler
    from tests.localllm.distributed.local_replicas import Front


class TwoNodes(NamedTuple):
    """The cluster. This process is a driver on the first node."""

    ray: Any
    address: str
    nodes: tuple[str, str]  # Ray's ids; the first one is the node of this process
    cache: Path  # XDG_CACHE_HOME of the nodes


REPLICA, STAGE, PROMPTS = "ray::ServeReplica:", "ray::StageProcess", "ray::PromptReplica"  # titles of processes
FOREIGN = re.compile(r"Traceback|\(raylet\)|^\[|ray::|_raylet|\.cc:", re.MULTILINE)  # lines that are not localllm's
Starting = tuple[Path, subprocess.Popen[str]]  # the log of a server, and its process


def actors(cluster: TwoNodes, *titles: str) -> dict[int, str]:
    """Return the processes with these titles on the cluster of this test run, without zombies."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            ours = str(cluster.cache).encode() in (folder / "environ").read_bytes()
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


@pytest.fixture(scope="session")
def cluster(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    from ray.cluster_utils import Cluster

    from localllm.distributed.apart import RESOURCES
    from localllm.distributed.attach import connect
    from localllm.distributed.membership import LOOPBACK, OBJECTS

    if "PYTEST_XDIST_WORKER" in os.environ:
        only = tmp_path_factory.getbasetemp().parent / "cluster"
        assert not only.exists(), "another process of this test run has a cluster; see tests/conftest.py"
        only.mkdir()
    kernels = default_folder("kernels")
    folder, cache = (Path(tempfile.mkdtemp(prefix=prefix)) for prefix in ("llm-ray-", "llm-cache-"))
    (cache / "localllm").mkdir(mode=0o700)
    if kernels is not None and kernels.exists():
        (cache / "localllm" / "kernels").symlink_to(kernels)
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = str(cache)
    options = {"num_cpus": 1, "object_store_memory": OBJECTS, "node_ip_address": LOOPBACK, "resources": RESOURCES}
    found = Cluster()
    try:
        found.add_node(include_dashboard=False, temp_dir=str(folder), **options)
        found.add_node(**options)
        connect(ray, found.address)
        own = ray.get_runtime_context().get_node_id()
        other = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != own)
        del os.environ["XDG_CACHE_HOME"]
        os.environ.update(before)
        yield TwoNodes(ray, found.address, (own, other), cache)
    finally:
        ray.shutdown()
        found.shutdown()
        os.environ.clear()
        os.environ.update(before)
        for path in (folder, cache):
            shutil.rmtree(path, ignore_errors=True)


SERVERS = {"served": ("--replicas", "2", "--prefill-replicas", "1"), "staged": ("--stages", "2")}


@pytest.fixture(scope="session")
def starting(cluster: TwoNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Starting]]:
    """The servers with Ray. They start together, because each mostly waits for Ray."""
    folder = tmp_path_factory.mktemp("ray")
    found = {}
    for name, words in SERVERS.items():
        found[name] = folder / name, started(folder / name, "--ray", cluster.address, *words)
    yield found
    for _, process in found.values():
        end(process)
    until(lambda: not actors(cluster, REPLICA, PROMPTS))


@contextmanager
def ready(log: Path, process: subprocess.Popen[str]) -> Iterator[Server]:
    with listening(log, process) as found:
        yield found
    assert process.returncode == 0
    assert not FOREIGN.search(log.read_text()), log.read_text()


@pytest.fixture(scope="session")
def served(starting: dict[str, Starting]) -> Iterator[Server]:
    """Two replicas, and one for prompts of 64 tokens or more."""
    with ready(*starting["served"]) as found:
        until(lambda: found.metrics()["localllm_replicas"] == 2)
        yield found


@pytest.fixture(scope="session")
def staged(starting: dict[str, Starting]) -> Iterator[Server]:
    """One replica in two stages."""
    with ready(*starting["staged"]) as found:
        yield found


@pytest.fixture(scope="session")
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
