"""The chat's line editor on a pseudo-terminal: keys, pastes, history, signals."""

from __future__ import annotations

import os
import re
import signal
import stat
import termios
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest

from localllm.cli.chat.entry import is_open, unquoted
from localllm.cli.chat.history import MOST, HistoryFile
from tests.localllm.support import Terminal, write_model

QUICK = ("-n", "4", "--temp", "0", "-c", "128", "-t", "1")
ENDLESS = ("-c", "20000", "--ignore-eos", "-t", "1")
ENTER, CTRL_C, CTRL_D, CTRL_R, CTRL_Z = "\r", "\x03", "\x04", "\x12", "\x1a"
READY = r">>> $"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def talk(tiny: Path) -> Iterator[Terminal]:
    """A chat shared by several tests. Each test starts and ends at an empty prompt."""
    terminal = Terminal("chat", tiny, *QUICK, columns=100)
    assert re.search(r"tiny\.gguf: 0\.\d+M parameters, a context of 128 tokens", terminal.wait_for(READY))
    yield terminal
    terminal.type("/bye" + ENTER)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.written


def used(terminal: Terminal) -> int:
    """Return the number of complete answers."""
    return terminal.written.count("first token")


@pytest.mark.parametrize("paste", [True, False])
def test_a_message_of_several_lines_is_one_turn(talk: Terminal, paste: bool) -> None:
    before = used(talk)
    if paste:
        talk.type("\x1b[200~def f():\n\treturn 1\n\nf()\x1b[201~")
    else:
        talk.type('"""one' + ENTER + "two" + ENTER + 'three"""')
    talk.type(ENTER)
    talk.wait_for("of 128 tokens")
    talk.wait_for(READY)
    talk.type("/undo" + ENTER)
    talk.wait_for(r"removed: def f\(\):\\n\\treturn 1\\n\\nf\(\)" if paste else r"removed: one\\ntwo\\nthree")
    talk.wait_for(READY)
    assert used(talk) == before + 1


def test_a_backslash_continues_a_line(talk: Terminal) -> None:
    talk.type("one\\" + ENTER)
    talk.wait_for(r"\.\.\. ")
    talk.type("two" + ENTER)
    talk.wait_for("of 128 tokens")
    talk.wait_for(READY)
    talk.type("/undo" + ENTER)
    talk.wait_for(r"removed: one\\ntwo")
    talk.wait_for(READY)


def test_ctrl_c_clears_the_line_and_says_then_how_to_leave(talk: Terminal) -> None:
    before = used(talk)
    talk.type("never sent")
    talk.wait_for("sent")
    talk.type(CTRL_C + CTRL_C)
    talk.wait_for("Ctrl-D or /bye leaves")
    talk.type("/tokens one" + ENTER)
    talk.wait_for(r"\d tokens")
    talk.wait_for(READY)
    assert used(talk) == before


def test_commands_and_paths_complete(talk: Terminal, tmp_path: Path) -> None:
    (tmp_path / "a-text.txt").write_text("hello")
    talk.type("/he\t")
    talk.wait_for("/help")
    talk.type(ENTER)
    talk.wait_for("show this list")
    talk.wait_for(READY)
    talk.type(f"/read {tmp_path}/a-t\t")
    talk.wait_for(r"a-text\.txt")
    talk.type(ENTER)
    talk.wait_for(r"a-text\.txt:\s+\d+\s+tokens,\s+added\s+before")
    talk.wait_for(READY)
    talk.type("/set top-\t")
    talk.wait_for("top-n-sigma")  # completion menu
    talk.type(CTRL_C + CTRL_C)
    talk.wait_for("leaves")
    talk.wait_for(READY)


def test_a_terminal_changes_its_width(talk: Terminal) -> None:
    talk.type("/tokens " + "one " * 15 + "end")
    talk.wait_for("one end")
    talk.resize(40)
    talk.wait_for(r"(?s)>>> /tokens one.*one end")  # the line is redrawn at the new width
    talk.type(" two" + ENTER)
    talk.wait_for(r"\d tokens")
    talk.wait_for(READY)
    talk.resize(100)
    talk.type("/help" + ENTER)
    talk.wait_for("show this list")
    talk.wait_for(READY)


def test_a_message_that_does_not_fit_returns_to_the_prompt(talk: Terminal) -> None:
    talk.type("begin " + "one " * 150 + "end" + ENTER)
    talk.wait_for(r"the context holds 128; shorten it")
    talk.wait_for(r"(?s)begin one.*one end$")
    talk.type(CTRL_C)  # clears the line
    talk.type("short" + ENTER)
    talk.wait_for("of 128 tokens")
    talk.wait_for(READY)
    talk.type("/undo" + ENTER)
    talk.wait_for("removed: short")
    talk.wait_for(READY)


def test_ctrl_z_suspends_and_fg_goes_on(tiny: Path) -> None:
    terminal = Terminal("chat", tiny, *ENDLESS, columns=100, shell=True)
    terminal.wait_for(READY)
    terminal.type("/tok")
    terminal.wait_for("/tok")
    terminal.type(CTRL_Z)  # while editing the prompt
    terminal.wait_for(r"\$ $")
    terminal.type("echo back$((40+2)); fg\n")
    terminal.wait_for("back42")
    terminal.wait_for(">>> /tok")
    terminal.type("ens one" + ENTER)
    terminal.wait_for(r"\d tokens")
    terminal.wait_for(READY)
    terminal.type("hello" + ENTER)
    terminal.wait_for(r"hello\s+(\S\s*){99}")  # random text may have a line break
    terminal.type(CTRL_Z)  # while an answer streams
    terminal.wait_for(r"\$ $")
    assert termios.tcgetattr(terminal.master)[3] & termios.ECHO
    terminal.type("fg\n")
    terminal.wait_for(r"\S{99}")
    assert not termios.tcgetattr(terminal.master)[3] & termios.ECHO
    terminal.type(CTRL_C)
    terminal.wait_for("of 20000 tokens")
    terminal.wait_for(READY)
    terminal.type(CTRL_D)
    terminal.wait_for(r"\$ $")
    terminal.type("exit\n")
    terminal.end()


def test_an_answer_is_stopped_and_shows_no_keys(tiny: Path) -> None:
    terminal = Terminal("chat", tiny, *ENDLESS, "--plain", columns=100)
    terminal.wait_for(READY)
    terminal.type("hello" + ENTER)
    terminal.wait_for(r"hello\s+\S{40}")
    assert not termios.tcgetattr(terminal.master)[3] & termios.ECHO
    terminal.type("/tokens one")  # typed ahead of the prompt
    terminal.wait_for(r"\S{40}")
    terminal.type(CTRL_C)
    terminal.wait_for("of 20000 tokens")
    terminal.wait_for(r">>> .*/tokens one")
    terminal.type(ENTER)
    terminal.wait_for(r"\d tokens")
    terminal.wait_for(READY)
    terminal.type(CTRL_D)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.written


def test_messages_are_found_again_in_another_session(tiny: Path, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    first = Terminal("chat", tiny, *QUICK, environ=state, columns=100)
    first.wait_for(READY)
    first.type("/tokens unforgettable" + ENTER)
    first.wait_for(r"\d tokens")
    first.wait_for(READY)
    first.type(CTRL_D)
    assert first.end() == 0
    kept = tmp_path / "localllm" / "history.jsonl"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    second = Terminal("chat", tiny, *QUICK, environ=state, columns=100)
    second.wait_for(READY)
    second.type(CTRL_R + "FORGETT")
    second.wait_for("unforgettable")
    second.type(ENTER)
    second.wait_for(">>>")
    second.type(ENTER)
    second.wait_for(r"\d tokens")
    os.kill(second.process.pid, signal.SIGTERM)
    assert second.end() == 143


def test_a_dumb_terminal_has_plain_lines(tiny: Path) -> None:
    terminal = Terminal("chat", tiny, *QUICK, environ={"TERM": "dumb"}, columns=100)
    terminal.wait_for(READY)
    terminal.type('"""one\ntwo"""\n')
    terminal.wait_for("first token")
    terminal.wait_for(READY)
    terminal.type("/undo\n")
    terminal.wait_for(r"removed: one\\ntwo")
    terminal.type("half")
    sleep(0.1)
    terminal.type(CTRL_C)
    terminal.wait_for("Ctrl-D or /bye leaves")
    terminal.wait_for(READY)
    terminal.type(CTRL_D)
    assert terminal.end() == 0
    assert "\x1b" not in terminal.written


@pytest.mark.parametrize(
    ("text", "open_", "message"),
    [
        ('"""one', True, '"""one'),
        ('"""one\ntwo"""', False, "one\ntwo"),
        ('"""a""" b', False, '"""a""" b'),
        ('say """', False, 'say """'),
        ('"""a""" or """b"""', False, '"""a""" or """b"""'),
    ],
)
def test_triple_quotes_stand_around_a_message(text: str, open_: bool, message: str) -> None:
    assert is_open(text) == open_
    assert unquoted(text) == message


def test_a_history_file_is_bounded_and_survives_damage(tmp_path: Path) -> None:
    kept = HistoryFile(tmp_path / "h.jsonl")
    kept.add("one\ntwo")
    with (tmp_path / "h.jsonl").open("ab") as file:
        file.write(b'\xff\n{"a": 1}\n[[[\n' + b'"old"\n' * (2 * MOST))
    assert kept.messages() == ["old"] * MOST
    assert (tmp_path / "h.jsonl").stat().st_size == len(b'"old"\n') * MOST
    kept.add("new")
    assert kept.messages()[-1] == "new"


def test_ctrl_c_after_an_answer_does_not_end_the_chat(tiny: Path) -> None:
    terminal = Terminal("chat", tiny, *QUICK, "-c", "512", columns=100)
    terminal.wait_for(READY)
    for _ in range(4):
        terminal.type("hello" + ENTER)
        terminal.wait_for("first token")  # answer complete, next prompt not yet shown
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.wait_for(READY)
    terminal.type("/bye" + ENTER)
    assert terminal.end() == 0
