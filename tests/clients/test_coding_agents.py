"""Coding agents on the PATH, `mini` (mini-swe-agent) and `aider`, each fix a bug in a scratch repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clients.conftest import Server
from tests.clients.plans import Call, calls, plan, says

BROKEN = "def area(width, height):\n    return width + height\n"
CHECK = 'from shapes import area\n\nassert area(3, 4) == 12, f"area is {area(3, 4)}"\nprint("all is well")\n'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Provide a repository with a failing check."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "shapes.py").write_text(BROKEN)
    (folder / "check.py").write_text(CHECK)
    author = ("-c", "user.name=Someone", "-c", "user.email=someone@example.org")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "Shapes")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def run(server: Server, repository: Path, *words: str) -> str:
    """Run a program in the repository with a separate home folder, and return its output."""
    found = shutil.which(words[0])
    if found is None:
        pytest.skip(f"the program {words[0]} is not installed")
    home = repository.parent
    environment = {
        **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
        "HOME": str(home), "TERM": "dumb", "OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_GLOBAL_CONFIG_DIR": str(home), "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }  # fmt: skip
    done = subprocess.run(
        [found, *words[1:]], cwd=repository, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_mended(repository: Path) -> bool:
    done = subprocess.run([sys.executable, "check.py"], cwd=repository, capture_output=True, text=True)
    return done.stdout == "all is well\n"


def test_mini_swe_agent(server: Server, repository: Path) -> None:
    def bash(command: str, text: str) -> dict[str, object]:
        return dict(calls(Call("bash", {"command": command}), text=text))

    task = plan(
        bash(f"cat shapes.py && {sys.executable} check.py", "I look at the code."),
        bash("cat <<'EOF' > seen.json\n{result}\nEOF", "I keep what I saw."),
        bash("sed -i 's/width + height/width * height/' shapes.py", "An area is a product."),
        bash(f"{sys.executable} check.py", "I check it."),
        bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff", "Done, after {seen} messages."),
    )
    trace = repository.parent / "trace.json"
    run(server, repository, "mini", "-m", "openai/planned", "-t", task, "-y", "--exit-immediately", "-o", str(trace))
    assert is_mended(repository)
    seen = json.loads((repository / "seen.json").read_text())
    assert seen["returncode"] == 1
    assert "area is 7" in seen["output"]
    told = json.loads(trace.read_text())
    assert told["info"]["exit_status"] == "Submitted"
    assert "width * height" in told["info"]["submission"]
    answers = [message for message in told["messages"] if message["role"] == "assistant"]
    assert len(answers) == 5
    assert answers[-1]["content"].strip() == "Done, after 8 messages."


def edit(old: str, new: str) -> str:
    return f"shapes.py\n```python\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n"


@pytest.mark.parametrize("more", [(), ("--no-stream",)])
def test_aider(server: Server, repository: Path, more: Sequence[str]) -> None:
    """The model's first edit does not fix the bug. aider then sends the output of the check, and gets the second edit.

    aider itself inserts answers ("Ok."), so the plan repeats the second edit in all later positions.
    """
    line = "    return width {} height\n"
    first = says("Here it is.\n\n" + edit(line.format("+"), line.format("-")))
    second = says("That was wrong.\n\n" + edit(line.format("-"), line.format("*")))
    task = plan(first, *[second] * 6)
    said = run(
        server, repository, "aider", "--model", "openai/planned", "--message", task, "--edit-format", "diff",
        "--yes-always", "--no-auto-commits", "--no-show-model-warnings", "--no-check-update", "--no-gitignore",
        "--analytics-disable", "--map-tokens", "0", "--no-pretty", "--auto-test", "--test-cmd",
        f"{sys.executable} check.py", *more, "shapes.py",
    )  # fmt: skip
    assert is_mended(repository), said
    assert "area is -1" in said
