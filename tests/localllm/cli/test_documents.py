"""README and docs/ match the program: tables are generated from it, and commands and Python examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli.app import read_command_line
from localllm.cli.documents import SECTIONS, brought_up_to_date
from localllm.cli.naming import with_command
from localllm.cli.table import COMMANDS
from localllm.loading.resolve import resolve
from localllm.models import ARCHITECTURES
from tests.localllm.support import PROGRAM, REPOSITORY, localllm

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
README, DOCS = TEXTS[PAGES[0]], "".join(TEXTS[path] for path in PAGES[1:])
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
FENCED = re.compile(r"```.*?```", re.DOTALL)
SHELL = re.compile(r"^(?: {4}| {8})(\S.*)$", re.MULTILINE)
COMMAND_LINES = [line for text in TEXTS.values() for line in SHELL.findall(FENCED.sub("", text))]
INSTALLING = [line for line in COMMAND_LINES if line.startswith("python3 -m venv ")]


def name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def test_their_tables_are_those_of_the_program() -> None:
    for section in SECTIONS:
        assert f"<!-- {section} -->" in DOCS
    for path, text in TEXTS.items():
        assert brought_up_to_date(text) == text, f"run: python -m localllm.cli.documents {name(path)}"
    assert f"[{len(ARCHITECTURES)} architectures]" in README


def test_a_changed_table_would_be_noticed() -> None:
    assert brought_up_to_date(DOCS.replace("| Q8_0 ", "| Q9_9 ", 1)) == DOCS
    assert brought_up_to_date("<!-- formats -->\n<!-- /formats -->") != "<!-- formats -->\n<!-- /formats -->"


def test_the_commands_that_install_are_enough_by_themselves() -> None:
    chat, tests = INSTALLING
    for command in (chat, tests):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert chat.endswith("&& .venv/bin/localllm chat")
    assert tests.endswith("&& .venv/bin/python -m pytest -n auto")


@pytest.mark.parametrize("line", [line for line in COMMAND_LINES if line not in INSTALLING])
def test_every_command_shown_can_be_parsed(line: str) -> None:
    if line.startswith("python benchmarks/"):
        script, *words = line.removeprefix("python ").split()
        source = (REPOSITORY / script).read_text(encoding="utf-8")
        assert all(f'"{word}"' in source for word in words if word.startswith("-"))
        return
    words = [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', line.split("localllm ", 1)[1])]
    assert read_command_line(COMMANDS, with_command(words, COMMANDS)) is not None


def test_the_configuration_shown_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", TEXTS[REPOSITORY / "docs/configuration.md"], re.DOTALL)
    (tmp_path / "config.toml").write_text(text)
    done = localllm("config", "check", "--config", tmp_path / "config.toml")
    assert (done.returncode, done.stderr) == (0, "")


def test_there_are_commands_to_parse() -> None:
    assert len(COMMAND_LINES) >= 30
    assert {line.split("localllm ", 1)[1].split()[0] for line in COMMAND_LINES if "localllm " in line} >= {
        "chat", "run", "show", "bench", "quantize", "perplexity", "imatrix", "devices", "embed", "pull", "list",
        "rm", "config",
    }  # fmt: skip


@pytest.mark.parametrize("path", [path for path in PAGES if PYTHON.search(TEXTS[path])], ids=name)
def test_its_python_runs(path: Path) -> None:
    if not resolve("demo").exists():
        pytest.skip("the model in the box is not made yet: models/demo/demo.gguf")
    for code in PYTHON.findall(TEXTS[path]):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        assert len(done.stdout) > 20


def test_the_chat_shown_is_what_the_program_says() -> None:
    (picture,) = re.findall(r"```text\n\$ localllm (.*?)```", README, re.DOTALL)
    command, *lines = picture.splitlines()
    asked = [line.removeprefix(">>> ") for line in lines if line.startswith(">>> ")]
    answers = [line for line in lines if not line.startswith(">>> ")]
    done = subprocess.run(
        [*PROGRAM, *command.split()], input="\n".join(asked), capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, answers)


@pytest.mark.parametrize("path", [*PAGES, REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"], ids=name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        if not re.match(r"https?:", target):
            assert not file or (path.parent / file).is_file(), target
            if anchor:
                page = (path.parent / file).read_text(encoding="utf-8") if file else path.read_text(encoding="utf-8")
                titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
                assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], target


def test_every_page_is_linked_from_the_readme() -> None:
    for path in PAGES[1:]:
        assert f"({name(path)})" in README
