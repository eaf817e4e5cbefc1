"""Every command and Python example of README.md and docs/ succeeds, and prints what the page shows."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.cli.app import read_command_line
from localllm.cli.table import COMMANDS
from tests.documents.desk import HOME, Desk, network
from tests.documents.pages import PAGES, SHELL, Example, examples, name
from tests.localllm.hub.hub_server import HubServer
from tests.localllm.support import REPOSITORY

URL = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
FOUND = {path: examples(path.read_text(encoding="utf-8")) for path in PAGES}

# What cannot run here, by its beginning, and why.
NOT_RUN = {
    "uvx ": "needs uv and a network",
    "pipx ": "needs pipx and a network",
    "uv ": "needs uv and a network",
    "python3 -m venv ": ".ci/run runs these",
    ". .venv/bin/activate": "needs the environment that .ci/run makes",
    "localllm doctor --gpu": "compiles every kernel, which takes minutes",
    "localllm chat model.gguf --backend opencl": "needs a graphics card",
    "localllm chat model.gguf -ngl 20": "needs a graphics card",
    "python benchmarks/compare.py model.gguf": "needs llama.cpp's program",
    "python benchmarks/quality_table.py": "takes half an hour",
    "OPENAI_API_BASE=": "needs aider; tests/clients runs it",
    "localllm worker": "runs until Ctrl-C; tests/localllm/distributed runs it",
    "localllm serve model.gguf --ray": "starts Ray; tests/localllm/distributed runs it",
    "localllm chat --continue": "continues a chat of a terminal; tests/localllm/cli/chat runs it",
}
OTHERS = {"yaml": "other programs' settings", "toml": "settings; tests/localllm/cli/test_documents.py reads ours"}
ON_HUB = re.compile(r"\b[\w.-]+/[\w.-]+-GGUF:\w+")
SERVERS = re.compile(r"(?:[A-Z_]+=\S+ )*localllm (?:serve|web)\b")
MEASURED = re.compile(r"\d[\d.,]*(?= ?(?:s|ms|tokens/s|t/s|GB/s|GiB|MiB|GB|%))")
BROKEN = "threads = 4\n\nthread = 5\n"  # the file of the error that docs/configuration.md shows


def reason(example: Example) -> str:
    """Return why an example cannot run here, or an empty text."""
    if example.language != SHELL:
        return OTHERS.get(example.language, "")
    return next((why for start, why in NOT_RUN.items() if example.text.startswith(start)), "")


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    named = {each for found in FOUND.values() for example in found for each in ON_HUB.findall(example.text)}
    with network(sorted(named)) as server:
        yield server


@pytest.fixture
def desk(tmp_path: Path, hub: HubServer) -> Iterator[Desk]:
    it = Desk(tmp_path, hub.url)
    yield it
    it.close()


@pytest.mark.parametrize("page", [page for page in PAGES if FOUND[page]], ids=name)
def test_every_example_of_a_page_runs(page: Path, desk: Desk) -> None:
    for example in FOUND[page]:
        if reason(example):
            continue
        place = f"{name(page)}:{example.line}: {example.text}"
        assert example.language in (SHELL, "python", "py"), f"{place}\nneither runs nor is listed as other"
        if SERVERS.match(example.text):
            assert desk.serve(example.text) == 0, place
        elif example.shown:
            check_shown(desk, example, place)
        else:
            done = desk.run(example.text) if example.language == SHELL else desk.python(example.text)
            assert done.returncode == 0, f"{place}\n{done.stdout}{done.stderr}"
            assert "Traceback" not in done.stderr, f"{place}\n{done.stderr}"


def check_shown(desk: Desk, example: Example, place: str) -> None:
    """Run a command whose output the page shows, and compare all but the measured numbers."""
    settings = desk.home / ".config/localllm/config.toml"
    if any(f"{settings.name}:" in line for line in example.shown):
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(BROKEN)
    done = desk.run(example.text, "\n".join(example.typed))
    settings.unlink(missing_ok=True)
    refused = example.shown[0].startswith("error: ")
    assert (done.returncode != 0) == refused, f"{place}\n{done.stderr}"
    printed = (done.stderr if refused else done.stdout).replace(str(desk.home), HOME)
    lines = [MEASURED.sub("#", line) for line in printed.splitlines() if line]
    assert lines == [MEASURED.sub("#", line) for line in example.shown], place


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_sentences_can_be_parsed(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for words in re.findall(r"`localllm ([a-z][^`]*)`", text):
        line = shlex.split(" ".join(words.split()))
        if line[0] in COMMANDS:
            assert read_command_line(COMMANDS, line) is not None


def test_the_list_of_what_cannot_run_has_no_stale_line() -> None:
    commands = [each.text for found in FOUND.values() for each in found if each.language == SHELL]
    for start in NOT_RUN:
        assert any(command.startswith(start) for command in commands), start


def test_examples_are_found() -> None:
    found = examples(
        "Text\n\n    localllm list\n\n```sh\nlocalllm run a \\\n  b\n```\n\n"
        "```text\n$ localllm chat\n>>> Hello\nHi\n\n$ localllm top\n```\n\n```python\nprint(1)\n```\n"
    )
    assert found == [
        Example(3, SHELL, "localllm list"),
        Example(6, SHELL, "localllm run a   b"),
        Example(11, SHELL, "localllm chat", ("Hi",), ("Hello",)),
        Example(15, SHELL, "localllm top"),
        Example(19, "python", "print(1)"),
    ]
    assert sum(len(each) for each in FOUND.values()) > 80


def test_pip_s_commands_are_the_two_that_ci_runs() -> None:
    chat, tests = (each.text for each in FOUND[PAGES[0]] if each.text.startswith("python3 -m venv "))
    assert chat.endswith("&& .venv/bin/localllm chat")
    assert tests.endswith("&& .venv/bin/python -m pytest -n auto")


def test_the_commands_that_install_name_the_project_s_url() -> None:
    texts = [path.read_text(encoding="utf-8") for path in [*PAGES, REPOSITORY / "CONTRIBUTING.md"]]
    for found in (texts[0], texts[PAGES.index(REPOSITORY / "docs/index.md")]):
        assert f"git+{URL}" in found
    assert {found for text in texts for found in re.findall(r"git\+(\S+\.git)", text)} == {URL}
