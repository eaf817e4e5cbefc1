"""Provide a server for all client tests: localllm in a separate process, with the bundled model and a tool template."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from localllm.gguf import NewTensor, open_gguf, write_gguf
from localllm.loading.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).with_name("hermes.jinja")
NAME = "planned"
CONTEXT = 16384


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server. `log` is the path of its stderr."""

    url: str
    log: Path
    model: str = NAME


def write_model(path: Path, template: Path = TEMPLATE) -> None:
    """Copy the bundled model, with a template for tools and reasoning, and with a context large enough for agents."""
    with open_gguf(resolve("demo")) as file:
        changed = {
            "general.name": NAME,
            "llama.context_length": CONTEXT,
            "tokenizer.chat_template": template.read_text(),
        }
        tensors = [
            NewTensor(each.name, each.format, each.shape, each.read(0, each.rows).reshape(-1))
            for each in file.tensors.values()
        ]
        write_gguf(path, {**file.stored, **changed}, tensors)


@contextmanager
def serving(folder: Path, *words: str, program: str = "tests.clients.program") -> Iterator[Server]:
    """Run a server. At the end it must exit on request, and its log must have no localllm error.

    `program` localllm generates its own tokens, not scripted ones.
    """
    log = folder / "log"
    command = [sys.executable, "-m", program, "serve", "--port", "0", "-t", "1", "--backend", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as to:
        process = subprocess.Popen([*command, *words], cwd=ROOT, env=environment, stdout=to, stderr=to)
    try:
        yield Server(_address(process, log), log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    told = log.read_text()
    assert "Traceback" not in told, told
    assert "unexpected error" not in told, told


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server has logged its URL, and return the URL."""
    for _ in range(1200):
        if found := re.search(r"listening on (http://\S+)", log.read_text()):
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Provide a server with one model."""
    folder = tmp_path_factory.mktemp("planned")
    write_model(folder / f"{NAME}.gguf")
    with serving(folder, str(folder / f"{NAME}.gguf"), "-c", str(CONTEXT)) as it:
        yield it
