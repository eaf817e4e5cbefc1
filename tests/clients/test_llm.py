"""The `llm` package: its command line, with our server in extra-openai-models.yaml."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clients.conftest import Server
from tests.clients.plans import Call, calls, plan, says

llm = pytest.importorskip("llm", reason="the llm package is not installed")

TOOLS = '''
def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y
'''
STEPS = plan(
    calls(Call("multiply", {"x": 6, "y": 7})),
    calls(Call("multiply", {"x": 42, "y": 2})),
    says("It is {result}, after {seen}."),
)
ANSWER = "It is 84, after 4."


@pytest.fixture
def folder(server: Server, tmp_path: Path) -> Path:
    """Return the user folder of `llm`, with our server as a model."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: {server.model}\n  api_base: {server.url}/v1\n"
        "  supports_tools: true\n  supports_schema: true\n"
    )
    return tmp_path


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "llm", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("more", [(), ("--no-stream",)])
def test_tools_on_the_command_line(folder: Path, more: Sequence[str]) -> None:
    assert run(folder, "prompt", "-m", "ours", "--functions", TOOLS, *more, STEPS).strip() == ANSWER


def test_a_conversation_continues(folder: Path) -> None:
    steps = plan(says("First."), says("Second, after {seen}."))
    assert run(folder, "prompt", "-m", "ours", steps).strip() == "First."
    assert run(folder, "prompt", "-m", "ours", "-c", "Go on.").strip() == "Second, after 1."


def test_a_schema(folder: Path) -> None:
    steps = plan(says('{"name": "Cleo", "age": 5}'))
    said = run(folder, "prompt", "-m", "ours", "--schema", "name, age int", steps)
    assert said.replace(" ", "").strip() == '{"name":"Cleo","age":5}'
