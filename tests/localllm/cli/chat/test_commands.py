"""Slash commands of `localllm chat`, saved conversations, and continuing a chat after a crash."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.cli.chat.commands import COMMANDS
from localllm.cli.chat.journal import MOST, Journal, last
from localllm.cli.main import main
from tests.localllm.media_models import png, wav, write_pair
from tests.localllm.support import Terminal, localllm, write_model

QUICK = ("-n", "6", "--temp", "0", "-c", "256", "-t", "1")
READY = r">>> $"
Said = Callable[..., tuple[list[str], str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def said(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Return a function that chats through a pipe and returns the answers and stderr."""

    def say(*typed: str, words: tuple[str, ...] = QUICK) -> tuple[list[str], str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in typed)))
        assert main(["chat", str(tiny), *words, "--no-stats"]) == 0
        out, err = capsys.readouterr()
        return out.splitlines(), err

    return say


def test_sampling_and_length_change_in_a_chat(said: Said) -> None:
    hot = ("-s", "1", "--temp", "1.5", "-n", "12", "-c", "256", "-t", "1")
    (greedy,), _ = said("one", words=(*QUICK, "-n", "12"))
    answers, err = said(
        "one", "/clear", "/set temp 0", "one", "/clear", "/set predict 3", "one", "/set TEMP", words=hot
    )
    assert answers[0] != greedy == answers[1]
    assert answers[2] == greedy[: len(answers[2])] < greedy
    assert "temperature is 0.0\n" in err
    assert "predict is 3\n" in err
    assert err.endswith("error: unknown setting 'TEMP'; did you mean temp?\n") or "unknown setting 'TEMP'" in err


def test_the_system_prompt_changes_in_a_chat(said: Said) -> None:
    (before, after), _ = said("one", "/clear", "/set system-prompt Be very brief.", "one")
    (given,), _ = said("one", words=(*QUICK, "-sys", "Be very brief."))
    assert before != after == given


def test_speculation_changes_in_a_chat_and_no_answer(said: Said) -> None:
    words = (*QUICK, "-n", "20", "--ignore-eos")
    (plain,), _ = said("one", words=words)
    typed = ("/set spec ngram", "one", "/clear", "/set spec draft", "/set draft-max 99", "/set spec off", "one")
    answers, err = said(*typed, words=words)
    assert answers == [plain, plain]
    assert "spec is ngram\n" in err
    assert "speculation with a draft model requires one" in err
    assert "note: --draft-max 99: at most 15 tokens are drafted" in err
    assert "spec is off\n" in err


REFUSED = {
    "/set temperatur 0": "error: unknown setting 'temperatur'; did you mean temperature?",
    "/set temp hot": "error: temperature: 'hot' is not a number",
    "/set top-p 2": "error: top-p: 2.0: it must be a number from 0 to 1",
    "/set": "error: wrong usage; write /set NAME [VALUE]",
    "/stats maybe": "error: statistics are on, off or full, not maybe",
    "/sett temp 0": "unknown command /sett; did you mean /set? (a space before / sends the line to the model)",
    "/frobnicate a b": "unknown command /frobnicate; /help lists the commands (a space before / sends the line",
    "/clear now": "error: wrong usage; write /clear alone",
    "/exit now": "error: wrong usage; write /exit alone",
    "/set temp -5": "error: temperature: -5.0: it must be a finite number, 0 or more",
    "/set tmp 1": "error: unknown setting 'tmp'; did you mean temp?",
    "/read /no/such": "error: /no/such: cannot be read: No such file or directory",
    "/read /dev/null": "error: /dev/null: cannot be read: is not a regular file but a device",
    "/save /no/such/talk": "error: no such folder: /no/such; create it first",
    "/copy": "error: nothing to copy yet",
    "/edit": "error: /edit needs a terminal",
}


def test_what_is_wrong_is_said_and_goes_to_no_model(said: Said) -> None:
    answers, err = said(*REFUSED)
    assert answers == []
    for line, (typed, expected) in zip(err.splitlines(), REFUSED.items(), strict=True):
        assert line.startswith(expected), typed


def test_files_tokens_and_paths_in_messages(said: Said, tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("aaa\n")
    answers, err = said(
        f"/read {tmp_path}/a b.txt", "bbb", "/undo", "/tokens aaa", "/etc/hosts is a file", "/tokens", " /set x"
    )
    assert len(answers) == 3  # neither a path nor a line with a leading space is a command
    assert "removed: aaa\\n\\nbbb" in err
    assert "4 tokens" in err.splitlines()
    assert " of 256 tokens of the context are used, user " in err


def test_show_lists_what_is_usual_and_what_was_changed(said: Said) -> None:
    _, err = said("/set top-n-sigma 2", "/show")
    shown = dict(line.split(maxsplit=1) for line in err.splitlines()[1:])
    assert shown["temp" if "temp" in shown else "temperature"] == "0.0"
    assert shown["top-n-sigma"] == "2.0"
    assert shown["system-prompt"] == "none"
    assert "mirostat" not in shown
    assert "xtc-threshold" not in shown


def test_edit_and_copy_in_a_terminal(tiny: Path, said: Said, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'from the editor' > \"$1\"\n")
    editor.chmod(0o755)
    terminal = Terminal("chat", tiny, *QUICK, "--plain", environ={"VISUAL": str(editor)}, columns=100)
    terminal.wait_for(READY)
    terminal.type("/edit\r")
    terminal.wait_for("first token")
    terminal.wait_for(READY)
    terminal.type("/copy\r")
    terminal.wait_for(r"copied \d+ characters")
    terminal.wait_for(READY)
    terminal.type("/undo\r")
    terminal.wait_for("removed: from the editor")
    terminal.type("/bye\r")
    assert terminal.end() == 0
    copied = terminal.written.partition("\x1b]52;c;")[2].partition("\a")[0]
    (answer,), _ = said("from the editor")
    assert base64.b64decode(copied).decode() == answer


def test_every_command_has_help_that_fits(said: Said) -> None:
    _, err = said("/help")
    for command in COMMANDS:
        assert f"{', '.join(command.words)} {command.argument}".strip() in err
    assert max(map(len, err.splitlines())) < 100


# -- saved conversations ---------------------------------------------------------------------------------------------


def test_a_conversation_outlives_a_kill(tiny: Path, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    terminal = Terminal("chat", tiny, *QUICK, environ=state, columns=100)
    terminal.wait_for(READY)
    terminal.type("one\r")
    terminal.wait_for("first token")
    terminal.wait_for(READY)
    terminal.type("two\r")
    terminal.wait_for("first token")
    terminal.wait_for(READY)
    os.kill(terminal.process.pid, signal.SIGKILL)
    terminal.end()
    (kept,) = (tmp_path / "localllm" / "conversations").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    # continues with the saved model
    done = localllm("chat", "--continue", *QUICK, stdin="/undo\nthree\n", environ=state)
    assert done.stderr.startswith("continuing the conversation of now: 2 turns\nremoved: two\n")
    record = json.loads(kept.read_text())
    assert [message["content"] for message in record["messages"][::2]] == ["one", "three"]
    whole = localllm("chat", tiny, *QUICK, stdin="one\nthree\n", environ=state)
    assert done.stdout == whole.stdout.splitlines(keepends=True)[1]
    assert len(list(kept.parent.iterdir())) == 1  # a chat through a pipe is not saved


def test_a_hangup_in_an_answer_keeps_what_was_written(tiny: Path, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    terminal = Terminal("chat", tiny, "-c", "20000", "--ignore-eos", "-t", "1", environ=state, columns=100)
    terminal.wait_for(READY)
    terminal.type("hello\r")
    terminal.wait_for(r"hello\s+\S{40}")
    os.kill(terminal.process.pid, signal.SIGHUP)
    assert terminal.end() == 129
    (kept,) = (tmp_path / "localllm" / "conversations").iterdir()
    question, answer = json.loads(kept.read_text())["messages"]
    assert question["content"] == "hello"
    assert len(answer["content"]) > 40


def test_nothing_to_continue_and_nothing_kept(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["chat", str(tiny), "--continue"]) == 2
    assert capsys.readouterr().err.startswith("error: no conversation to continue; a chat on a terminal is saved")
    assert main(["chat", str(tiny), "--continue", "--prompt-cache", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.endswith("both select a conversation; give one of them\n")
    terminal = Terminal("chat", tiny, *QUICK, "--no-history", columns=100)
    terminal.wait_for(READY)
    terminal.type("one\r")
    terminal.wait_for("first token")
    terminal.type("/bye\r")
    assert terminal.end() == 0
    assert not (tmp_path / "localllm").exists() or not list((tmp_path / "localllm").iterdir())


def test_a_journal_is_bounded_and_skips_damage(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "a\ud800"}, {"role": "assistant", "content": "b"}]
    for number in range(MOST + 3):
        Journal(tmp_path, f"m{number}").keep(turn)
    assert len(list(tmp_path.iterdir())) == MOST
    found = last(tmp_path)
    assert found is not None
    assert (found.model, found.messages) == (f"m{MOST + 2}", turn)
    for number, text in enumerate(("", "[" * 100000, '{"model": 1}', '{"model": "m", "messages": [{"role": "x"}]}')):
        (tmp_path / f"9{number}.json").write_text(text)
    assert last(tmp_path) == found
    one, other = (Journal(tmp_path, name, found) for name in ("one", "other"))
    one.keep(turn * 2)
    other.keep(turn * 3)  # two chats continue one conversation, and both are saved
    kept = [json.loads(path.read_text()) for path in tmp_path.iterdir() if path.name[0] != "9"]
    assert {"one": 4, "other": 6}.items() <= {record["model"]: len(record["messages"]) for record in kept}.items()
    one.keep([])  # all turns undone
    assert not found.path.exists()
    assert last(tmp_path) is not None


@pytest.mark.parametrize("command", ["chat", "run"])
def test_the_place_of_a_prompt_cache_is_checked_before_the_work(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    other = tmp_path / "text"
    other.write_text("mine")
    for place, problem in (
        (tmp_path / "none" / "talk.kv", "no such folder"),
        (tmp_path, "is a folder"),
        (other, "is not a localllm conversation file"),
    ):
        assert main([command, "demo", *(["hi"] if command == "run" else []), "--prompt-cache", str(place)]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)  # only the error, no notes
        assert problem in err
    assert other.read_text() == "mine"


def test_run_without_a_prompt_is_a_chat_with_its_options(tiny: Path, tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text("[chat]\nno-stats = true\nmax-tokens = 5\n[run]\nmax-tokens = 3\nstats = true\n")
    terminal = Terminal("run", tiny, "--config", settings, "--temp", "0", "--plain", columns=100)
    terminal.wait_for(READY)
    terminal.type("one\r")
    terminal.wait_for(READY)
    terminal.type("/show predict\r")
    terminal.wait_for(r"predict is 5:")
    terminal.type("/bye\r")
    assert terminal.end() == 0
    assert "tokens/s" not in terminal.written


# -- pictures ------------------------------------------------------------------------------------------------------


def test_pictures_go_before_the_next_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture, sound = write_pair(tmp_path), tmp_path / "a b.png", tmp_path / "c.wav"
    picture.write_bytes(png())
    sound.write_bytes(wav())
    typed = (
        f"/image {picture}", "what?", "and?", "/undo", "/undo", "/audio x.wav", f"/image {path}", "/tokens aaa",
        f"/image '{picture}'", "/image " + str(picture).replace(" ", "\\ "), f"/audio {picture}", f"/image {sound}",
        "/image 'x",
    )  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in typed)))
    assert main(["chat", str(path), *QUICK, "--no-stats"]) == 0
    answers, err = capsys.readouterr()
    assert len(answers.splitlines()) == 2
    said = err.splitlines()
    marks = len("<start_of_image><end_of_image>") + 2  # letters, because the vocabulary lacks these tokens
    assert f"{picture}: {16 + marks} tokens, added before your next message" in said
    assert f"removed: [{picture}]what?" in said
    assert "error: x.wav: this model reads pictures, no sound" in said
    assert any(line.startswith(f"error: {path}: it is not a picture") for line in said)
    assert "4 tokens" in said  # the conversation continues
    assert said.count(f"{picture}: {16 + marks} tokens, added before your next message") == 3  # as terminals drop paths
    assert f"error: {picture}: is a picture; write /image {picture}" in said
    assert f"error: {sound}: is a sound; write /audio {sound}" in said
    assert said[-1] == "error: 'x: No such file or directory"


def test_dropped_files_go_before_the_next_message(tmp_path: Path) -> None:
    """A terminal pastes their paths, with quotes or backslashes. In a pipe, a path is a message."""
    path, picture, other = write_pair(tmp_path), tmp_path / "a b.png", tmp_path / "c.WAV"
    picture.write_bytes(png())
    other.write_bytes(b"RIFF")
    escaped = str(picture).replace(" ", "\\ ")
    terminal = Terminal("chat", path, *QUICK, "-c", "1024", "--no-stats", "--no-history", columns=400)
    for typed, count, problem in (
        (str(picture), 1, ""), (f"'{picture}' {escaped}", 2, ""), (f"'{picture}' what?", 0, ""), ("none.png", 0, ""),
        (str(other), 0, f"error: {other}: this model reads pictures, no sound"), (f"'{picture}' none.png", 0, ""),
    ):  # fmt: skip
        terminal.wait_for(READY)
        terminal.type(f"{typed}\r")
        said = terminal.wait_for(READY)
        assert said.count(f"{picture}: 48 tokens, added before your next message") == count
        assert problem in said
        terminal.type("\r")
    terminal.type("/bye\r")
    assert terminal.end() == 0
    done = localllm("chat", path, *QUICK, "-c", "1024", "--no-stats", stdin=f"{picture}\n")
    assert "added before" not in done.stderr


def test_a_continued_chat_has_its_pictures(tmp_path: Path) -> None:
    """Without the file, which may be gone."""
    path, picture, state = write_pair(tmp_path), tmp_path / "a.png", {"XDG_STATE_HOME": str(tmp_path / "state")}
    picture.write_bytes(png())
    terminal = Terminal("chat", path, *QUICK, environ=state, columns=100)
    terminal.wait_for(READY)
    terminal.type(f"/image {picture}\r")
    terminal.wait_for(r"next\s+message")
    terminal.type("what?\r")
    terminal.wait_for("first token")
    terminal.wait_for(READY)
    os.kill(terminal.process.pid, signal.SIGKILL)
    terminal.end()
    picture.unlink()
    kept = next((tmp_path / "state" / "localllm" / "conversations").glob("*.json"))
    asked = f"[{picture}]what?"
    assert json.loads(kept.read_text())["messages"][0]["content"] == asked
    done = localllm("chat", "--continue", *QUICK, stdin=f"and?\n/save {tmp_path}/x.kv\n", environ=state)
    name_only = localllm("chat", path, *QUICK, stdin=f"{asked}\nand?\n")
    counts = [int(re.findall(r"(\d+) of 256 tokens", found.stderr)[-1]) for found in (done, name_only)]
    assert counts[0] != counts[1]
    loaded = localllm("chat", path, *QUICK, stdin=f"/load {tmp_path}/x.kv\n/undo\nand?\n")
    assert loaded.stdout == done.stdout
    assert "removed: and?" in loaded.stderr
    content = next(kept.parent.glob("*.media/*"))
    content.unlink()
    again = localllm("chat", "--continue", *QUICK, stdin=f"/save {tmp_path}/y.kv\n", environ=state)
    assert f"note: one picture or sound is not in {tmp_path}/y.kv: {picture}: its content is missing\n" in again.stderr
    assert f"note: one picture or sound is kept as a name only: {picture}: its content is missing\n" in again.stderr


def test_run_takes_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, picture, sound, unknown = write_pair(tmp_path), *(tmp_path / name for name in ("a.png", "b.wav", "c.wav"))
    picture.write_bytes(png())
    sound.write_bytes(wav())
    unknown.write_bytes(b"nonsense")
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def prompt_of(*words: str) -> int:
        assert main(["run", str(path), *QUICK, "-v", "--ignore-eos", *words]) == 0
        found = re.search(r"prompt (\d+)", capsys.readouterr().err)
        assert found
        return int(found[1])

    alone = prompt_of("hi", "--raw")
    one, two = (prompt_of("hi", "--raw", *["--image", str(picture)] * count) for count in (1, 2))
    assert one - alone > 16
    assert two - one == one - alone
    assert prompt_of("h<__media__>i", "--raw", "--image", str(picture)) > alone + 16
    assert prompt_of("hi", "--image", str(picture)) > prompt_of("hi") + 16
    for words, code, problem in (
        (["--image", str(tmp_path / "none.png")], 1, "none.png: No such file or directory"),
        (["--audio", str(unknown)], 1, "this model reads pictures, no sound"),
        (["--audio", str(picture)], 2, f"--audio {picture}: is a picture; use --image {picture}"),
        (["--image", str(picture), "--image", str(sound)], 2, f"--image {sound}: is a sound; use --audio {sound}"),
        (["--mmproj", "off", "--image", str(picture)], 1, "loaded without encoders of pictures and sound"),
    ):
        assert main(["run", str(path), "hi", *QUICK, *words]) == code, problem
        err = capsys.readouterr().err
        assert problem in err
        assert "Traceback" not in err
