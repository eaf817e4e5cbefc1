"""The version is the same in program, package and changelog. In a checkout, `localllm --version` includes the
commit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from localllm import __version__
from localllm.cli.version import version
from tests.localllm.support import PROGRAM, REPOSITORY

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_folder_that_is_no_checkout_has_the_version_alone(tmp_path: Path) -> None:
    assert version(tmp_path) == __version__


@needs_git
def test_a_checkout_has_its_commit_and_says_when_a_tracked_file_has_changed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    git(tmp_path, "tag", "-a", "v9", "-m", "a tag takes the place of no commit")
    commit = git(tmp_path, "rev-parse", "--short=7", "HEAD")
    assert version(tmp_path) == f"{__version__} ({commit})"
    (tmp_path / "untracked").write_text("")
    assert version(tmp_path) == f"{__version__} ({commit})"
    (tmp_path / "site-packages").mkdir()
    assert version(tmp_path / "site-packages") == __version__  # installed inside another repository
    (tmp_path / "file").write_text("two")
    assert version(tmp_path) == f"{__version__} ({commit}, modified)"


@needs_git
def test_a_checkout_that_git_cannot_read_has_the_version_alone(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    assert version(tmp_path) == __version__


def test_without_git_a_checkout_has_the_version_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert version(tmp_path) == __version__


def test_the_program_prints_it() -> None:
    done = subprocess.run([*PROGRAM, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"localllm {version()}\n"
    assert re.fullmatch(r"localllm \d+\.\d+\.\d+( \([0-9a-f]{7,40}(, modified)?\))?\n", done.stdout)


def test_the_number_stands_in_one_place() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    source = (REPOSITORY / project["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE) == [__version__]


def test_the_changelog_begins_with_it() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    released = [found for found in re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE) if found != "Unreleased"]
    assert released[0] == __version__
