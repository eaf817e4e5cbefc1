"""Fixtures: a Hugging Face hub on this machine, and a client that pulls from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.localllm.hub.hub_client import FILES, PARTS, Client
from tests.localllm.hub.hub_server import HubServer, Repo, serving


@pytest.fixture
def server() -> Iterator[HubServer]:
    small = {"README.md": b"# Toy", "config.json": b"{}"}
    with serving(
        {
            "ann/Toy-GGUF": Repo({**FILES, **small, "imatrix.gguf": b"im" * 99}),
            "ann/Big-GGUF": Repo({**PARTS, "Big-Q8_0.gguf": os.urandom(400_000)}),
            "ann/One": Repo({"model.gguf": os.urandom(100_000)}),
            "ann/Git": Repo({"tiny-F32.gguf": b"GGUF, small enough for git"}),
            "ann/Gated": Repo({"g-Q4_0.gguf": os.urandom(99_999)}, gated=True),
            "ann/Private": Repo({"p-Q4_0.gguf": os.urandom(99_999)}, token="hf_secret"),
            "ann/Tensors": Repo({"config.json": b"{}", "model.safetensors": os.urandom(1000)}),
            "ann/Empty": Repo({"README.md": b"soon"}),
        }
    ) as hub:
        yield hub


@pytest.fixture
def client(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    return Client(server, tmp_path / "hub")
