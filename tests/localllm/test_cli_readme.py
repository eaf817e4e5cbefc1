"""The README says what the program does: its tables are the program's, its commands and its Python run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from localllm.cli.app import read
from localllm.cli.main import COMMANDS
from localllm.cli.tables import SECTIONS, brought_up_to_date
from localllm.model import resolve
from tests.localllm.cli_support import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
SHELL = re.findall(r"^    (\S.*)$", PYTHON.sub("", README), re.MULTILINE)


def test_its_tables_are_those_of_the_program() -> None:
    for name in SECTIONS:
        assert f"<!-- {name} -->" in README
    assert brought_up_to_date(README) == README, "run: python -m localllm.cli.tables README.md"


def test_a_changed_table_would_be_noticed() -> None:
    assert brought_up_to_date(README.replace("| Q8_0 ", "| Q9_9 ", 1)) == README
    assert brought_up_to_date("<!-- formats -->\n<!-- /formats -->") != "<!-- formats -->\n<!-- /formats -->"


def test_the_first_two_commands_are_enough_by_themselves() -> None:
    chat, tests = SHELL[:2]
    for command in (chat, tests):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert chat.endswith("&& .venv/bin/localllm chat")
    assert tests.endswith("&& .venv/bin/python -m pytest")


def test_every_command_shown_can_be_parsed() -> None:
    shown = [line.split("localllm ", 1)[1] for line in SHELL[2:]]
    assert len(shown) >= 5
    for line in shown:
        name, *words = (part.strip('"') for part in re.findall(r'"[^"]*"|\S+', line))
        assert read(COMMANDS, [name, *words]) is not None


def test_its_python_runs() -> None:
    if not resolve("demo").exists():
        pytest.skip("the model in the box is not made yet: models/demo/demo.gguf")
    (code,) = PYTHON.findall(README)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r".{20,}[0-9.]+ tokens a second\n", done.stdout, re.DOTALL)
