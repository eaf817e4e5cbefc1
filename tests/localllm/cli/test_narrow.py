"""Terminals of 60 columns: no line is longer, so that the terminal cuts no word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from localllm.cli.commands.show import FORECAST
from localllm.cli.terminal.formatting import in_columns, listing
from localllm.cli.terminal.wrapping import broken
from tests.localllm.cli.shell import Shell
from tests.localllm.support import Terminal, localllm

COLUMNS = 60
REFERENCE = "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M"
PATH = "/home/ann/.venv/lib/python3.11/site-packages/localllm/models/demo/demo.gguf"


def lines(*words: str, environ: dict[str, str], columns: int = COLUMNS) -> list[str]:
    """Return what a command prints on a narrow terminal."""
    terminal = Terminal(*words, environ=environ, columns=columns)
    terminal.end()
    return re.split("[\r\n]+", terminal.seen)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    config = tmp_path / "a long path to a home folder" / ".config" / "localllm" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('stop = ["a text of many words that no terminal of sixty columns shows on a line"]\n')
    return {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_COLOR": "1", "LOCALLLM_CONFIG": str(config)}


@pytest.mark.parametrize(
    "words",
    [
        ("config",),
        ("config", "set", "seed", "-1"),
        ("show", "demo"),
        ("search", "llama"),
        ("pull", "llama3.2:1b"),
        ("run", "lama3.1:8b", "Hi"),
        ("explain", "demo", "Name three animals.", "--temp", "0", "-n", "12"),
    ],
    ids=" ".join,
)
def test_no_line_is_longer_than_the_terminal(environ: dict[str, str], words: tuple[str, ...]) -> None:
    found = lines(*words, environ=environ)
    assert len(found) > 1
    assert [line for line in found if len(line) > COLUMNS] == []


@pytest.mark.parametrize(
    "words", [("--help",), ("chat", "--help"), ("perplexity", "demo", "-f", "{text}")], ids=" ".join
)
def test_forty_columns(environ: dict[str, str], tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "t").write_text("The cat sat on the mat. " * 300)
    found = lines(*(word.format(text=tmp_path / "t") for word in words), environ=environ, columns=40)
    assert len(found) > 2
    shown = [line for line in found if not line.startswith(("  -", "evaluating"))]  # names of options, and a bar
    assert [line for line in shown if len(line) > 40 and " " in line.strip()] == []


def test_a_narrow_table_of_operations_keeps_its_words(environ: dict[str, str]) -> None:
    found = "\n".join(lines("explain", "demo", "Hi", "--temp", "0", "-n", "3", environ=environ))
    assert re.search(r"^operation +time +of memory roof +roof$", found, re.MULTILINE)
    assert re.search(r"^all operations +[\d.]+ ms +", found, re.MULTILINE)


def test_a_reference_is_not_cut_and_a_path_only_after_a_slash() -> None:
    rows = [("short name", "model"), ("llama3.1:8b", REFERENCE)]
    assert in_columns(rows, indent=0, room=COLUMNS) == f"short name   model\nllama3.1:8b\n    {REFERENCE}"
    assert broken(f"error: {PATH}: cannot be read", COLUMNS) == [
        "error: /home/ann/.venv/lib/python3.11/site-packages/",
        "localllm/models/demo/demo.gguf: cannot be read",
    ]
    assert broken(f"file {PATH[:50]} is there", COLUMNS) == [f"file {PATH[:50]} is", "there"]  # it fits on a line


def test_a_command_between_backticks_stays_on_a_line() -> None:
    text = "this model is not on this computer yet, but `localllm pull llama3.2:1b` downloads it"
    assert broken(text, COLUMNS)[1].startswith("`localllm pull llama3.2:1b` downloads")
    assert broken("a ` alone, and " + "b " * 40, 20)[0] == "a ` alone, and b b b"


def test_an_instant_model_has_no_forecast_unless_asked_for(environ: dict[str, str], tiny_read: int) -> None:
    assert tiny_read < FORECAST < 200_000_000  # the smallest model whose forecast was compared
    assert "tokens/s on this" not in " ".join(lines("show", "demo", environ=environ))
    assert "tokens/s on this" in " ".join(lines("show", "demo", "--speed", environ=environ))


@pytest.fixture
def tiny_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> int:
    import json

    return int(json.loads(Shell(capsys, monkeypatch)("show", "demo", "--json")[1])["memory"]["read_per_token"])


def test_a_negative_number_is_a_value(environ: dict[str, str]) -> None:
    done = localllm("config", "set", "seed", "-1", environ=environ)
    assert (done.returncode, done.stdout) == (0, f"{environ['LOCALLLM_CONFIG']}: seed = -1\n")
    done = localllm("config", "set", "temp", "-5", environ=environ)
    assert (done.returncode, done.stderr[:14]) == (2, "error: temp: -")
    assert "unknown option -x" in localllm("config", "set", "temp", "-x", environ=environ).stderr


def test_a_narrow_listing_drops_its_header_and_its_empty_cells() -> None:
    header, row = ("name", "size", "note"), ("ann/Toy-GGUF:Q4_K_M", "2 MB", "")
    assert listing(header, [row], COLUMNS) == "name                 size\nann/Toy-GGUF:Q4_K_M  2 MB"
    assert listing(header, [row], 20) == "ann/Toy-GGUF:Q4_K_M\n  2 MB"


def test_a_narrow_configuration_has_a_line_for_each_option(environ: dict[str, str]) -> None:
    found = lines("config", "chat", environ=environ)
    assert "  ctx-size                  0" in found
    assert "  temperature               0.8 (default, or the model" in found
    assert found.index("  temperature               0.8 (default, or the model") + 1 == found.index(
        "                            file's)"
    )


def test_an_unknown_option_names_the_command_that_was_typed(environ: dict[str, str]) -> None:
    for command in (("set", "tmep", "1"), ("unset", "tmep")):
        told = localllm("config", *command, environ=environ).stderr
        assert told == f"error: localllm config {command[0]} tmep: unknown option tmep; did you mean temp?\n"
