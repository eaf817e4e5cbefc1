"""mkdocs builds docs/ without warnings, and the pages load nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.localllm.support import REPOSITORY

LOADED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(https?:[^\"' >]+)|<link\b[^>]*\bhref=[\"']?(https?:[^\"' >]+)"
)


def test_the_site_builds_without_a_warning_and_stands_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "site").glob("*.html")}
    assert pages.keys() >= {path.stem for path in (REPOSITORY / "docs").glob("*.md")}
    assert {name: LOADED.findall(text) for name, text in pages.items() if LOADED.search(text)} == {}
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 10_000


def test_the_pattern_finds_what_is_loaded_from_elsewhere() -> None:
    assert LOADED.search('<script defer src="https://cdn.example.org/x.js"></script>')
    assert LOADED.search("<link rel=stylesheet href=https://fonts.example.org/css>")
    assert not LOADED.search('<a href="https://example.org">there</a>')
