"""The canvas of a diffusion model on a pseudo-terminal: drawn on the alternate screen, then printed as text."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from localllm.cli.commands.run_diffusion import MASK, around_first
from tests.localllm.diffusion.test_diffusion import write_diffusion
from tests.localllm.support import Terminal, localllm

OPEN, CLOSE = "\x1b[?1049h", "\x1b[?1049l"  # escape sequences that enter and leave the alternate screen
CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
WORDS = ("--raw", "-n", 90, "--seed", 5, "--diffusion-steps", 9, "--diffusion-block-length", 30, "-t", 1)


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_diffusion(tmp_path_factory.mktemp("canvas") / "llada.gguf", "llada")


@pytest.fixture(scope="module")
def text(llada: Path) -> str:
    """Return the output of the program when stdout is a pipe."""
    return localllm("run", llada, *WORDS, "Hi").stdout.rstrip("\n")


def drawn(written: str) -> list[list[str]]:
    """Return the lines of each frame on the alternate screen: the step count, then the canvas."""
    inside = written[written.index(OPEN) : written.rindex(CLOSE)]
    pictures = [CONTROLS.sub("", part).splitlines() for part in inside.split("\x1b[H") if "step" in part]
    return [[line.rstrip() for line in picture] for picture in pictures]


@pytest.mark.parametrize("columns", [40, 80])
def test_it_settles_on_a_screen_of_its_own(llada: Path, text: str, columns: int) -> None:
    terminal = Terminal("run", llada, *WORDS, "Hi", columns=columns)
    assert terminal.end() == 0
    pictures = drawn(terminal.written)
    assert [picture[0] for picture in pictures] == [f"step {step} of 9" for step in range(10)]
    assert max(len(line) for picture in pictures for line in picture) <= columns
    assert [sum(line.count(MASK) for line in picture) for picture in pictures] == [90 - 10 * step for step in range(10)]
    for before, after in pairwise("".join(picture[1:]) for picture in pictures[3:]):
        assert before[:30] == after[:30]  # tokens of a finished block do not change
    after = terminal.written[terminal.written.rindex(CLOSE) :]
    assert CONTROLS.sub("", after).replace("\r\n", "").strip() == text.strip()
    assert not re.search(f"step|{MASK}", CONTROLS.sub("", after))


def test_a_terminal_that_gets_narrower(llada: Path) -> None:
    terminal = Terminal("run", llada, *WORDS, "--backend", "reference", "Hi", columns=80)
    terminal.wait_for("step 1 of 9")
    terminal.resize(40)
    assert terminal.end() == 0
    first, *_, last = drawn(terminal.written)
    assert len(first[1]) == 80
    assert len(last[1]) <= 40
    assert terminal.written.count(OPEN) == 1


def test_ctrl_c_gives_the_screen_back_and_prints_no_text(llada: Path) -> None:
    terminal = Terminal("run", llada, *WORDS, "--backend", "reference", "Hi", columns=40)
    terminal.wait_for("step 1 of 9")
    terminal.type("\x03")
    assert terminal.end() == 130
    after = terminal.written[terminal.written.rindex(CLOSE) :]
    assert CONTROLS.sub("", after).strip() == ""


@pytest.mark.parametrize(("words", "environ"), [(("--plain",), {}), ((), {"TERM": "dumb"})])
def test_without_a_canvas(llada: Path, text: str, words: tuple[str, ...], environ: dict[str, str]) -> None:
    terminal = Terminal("run", llada, *WORDS, *words, "Hi", columns=80, environ=environ)
    assert terminal.end() == 0
    assert "\x1b" not in terminal.written
    assert terminal.written.replace("\r\n", "\n").rstrip("\n").replace("\n", "") == text.replace("\n", "")


def test_a_canvas_that_does_not_fit_shows_where_tokens_settle() -> None:
    lines = [*("text" for _ in range(10)), f"a{MASK}b", *(MASK for _ in range(9))]
    assert around_first(lines, 20) == lines
    assert around_first(lines, 6) == lines[7:13]
    assert around_first(lines[:10], 4) == ["text"] * 4
    assert around_first([f"{MASK}1", *map(str, range(9))], 3) == [f"{MASK}1", "0", "1"]
    assert around_first([*map(str, range(9)), MASK], 3) == ["7", "8", MASK]
