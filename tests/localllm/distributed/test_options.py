"""Wrong values of --ray and --stages, and a program that does not need Ray until it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.commands.worker import worker
from localllm.cli.options import WorkerOptions
from localllm.cluster.errors import ClusterError
from localllm.distributed import attach, package
from localllm.distributed.attach import has_cluster
from localllm.distributed.membership import ray_folder
from localllm.options import OptionError, RayOptions
from localllm.options.ray import ADDRESS, HOST_AND_PORT, STAGES
from tests.localllm.support import REPOSITORY


@pytest.mark.parametrize("text", ["auto", "192.168.1.7:7380", "host-1.local:1", "[fe80::1]:65535"])
def test_addresses(text: str) -> None:
    assert ADDRESS.read(text) == text
    assert RayOptions(ray=text).number == 0


@pytest.mark.parametrize(
    "text", ["", "on", "host", "host:", "host:0", "host:65536", ":1", "a b:1", "http://host:1", "::1"]
)
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(OptionError, match=r"is not auto or HOST:PORT, such as 192\.168\.1\.7:7380$"):
        ADDRESS.read(text)
    with pytest.raises(OptionError, match="is not HOST:PORT"):
        HOST_AND_PORT.read(text)
    if text:
        with pytest.raises(OptionError, match=r"ray is .*: it must be auto or HOST:PORT"):
            RayOptions(ray=text)


def test_stages() -> None:
    assert [STAGES.read(text) for text in ("auto", "1", "64")] == ["auto", 1, 64]
    assert RayOptions(ray="auto", stages=3).number == 3
    for text in ("0", "65", "-1", "two", "1.5", ""):
        with pytest.raises(OptionError, match="is not a number of stages from 1 to 64, or auto"):
            STAGES.read(text)
    with pytest.raises(OptionError, match=r"^--stages 2 needs --ray auto or --ray HOST:PORT$"):
        RayOptions(stages=2)
    with pytest.raises(OptionError, match="stages is 0: it must be a number of stages"):
        RayOptions(ray="auto", stages=0)


def test_ray_is_imported_only_when_it_is_asked_for() -> None:
    code = (
        "import sys; from localllm.cli.main import main; main(['run', 'demo', 'Hello', '-n', '1']); main(['--help'])\n"
        "import localllm.distributed.attach, localllm.distributed.stages, localllm.distributed.worker\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('ray', 'zmq')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.parametrize("given", ["garbage", "ray://127.0.0.1:10001", "127.0.0.1:x", "127.0.0.1:99999"])
def test_a_wrong_address_of_the_environment_is_named(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "connected_ray", lambda: None)  # another test of this process may be connected
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(ClusterError, match=rf"^RAY_ADDRESS: '{given}' is not HOST:PORT, such as"):
        has_cluster()


def test_a_damaged_note_on_the_cluster_counts_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path) if name != "RAY_ADDRESS" else "")
    monkeypatch.setattr(attach, "connected_ray", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = ray_folder()
    assert folder is not None
    for address in ("nowhere", "host:port", 7, ""):
        known = {"address": address, "token": "x", "process": os.getpid()}
        (folder / "cluster.json").write_text(json.dumps(known))
        assert not has_cluster()
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # as Ray spells it
    assert not has_cluster()


def test_a_ray_that_accepts_strangers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "version", lambda name: "2.55.1")
    with pytest.raises(
        ClusterError, match=r"^Ray 2\.55\.1 lets strangers run programs .* pip install -U 'localllm\[ray"
    ):
        package.check_package()


def test_without_ray_a_worker_says_nothing_else(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(package, "find_spec", lambda name: None)
    with pytest.raises(ClusterError, match=r"^localllm worker needs Ray"):
        worker(WorkerOptions())
    assert capsys.readouterr() == ("", "")


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "find_spec", lambda name: None if name == "ray" else object())
    with pytest.raises(ClusterError, match=r"^ray needs Ray: pip install 'localllm\[ray\]'$"):
        package.check_package()
