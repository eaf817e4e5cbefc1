"""Find the commands, transcripts and Python examples of a page.

Outside of fenced blocks every line that is indented by four or eight spaces is a command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.localllm.support import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SHELL = "sh"
_INDENTED = re.compile(r"(?: {4}| {8})(\S.*)")


@dataclass(frozen=True, slots=True)
class Example:
    """A command, or a block of a language. `shown` is the output that the page shows, and `typed` what a user types
    after `>>> ` meanwhile."""

    line: int
    language: str
    text: str
    shown: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()


def name(path: Path) -> str:
    """Return the name of a page in the repository."""
    return path.relative_to(REPOSITORY).as_posix()


def examples(text: str) -> list[Example]:
    """Return everything on a page that runs, in its order."""
    found: list[Example] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        start = at
        at += 1
        if fence := re.match(r" *```(\w*)", lines[start]):
            end = next(n for n in range(at, len(lines)) if lines[n].strip() == "```")
            found += _fenced(start + 2, fence[1], lines[at:end])
            at = end + 1
        elif command := _INDENTED.fullmatch(lines[start]):
            parts = [command[1]]
            while parts[-1].endswith("\\"):
                parts.append(lines[at].strip())
                at += 1
            found.append(Example(start + 1, SHELL, " ".join(part.rstrip("\\").rstrip() for part in parts)))
    return found


def _fenced(line: int, language: str, body: list[str]) -> list[Example]:
    if language == SHELL:
        commands = "\n".join(body).replace("\\\n", "").splitlines()
        return [Example(line, SHELL, command) for command in commands if command]
    if language != "text":
        return [Example(line, language, "\n".join(body))]
    found: list[Example] = []
    for number, shown in enumerate(body):
        if shown.startswith("$ "):
            found.append(Example(line + number, SHELL, shown[2:]))
        elif found:
            last = found.pop()
            said, typed = (last.shown, last.typed)
            if shown.startswith(">>> "):
                typed += (shown[4:],)
            elif shown:
                said += (shown,)
            found.append(Example(last.line, SHELL, last.text, said, typed))
    return found
