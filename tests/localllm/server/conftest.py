"""A hub with small models, and a server over empty stores that pulls from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from localllm.server import registry
from tests.localllm.hub.hub_server import HubServer, Repo, serving
from tests.localllm.server.store_site import Site
from tests.localllm.support import write_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf").read_bytes()


@pytest.fixture
def hub(tiny: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setattr(registry, "SCAN_SECONDS", 0.0)
    monkeypatch.setattr(registry, "SCAN_SHARE", float("inf"))  # each request scans, however long the last scan took
    monkeypatch.setattr(registry, "PATIENCE", 20.0)
    big = os.urandom(1 << 20)
    repos = {
        "ann/Toy-GGUF": Repo({"Toy-Q4_K_M.gguf": tiny, "Toy-Q8_0.gguf": tiny + b" "}),
        "ann/Big-GGUF": Repo({"Big-Q4_0.gguf": big}),
        "bartowski/Llama-3.2-1B-Instruct-GGUF": Repo({"Llama-3.2-1B-Instruct-Q4_K_M.gguf": tiny}),
    }
    with serving(repos) as server:
        yield server


@pytest.fixture
def site(tmp_path: Path, hub: HubServer) -> Site:
    return Site(tmp_path, hub.url)
