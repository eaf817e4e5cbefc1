"""Unknown commands and options, and shell completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli.main import main
from tests.localllm.hub.stores import ollama_model
from tests.localllm.support import REPOSITORY
from tests.localllm.support import localllm as program


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rnu", "demo"], "unknown command 'rnu'; did you mean run? (localllm --help"),
        (["run", "-hff", "x"], "unknown option -hff; did you mean -hf"),
        (["-hff", "x"], "unknown option -hff"),
        (["demmo"], "unknown command 'demmo'; did you mean the model demo? (localllm --help lists the commands)"),
        (["lisst"], "unknown command 'lisst'; did you mean list?"),
        (["x" * 40], f"'{'x' * 40}' is neither a command nor a model on this computer: localllm --help lists"),
        (["create"], "'create' is neither a command nor a model on this computer"),
        (["quant"], "unknown command 'quant'; did you mean quantize?"),
        (["run", "m", "--json"], "unknown option --json; did you mean --json-schema?"),
        (["run", "m", "--tmp", "1"], "unknown option --tmp; did you mean --temp?"),
        (["run", "m", "--TOP_K", "1"], "unknown option --TOP_K; did you mean --top-k?"),
        (["run", "m", "--banana"], "unknown option --banana (localllm run --help"),
        (["run", "m", "--temp", "-5"], "-5.0: it must be a finite number, 0 or more"),
        (["run", "m", "hi", "-no-cnv"], "-no-cnv is not supported: use localllm run, with --raw for plain text"),
        (["run", "m", "hi", "-cnv"], "-cnv is not supported: use localllm chat"),
        (["bench", "m", "-b512"], "unknown option -b512"),
        (["run", "m", "-fa", "on", "--lora", "x"], "--lora is not supported: adapters are not supported"),
        (["run", "m", "-ngl5"], "unknown option -ngl5; did you mean -ngl? (localllm run --help"),
        (["run", "m", "-ctkk", "f16"], "unknown option -ctkk; did you mean -ctk?"),
        (["run", "m", "--tempp", "1"], "unknown option --tempp; did you mean --temp?"),
        (["run", "m", "--raw=1"], "'--raw' does not take a value"),
        (["help", "rnu"], "unknown command 'rnu'; did you mean run?"),
    ],
)
def test_what_is_unknown_is_named_with_the_nearest(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        (["-fa", "on", "--jinja", "hi", "-ub", "512"], "-fa on, --jinja, -ub 512"),
        (["--color", "hi", "--no-mmap"], "--color, --no-mmap"),
        (["-fa", "--color=off", "hi"], "-fa, --color=off"),
        (["--", "hi"], ""),
        (["-p", "--jinja"], ""),
    ],
)
def test_harmless_options_of_llama_cpp_are_ignored_with_a_note(words: list[str], ignored: str) -> None:
    done = program("run", "demo", "-n", "1", *words)
    assert done.returncode == 0
    note = f"note: ignored, because localllm does not need it: {ignored}\n" if ignored else ""
    assert "".join(line for line in done.stderr.splitlines(True) if line.startswith("note")) == note


@pytest.mark.parametrize("command", ["run", "chat"])
def test_statistics_have_the_name_that_other_commands_give_to_more_output(command: str) -> None:
    prompt = ["hi"] if command == "run" else []
    done = program(command, "demo", *prompt, "-n", "1", "--verbose", "--system", "Be brief.", stdin="hi\n")
    assert done.returncode == 0
    assert "tokens/s" in done.stderr


def test_the_version_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for word in ("version", "--version"):
        assert main([word]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


def test_help_of_a_command_is_its_page_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for words in (["help", "quantize"], ["quantize", "--help"], ["quantize", "-h"]):
        assert main(words) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] == pages[2]
    assert pages[0].startswith("Usage: localllm quantize IN [OUT] TYPE [OPTIONS]\n\n  Make a smaller model file.\n")
    assert "--tensor-type REGEX=FORMAT" in pages[0]


def completed(words: str, folder: Path) -> list[str]:
    """Return bash's completions of the last word of `words`, for a user with home `folder`."""
    parts = words.split(" ")
    asked = {"_LOCALLLM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(parts) - 1)}
    asked |= {"HOME": str(folder), "HF_HOME": "", "HF_HUB_CACHE": "", "XDG_CACHE_HOME": "", "OLLAMA_MODELS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "localllm"],
        env={**os.environ, **asked, "PYTHONPATH": str(REPOSITORY)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_completes_commands_options_models_and_types(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "a.txt").touch()
    (tmp_path / "ab").mkdir()
    assert completed("localllm qu", tmp_path) == ["quantize"]
    assert completed("localllm run --temper", tmp_path) == ["--temperature"]
    assert completed("localllm show a", tmp_path) == ["a.gguf", "ab/"]
    assert completed("localllm show d", tmp_path) == ["demo", "draft"]
    ollama_model(tmp_path, "registry.ollama.ai/library/dolphin/7b")
    assert completed("localllm run -m d", tmp_path) == ["demo", "draft", "dolphin:7b"]
    assert completed("localllm run demo -ctk q5", tmp_path) == ["q5_1", "q5_0"]
    assert completed("localllm run demo --backend o", tmp_path) == ["opencl"]
    assert completed("localllm run demo --preset c", tmp_path) == ["creative", "coding"]
    assert completed("localllm quantize a.gguf Q4_K", tmp_path) == ["Q4_K_S", "Q4_K_M"]
    assert completed("localllm imatrix demo -f a.t", tmp_path) == ["a.txt"]
