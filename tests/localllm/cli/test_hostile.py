"""Every command on files full of control sequences: none of them reaches the terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

from localllm.base.printable import printable
from localllm.cli.table import COMMANDS
from localllm.cli.terminal import console
from localllm.gguf import NewTensor, open_gguf, write_gguf
from tests.localllm.support import CHATML, REPOSITORY, SPECIAL, write_model

NAME = "\x1b]0;PWNED\x07\x1b[31m\r\b\x7f\x9b2J\u202e\u2066\nevil"  # name of files, keys and tensors
TEXT = NAME + "\udcff"  # string value, which may hold any bytes
SHORT = "\x1b[2J\r\x9b\u202ee"  # text of tokens
ANSWERS = ("chat", "run")  # commands that write the model's raw text to a pipe

# Run command lines in one process, each with its arguments and its stdin. With --pipe, discard the output of ANSWERS.
DRIVER = """
import io, json, os, sys
from localllm.cli.main import main
pipe = sys.argv[1] == "--pipe"
for words, typed in json.load(open(sys.argv[2])):
    sys.stdin = io.StringIO(typed)
    out = os.dup(1)
    if pipe and words[0] in json.loads(sys.argv[3]):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code = main(words)
    sys.stdout.flush()
    os.dup2(out, 1)
    print("code", code)
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the hostile files, and return a JSON file with the command lines."""
    folder = tmp_path_factory.mktemp("hostile") / NAME
    folder.mkdir()
    text = folder / f"{NAME}.txt"
    text.write_text("one two three " * 200)
    model, out = _model(folder / f"{NAME}.gguf", CHATML), folder / f"{NAME}.out"
    raising = _model(folder / f"{NAME}-raising.gguf", "{{ raise_exception(" + repr(SHORT) + ") }}")
    unknown = _model(folder / "unknown.gguf", CHATML, {"general.architecture": TEXT})
    bytewise = _model(folder / "bytes.gguf", CHATML, {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": TEXT})
    strange = _model(folder / "strange.gguf", CHATML, {"tokenizer.ggml.model": TEXT, "general.sampling.temp": TEXT})
    settings, wrong = folder / f"{NAME}.toml", folder / f"{NAME}-wrong.toml"
    key, value = (json.dumps(text).replace("\x7f", "\\u007f") for text in (NAME, SHORT))
    settings.write_text(
        f"preset = {value}\nsystem-prompt = {value}\n[presets.{key}]\n[presets.{value}]\nstop = {value}\n"
    )
    wrong.write_text(f"{key} = 1\n")
    typed = f"hello\n/nonsense\n/help\n{SHORT}\n/save {out}-chat\n/load {out}-chat\n/load {text}\n/undo\n"
    small, measured = ["-c", 64, "-n", 12], ["-f", text, "-c", 16, "--chunks", 2]
    commands: list[tuple[list[object], str]] = [
        *(
            (["show", path, *more], "")
            for path in (model, raising, unknown, bytewise, strange)
            for more in ([], ["--json"])
        ),
        (["show", model, "--tensors"], ""),
        (["chat", model, *small], typed),
        (["chat", raising, *small], "hello\n"),
        (["run", model, SHORT, "--stats", *small], ""),
        (["run", model, "--raw", "hi", *small, "--prompt-cache", f"{out}-cache"], ""),
        (["run", model, "hi", *small, "--prompt-cache", text], ""),
        *((["run", path, "hi", *small], "") for path in (raising, unknown, bytewise, strange, text, folder / NAME)),
        *((["run", path, "hi", *small, "--debug"], "") for path in (raising, unknown, text)),
        *((["bench", model, "-p", 4, "-n", 4, "-r", 1, "-o", form], "") for form in ("md", "json", "csv")),
        (["perplexity", model, *measured], ""),
        (["perplexity", model, *measured, "--json"], ""),
        (["perplexity", model, *measured, "--save-base", f"{out}-base"], ""),
        (["imatrix", model, *measured, "-o", f"{out}-imatrix", "--force"], ""),
        (["quantize", model, "Q4_0", "--dry-run"], ""),
        (["quantize", model, "Q4_K_M", "--dry-run", "--imatrix", f"{out}-imatrix"], ""),
        (["quantize", model, f"{out}-q8", "Q4_0", "--force", "--allow-requantize", "--report", *measured[:2]], ""),
        (["quantize", folder, f"{out}-hf", "Q8_0"], ""),
        (["quantize", model, model, "Q8_0"], ""),
        (["quantize", model, SHORT], ""),
        (["devices", "--json"], ""),
        (["devices"], ""),
        *((["config", *more, "--config", settings], "") for more in ([], ["chat"], ["--json"], ["check"])),
        *((["config", "--config", path], "") for path in (wrong, model, f"{out}-none")),
        (["run", model, "hi", "--preset", SHORT], ""),
        ([SHORT], ""),
        ([f"--{SHORT}"], ""),
        *(([name, model, f"--{SHORT}"], "") for name in COMMANDS),
        *(([name, model, "-t", SHORT], "") for name in COMMANDS if name != "show"),
        *(([name, "--help"], "") for name in COMMANDS),
    ]
    path = tmp_path_factory.mktemp("lines") / "lines.json"
    path.write_text(json.dumps([([str(word) for word in words], typed) for words, typed in commands]))
    return path


def _model(path: Path, template: str, extra: dict[str, object] | None = None) -> Path:
    """Write a runnable model with an unused tensor. All its strings and its output contain control sequences."""
    plain = write_model(path.parent / "plain.gguf", template=template + TEXT)
    with open_gguf(plain) as file:
        keys = dict(file.stored)
        tokens = list(file.metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
        ends = len(SPECIAL) + 256 + 1
        tokens[ends:] = [f"{token}{SHORT}" for token in tokens[ends:]]
        keys |= {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.pre": TEXT,
            "general.name": TEXT,
            "general.description": TEXT * 40,
            f"{NAME}.key": TEXT,
            f"{NAME}.list": [TEXT, TEXT],
            "general.sampling.temp": TEXT,
            **(extra or {}),
        }
        tensors = [NewTensor(t.name, t.format, t.shape, t.read(0, t.rows)) for t in file.tensors.values()]
        tensors.append(NewTensor(f"{NAME}.weight", "F32", (8,), np.ones(8, np.float32).tobytes()))
        write_gguf(path, keys, tensors)
    plain.unlink()
    return path


def _check(output: bytes, commands: int) -> None:
    assert output.count(b"code ") >= commands
    text = output.decode()
    assert set(text) - {"\n", "\t"} == set(printable(text, None, "\n\t")) - {"\n", "\t"}
    assert min(set(output) - set(b"\n\t")) >= 0x20
    assert output.count(b"PWNED") > 20  # names are shown escaped
    assert not output.startswith(b"evil")
    assert b"\nevil" not in output  # no name can start a line


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_while_bars_are_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control sequences in output and in messages stay escaped while a progress bar is drawn."""
    monkeypatch.setattr(console, "BAR_AFTER", 0.0)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for stdout in (_Screen(), io.StringIO()):
        stderr = _Screen()
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        with console.guarded(), console.LoadProgress() as progress:
            progress(f"[red]{NAME}", 1, 10)
            print(f"out {NAME}")
            print(f"error {NAME}", file=sys.stderr)
            console.say(f"said {NAME}")
        assert (sys.stdout, sys.stderr) == (stdout, stderr)
        shown, escaped = stderr.getvalue() + stdout.getvalue(), printable(NAME)
        assert "[red]" in shown
        assert f"said {escaped}" in shown
        for found in ("\x1b]0;", "\x1b[31m\r", "\b", "\x7f", "\x9b", "\u202e"):
            assert found not in shown
        where = stderr if stdout.isatty() else stdout  # above the bar, or in the redirected stdout
        assert "out \\x1b]0;PWNED" in where.getvalue()


def test_in_a_pipe(lines: Path) -> None:
    words = [sys.executable, "-c", DRIVER, "--pipe", str(lines), json.dumps(ANSWERS)]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=REPOSITORY, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:]
    _check(done.stdout, len(json.loads(lines.read_text())))


def test_on_a_terminal(lines: Path) -> None:
    """On a terminal, no control sequence of a file is written.

    Colours and bars are off, because they use control sequences.
    """
    master, slave = pty.openpty()
    settings = termios.tcgetattr(slave)
    settings[1] &= ~termios.OPOST  # no translation of newlines
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    words = [sys.executable, "-c", DRIVER, "--terminal", str(lines)]
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, cwd=REPOSITORY, env=environment)
    os.close(slave)
    output = b""
    while True:
        try:
            output += os.read(master, 1 << 16)
        except OSError:  # all writers have closed the terminal
            break
    os.close(master)
    assert process.wait(60) == 0, output[-2000:]
    _check(output, len(json.loads(lines.read_text())))
    assert output.count(b"\\x1b[2J\\r\\x9b\\u202e") > 20  # the model's output is escaped, too
