"""The default model: `config set`, the commands that use it, and prompts in the place of MODEL."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli.configuration import filled
from localllm.cli.main import main
from localllm.cli.naming import is_prompt
from localllm.cli.table import COMMANDS
from tests.localllm.cli.shell import Shell
from tests.localllm.cli.user import User
from tests.localllm.support import REPOSITORY, Terminal, localllm, write_model

QUICK = ("-n", "2", "--temp", "0", "-t", "1")
NOTE = "note: no default model, so the bundled toy (demo) answers; `localllm pull` finds a real one\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


# -- prompts and models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [
        "Why is the sky blue?",
        "Hello!",
        "2+2=",
        "你好吗",
        "café",
        "~5 km in miles",
        "a/b, c/d or e/f/g/h?",
        "x y" * 9999,
    ],
)
def test_a_text_that_no_name_can_be_is_a_prompt(word: str) -> None:
    assert is_prompt(word)


@pytest.mark.parametrize(
    "word",
    [
        "typo.gguf",
        "my typo.gguf",
        "./some model",
        "/no such/file",
        "lama3.2",
        "llama3.2:1b",
        "ann/Toy-GGUF:Q8",
        "Hello",
    ],
)
def test_a_misspelled_name_is_no_prompt(word: str) -> None:
    assert not is_prompt(word)


def test_a_file_is_no_prompt_whatever_its_name_is(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "why? (1)").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    assert not is_prompt("why? (1)")
    assert is_prompt("why? (2)")


def test_run_without_a_model_asks_the_default_model(user: User, tiny: Path, shell: Shell) -> None:
    named = shell("run", tiny, "Why is it so?", *QUICK)
    assert named[0] == 0
    bundled = shell("run", "Why is it so?", *QUICK)
    assert bundled[2] == NOTE
    assert bundled[1] != named[1]
    user.has(f'model = "{tiny}"')
    assert shell("run", "Why is it so?", *QUICK) == named
    assert shell("run", "-p", "Why is it so?", *QUICK) == named
    assert shell("run", *QUICK, stdin="Why is it so?\n") == named
    assert shell("run", "Why is", "it so?", *QUICK) == named
    assert shell("chat", *QUICK, "--no-stats", stdin="Why is it so?\n") == named
    assert shell("run", "demo", "Why is it so?", *QUICK)[1] == bundled[1]
    user.has('model = "demo"\n[run]\nmodel = "' + str(tiny) + '"')  # the table of a command comes first
    assert shell("run", "Why is it so?", *QUICK) == named


def test_a_misspelled_model_never_reaches_the_default_model(user: User, tiny: Path, shell: Shell) -> None:
    user.has(f'model = "{tiny}"')
    assert shell("run", "typo.gguf", "hi") == (1, "", "error: No such file: typo.gguf\n")
    code, out, err = shell("run", "Hello", *QUICK)
    assert (code, out) == (1, "")
    assert err.startswith("error: No such file or model: Hello; ")
    assert err.endswith("; -p Hello makes it a prompt\n")
    assert shell("run", "/no such/file", "hi")[:2] == (1, "")


def test_run_with_a_prompt_opens_no_chat_on_a_terminal(tiny: Path) -> None:
    terminal = Terminal("run", "Why is it so?", *QUICK, environ={"LOCALLLM_MODEL": str(tiny)})
    assert terminal.end() == 0
    assert ">>>" not in terminal.written


def test_other_commands_use_the_default_model(user: User, tiny: Path, shell: Shell) -> None:
    user.has(f'model = "{tiny}"')
    code, out, _ = shell("explain", "Why is it so?", "--json", *QUICK)
    assert code == 0
    assert json.loads(out)["model"] == "tiny.gguf"
    assert json.loads(shell("show", "--json")[1])["file"] == str(tiny)
    code, out, _ = shell("bench", "-p", "0", "-n", "2", "-r", "1", "-o", "json", "-t", "1")
    assert code == 0
    assert json.loads(out)[0]["model_filename"] == str(tiny)
    for words in (("serve",), ("web",)):
        line = filled(COMMANDS, line_of(*words))
        assert line.values["default_model"] == str(tiny)
        assert "model" not in line.values  # a server offers the others too
    user.has("", MODEL=str(tiny))
    assert filled(COMMANDS, line_of("serve")).values["default_model"] == str(tiny)
    user.has("")
    assert filled(COMMANDS, line_of("serve")).values["default_model"] == ""
    assert shell("bench") == (
        2, "", "error: MODEL is required: give a GGUF file or a name, or demo for the bundled model\n",
    )  # fmt: skip


def line_of(*words: str):  # type: ignore[no-untyped-def]
    from localllm.cli.app import read_command_line

    line = read_command_line(COMMANDS, words)
    assert line is not None
    return line


# -- config set and unset --------------------------------------------------------------------------------------------

FILE = """# my settings
threads = 2  # "two" # threads
system-prompt = \"\"\"
Be brief. # not a comment
\"\"\" # a comment

# for chats
[chat]
no-history = true

[presets.pirate]
temperature = 1.0
"""


@pytest.mark.parametrize(
    ("words", "old", "new"),
    [
        (("set", "threads", "4"), "threads = 2  #", "threads = 4  #"),
        (("set", "system-prompt", 'Say "hi" # \\'), '"""\nBe brief. # not a comment\n"""', '"Say \\"hi\\" # \\\\"'),
        (("set", "system_prompt", "é"), '"""\nBe brief. # not a comment\n"""', '"é"'),
        (("set", "model", "demo"), '""" # a comment\n', '""" # a comment\nmodel = "demo"\n'),
        (("set", "chat.no-history", "off"), "no-history = true", "no-history = false"),
        (("set", "chat.context-shift", "on"), "no-history = true\n", "no-history = true\ncontext-shift = true\n"),
        (("set", "run.ctx-size", "512"), "temperature = 1.0\n", "temperature = 1.0\n\n[run]\nctx-size = 512\n"),
        (("set", "temp", "0.5"), '""" # a comment\n', '""" # a comment\ntemperature = 0.5\n'),
        (("set", "predict", "-1"), '""" # a comment\n', '""" # a comment\npredict = -1\n'),
        (("unset", "threads"), 'threads = 2  # "two" # threads\n', ""),
        (("unset", "chat.no-history"), "no-history = true\n", ""),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_change_leaves_the_rest_of_the_file(
    user: User, shell: Shell, words: tuple[str, ...], old: str, new: str, ending: str
) -> None:
    assert FILE.count(old) == 1
    given = "\ufeff" + FILE if ending == "\r\n" else FILE
    user.path.write_bytes(given.replace("\n", ending).encode())
    os.chmod(user.path, 0o600)
    code, out, err = shell("config", words[0], "--", *words[1:])
    assert (code, err) == (0, "")
    assert out.startswith(f"{user.path}: ")
    assert user.path.read_bytes().decode() == given.replace(old, new).replace("\n", ending)
    assert stat.S_IMODE(user.path.stat().st_mode) == 0o600
    assert main(["config", "check"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("set", "model", "nothing"), 1, "No such file or model: nothing; "),
        (("set", "model", "typo.gguf"), 1, "No such file: typo.gguf"),
        (("set", "model", "qwen3:4b"), 1, "`localllm pull qwen3:4b` downloads it"),
        (("set", "modle", "demo"), 2, "unknown option modle; did you mean model?"),
        (("set", "threads", "many"), 2, "threads: "),
        (("set", "threads", "1", "2"), 2, "expected one value for threads, got 2"),
        (("set", "model"), 2, "expected KEY and VALUE"),
        (("set",), 2, "expected KEY and VALUE"),
        (("unset",), 2, "expected one KEY"),
        (("set", "port", "80"), 2, "it belongs in [serve]"),
        (("set", "nix.port", "80"), 2, "nix.port: no command nix has a table"),
        (("set", "preset", "none"), 2, "unknown preset 'none'"),
        (("set", "force", "on"), 2, "force cannot be configured; give it on the command line"),
        (("sett", "model", "x"), 2, "got 'sett model x'"),
    ],
)
def test_a_wrong_change_is_one_line_and_changes_nothing(
    user: User, shell: Shell, words: tuple[str, ...], code: int, told: str
) -> None:
    user.path.write_text(FILE)
    found = shell("config", *words)
    assert found[:2] == (code, "")
    assert told in found[2]
    assert found[2].count("\n") == 1
    assert user.path.read_text() == FILE


def test_a_value_in_an_inline_table_is_left_to_the_user(user: User, shell: Shell) -> None:
    user.has("chat = { no-history = true }\n")
    code, _, err = shell("config", "set", "chat.no-history", "off")
    assert (code, err) == (2, f"error: {user.path}:1: no-history cannot be changed here; edit the file\n")
    assert user.path.read_text() == "chat = { no-history = true }\n"


def test_the_first_change_makes_the_file(
    tiny: Path, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_CONFIG", str(tmp_path / "new/folder/config.toml"))
    monkeypatch.chdir(tiny.parent)
    assert shell("config", "set", "model", "tiny.gguf")[0] == 0  # a relative path lasts
    assert (tmp_path / "new/folder/config.toml").read_text() == f'model = "{tiny}"\n'
    assert shell("config")[1].split("\n")[1] == f"default model: {tiny}"
    assert json.loads(shell("config", "--json")[1])["model"] == str(tiny)
    assert shell("config", "unset", "model")[0] == 0
    assert shell("config", "unset", "model")[1].endswith("config.toml: model was not set\n")


def test_a_link_stays_a_link(user: User, shell: Shell, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text("threads = 1\n")
    user.path.unlink()
    user.path.symlink_to(real)
    assert shell("config", "set", "threads", "2")[0] == 0
    assert user.path.is_symlink()
    assert real.read_text() == "threads = 2\n"


def test_a_change_that_a_variable_hides_is_told(user: User, shell: Shell) -> None:
    user.has("", THREADS="3")
    assert shell("config", "set", "threads", "2")[2] == "note: LOCALLLM_THREADS comes first\n"


def test_a_folder_that_cannot_be_written_is_told(user: User, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    monkeypatch.setenv("LOCALLLM_CONFIG", "/dev/null/config.toml")
    code, out, err = shell("config", "set", "threads", "2")
    assert code in (1, 2)
    assert (out, err.count("\n")) == ("", 1)
    done = localllm("config", "set", "threads", "2", environ={"LOCALLLM_CONFIG": "/dev/full"})
    assert done.returncode == 1
    assert "/dev/full" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")
def test_changes_at_the_same_time_are_all_kept(tmp_path: Path, user: User) -> None:
    """Each process waits between reading and writing, so that all would read the file before the first writes."""
    path = tmp_path / "config.toml"
    keys = ("ctx-size", "seed", "threads", "top-k", "repeat-last-n", "max-tokens")
    code = (
        "import sys, time; from localllm.cli.commands import config_set as it; changed = it.changed;"
        "it.changed = lambda *given: (time.sleep(0.1), changed(*given))[1];"
        "print(it.set_option(sys.argv[1], sys.argv[2], '7'))"
    )
    words = [[sys.executable, "-c", code, str(path), key] for key in keys]
    path.write_text("")
    running = [subprocess.Popen(each, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) for each in words]
    for each in running:
        assert (each.wait(60), each.communicate()[1]) == (0, "")
    assert len(path.read_text().splitlines()) == len(keys)


def test_a_value_that_is_not_text_is_refused(tmp_path: Path, user: User, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text("")
    assert main(["config", "set", "--config", str(path), "system-prompt", "a\udcff"]) == 2
    assert capsys.readouterr().err == "error: system-prompt: a\\udcff is not UTF-8 text; the file needs it\n"
