"""How `run` builds the prompt: a system prompt from a file, another chat template, and text from stdin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.localllm.cli.shell import Shell
from tests.localllm.support import CHATML, write_model

OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
QUICK = ("-n", "8", "--temp", "0")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


class Asking(Shell):
    """Base class: a helper that asks a model."""

    def asks(self, command: str, model: Path, *words: object) -> str:
        """Return the model's answer to "hi"."""
        own, stdin = (["--no-stats"], "hi\n") if command == "chat" else (["hi"], "")
        code, out, err = self(command, model, *own, *QUICK, *words, stdin=stdin)
        assert (code, err) == (0, "")
        return out


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Asking:
    return Asking(capsys, monkeypatch)


@pytest.mark.parametrize("command", ["run", "chat"])
def test_instructions_come_from_a_file(shell: Asking, tiny: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "system.txt").write_text("Be brief.\nBe kind.\n")
    told = shell.asks(command, tiny, "-sys", "Be brief.\nBe kind.")
    assert shell.asks(command, tiny, "-sysf", tmp_path / "system.txt") == told
    assert shell.asks(command, tiny, "--system-prompt-file", tmp_path / "system.txt") == told
    assert told != shell.asks(command, tiny)


def test_wrong_files_of_instructions(shell: Asking, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    for name, told in (("none.txt", "cannot be read: No such file or directory"), ("empty.txt", "is empty")):
        code, out, err = shell("run", tiny, "hi", "-sysf", tmp_path / name)
        assert (code, out, err) == (1, "", f"error: {tmp_path / name}: the system prompt {told}\n")
    code, _, err = shell("run", tiny, "hi", "-sysf", "f", "-sys", "Hi")
    assert code == 1
    assert err == "error: -sys/--system-prompt and -sysf/--system-prompt-file exclude each other; give one\n"


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_given_template_replaces_that_of_the_file(shell: Asking, tiny: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "other.jinja").write_text(OTHER)
    own = write_model(tmp_path / "own.gguf", template=OTHER)
    told, usual = shell.asks(command, own), shell.asks(command, tiny)
    assert told != usual
    assert shell.asks(command, tiny, "--chat-template", tmp_path / "other.jinja") == told
    assert shell.asks(command, tiny, "--chat-template-file", tmp_path / "other.jinja") == told
    assert shell.asks(command, tiny, "--chat-template", OTHER) == told
    assert shell.asks(command, own, "--chat-template", "chatml") == shell.asks(command, own, "--chat-template", CHATML)
    assert shell.asks(command, own, "--chat-template", "chatml") == usual
    assert shell.asks(command, tiny, "--chat-template", "plain") not in (told, usual)


def test_wrong_templates(shell: Asking, tiny: Path) -> None:
    code, out, err = shell("run", tiny, "hi", "--chat-template", "chatlm")
    assert (code, out) == (1, "")
    assert err.startswith("error: 'chatlm' is not a chat template: give a file, a Jinja text, or one of llama3, chatml")
    code, out, err = shell("run", tiny, "hi", "--chat-template", "{% if %}")
    assert (code, out, err.count("\n")) == (1, "", 1)


def test_a_prompt_comes_from_standard_input(shell: Asking, tiny: Path) -> None:
    told = shell("run", tiny, "one\ntwo", *QUICK)
    assert told[0] == 0
    assert shell("run", tiny, "-f", "-", *QUICK, stdin="one\ntwo\n") == told
    assert shell("run", tiny, "one", "-f", "-", *QUICK, stdin="two\n") == told
    code, _, err = shell("run", tiny, "-f", "-", stdin="")
    assert code == 2
    assert "no prompt: give one after MODEL" in err
