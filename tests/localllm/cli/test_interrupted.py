"""After Ctrl-C at any moment, the exit code is 130, stderr is empty, and no partial file is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.localllm.support import REPOSITORY

# sitecustomize.py, which Python runs at startup: send SIGINT before the import of a module, or at exit.
HOOK = """
import atexit, os, sys

def interrupt():
    os.kill(os.getpid(), 2)  # SIGINT; importing signal here would leave nothing to interrupt

class AtImport:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            interrupt()

sys.meta_path.insert(0, AtImport)
if os.environ["INTERRUPTED_AT"] == "exit":
    atexit.register(interrupt)
"""


@pytest.mark.parametrize(
    ("words", "moment"),
    [
        (("quantize", "demo", "OUT", "Q4_0"), "localllm.cli.main"),
        (("quantize", "demo", "OUT", "Q4_0"), "typer"),
        (("quantize", "demo", "OUT", "Q4_0"), "localllm.cli.commands.quantize"),
        (("quantize", "demo", "OUT", "Q4_0"), "numpy"),
        (("run", "demo", "hi"), "localllm.options"),
        (("run", "demo", "hi"), "llvmlite"),
        (("serve", "demo", "--port", "0"), "uvicorn"),
        (("--help",), "typer.core"),
        (("--help",), "signal"),
        (("--help",), "enum"),  # imported by `signal`
        (("--version",), "exit"),
    ],
)
def test_ctrl_c_is_quiet_at_any_moment(words: tuple[str, ...], moment: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    out = tmp_path / "out.gguf"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY))), "INTERRUPTED_AT": moment}
    given = [str(out) if word == "OUT" else word for word in words]
    done = subprocess.run([sys.executable, "-m", "localllm", *given], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
    assert not out.exists()
