"""Short names of the user, the table [models] of the configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.cli.app import CommandLine, UsageError
from localllm.cli.expand import expanded
from localllm.cli.own_names import own_names
from localllm.hub.short_names import named_like, wanted_reference

GOOD = '[models]\nMine = "ann/Toy-GGUF:Q4_K_M"\n"two:1b" = "hf.co/bob/Two"\n'


def line(path: Path, command: str, **values: object) -> CommandLine:
    return CommandLine(command, {"config": str(path), **values})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(GOOD)
    return path


def test_the_names_are_read(config: Path) -> None:
    assert own_names(str(config)) == {"mine": "ann/Toy-GGUF:Q4_K_M", "two:1b": "bob/Two"}
    assert str(wanted_reference("MINE:latest", own_names(str(config)))) == "ann/Toy-GGUF:Q4_K_M"
    assert str(wanted_reference("llama3.2:1b", {"llama3.2:1b": "ann/Own"})) == "ann/Own"


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ('a = "no repository"', 2, "no repository is not of the form USER/REPO"),
        ("a = 3", 2, "a must be a text"),
        ('ok = "a/b"\n"a/b" = "c/d"', 3, "'a/b' cannot be a short name"),
        ('demo = "a/b"', 2, "demo is the name of a bundled model"),
        ('"" = "a/b"', 2, "'' cannot be a short name"),
        ('a = "../../etc:x"', 2, "is not of the form"),
    ],
)
def test_a_wrong_entry_is_told_with_its_place(config: Path, text: str, where: int, problem: str) -> None:
    config.write_text(f"[models]\n{text}\n")
    with pytest.raises(UsageError) as error:
        own_names(str(config))
    assert str(error.value).startswith(f"{config}:{where}: ")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_commands_get_the_full_name(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = "ann/Toy-GGUF:Q4_K_M"
    assert expanded(line(config, "pull", words=("mine",))).values["words"] == (full,)
    assert expanded(line(config, "run", words=("mine", "mine"))).values["words"] == (full, "mine")
    assert expanded(line(config, "bench", words=("mine", "two:1b"))).values["words"] == (full, "bob/Two")
    assert expanded(line(config, "search", words=("mine",))).values["words"] == ("mine",)
    found = expanded(line(config, "chat", model="mine", model_draft="two:1b", hf_repo="mine")).values
    assert (found["model"], found["model_draft"], found["hf_repo"]) == (full, "bob/Two", full)
    with pytest.raises(UsageError, match=r"-hf.*nothing is not of the form"):
        expanded(line(config, "chat", hf_repo="nothing"))
    monkeypatch.chdir(tmp_path)
    Path("mine").touch()  # a file comes first
    assert expanded(line(config, "run", words=("mine",))).values["words"] == ("mine",)


def test_a_search_finds_short_names(config: Path) -> None:
    found = named_like(["toy"], own_names(str(config)))
    assert found == {"mine": "ann/Toy-GGUF:Q4_K_M"}
    assert list(named_like(["llama 3.2", "1b"], {})) == ["llama3.2:1b"]
