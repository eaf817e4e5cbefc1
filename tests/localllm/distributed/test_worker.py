"""`localllm worker`: two computers (here: two nodes, with separate homes) become a cluster, and refuse strangers."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from localllm.distributed.membership import LOOPBACK
from localllm.distributed.worker import _kept_token
from tests.localllm.distributed.computers import RUN, ran, refused
from tests.localllm.distributed.conftest import TwoNodes, ray_folders
from tests.localllm.support import localllm as cli
from tests.ports import free_ports

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(find_spec("ray") is None or find_spec("zmq") is None, reason="needs ray and pyzmq"),
]


def test_two_computers_in_two_commands(cluster: TwoNodes, tmp_path: Path) -> None:
    """The fixture has typed the two commands, and checks that nothing is left of them."""
    said, answer = cluster.said
    assert cluster.address == f"{cluster.host}:{cluster.port}"
    token = re.search(r"token:\n\n    (\w+)", said)
    assert token is not None
    assert token[1] == (cluster.homes[0] / "localllm" / "ray" / "token").read_text().strip()
    assert "The token lets anyone run any program" in said
    assert f"belongs to the cluster at {cluster.address}" in answer
    with ThreadPoolExecutor() as pool:  # meanwhile, others are refused
        port = str(cluster.port)
        wrong = pool.submit(refused, tmp_path, "--join", cluster.address, "--port", f"{free_ports()}", token="wrong")
        taken = pool.submit(refused, tmp_path, "--port", port)
        twice = pool.submit(refused, cluster.homes[0])
        alone, done = cli(*RUN), ran(cluster.homes[1], "--ray", "auto", "--stages", "2")
        assert done.returncode == 0, done.stderr
        assert alone.stdout == done.stdout
        assert f"on {cluster.host} (node 2) (cpu)" in done.stderr
        assert (cluster.homes[1] / "localllm" / "ray" / "cluster.json").exists()
        assert "does not accept this token" in wrong.result()
        assert f"port {port} of this computer is in use" in taken.result()
        assert "already belongs to the cluster" in twice.result()
    made = [each for each in ray_folders(cluster.homes[0].parent) if each.is_dir()]
    assert [each.stat().st_mode & 0o077 for each in made] == [0, 0]  # Ray lets all users write to its own below it


def test_the_token_is_kept_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "localllm").mkdir(mode=0o700)
    token, place = _kept_token()
    assert place == tmp_path / "localllm" / "ray" / "token"
    assert place.stat().st_mode & 0o077 == 0
    assert _kept_token() == (token, place)
    assert place.read_text().strip() == token


def test_wrong_addresses_and_hosts(tmp_path: Path) -> None:
    nowhere = f"{LOOPBACK}:{free_ports()}"
    with ThreadPoolExecutor() as pool:
        alone = pool.submit(refused, tmp_path, "--join", nowhere, token="word")
        empty = pool.submit(refused, tmp_path, "--join", nowhere)
        foreign = pool.submit(refused, tmp_path, "--host", "198.51.100.1")
        assert f"nothing answers at {nowhere}" in alone.result()
        assert "stdin: not a token" in empty.result()
        assert "--host 198.51.100.1: this computer has no such address" in foreign.result()
