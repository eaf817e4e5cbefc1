"""Models by name on the command line: pull, list, rm, -hf, and `localllm MODEL`."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from localllm.cli.terminal.formatting import age
from tests.localllm.cli.shell import Shell
from tests.localllm.hub.hub_server import HubServer, Repo, serving
from tests.localllm.hub.stores import ollama_model
from tests.localllm.support import REPOSITORY, Terminal, localllm, write_model

QUICK = ("-n", "4", "--temp", "0")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny-Q8_0.gguf")


@pytest.fixture
def server(tiny: Path) -> Iterator[HubServer]:
    data = tiny.read_bytes()
    other = {"Tiny-Q4_K_M.gguf": data + bytes(1 << 20)}
    with serving({"ann/Tiny-GGUF": Repo({"Tiny-Q8_0.gguf": data, **other})}) as hub:
        yield hub


@pytest.fixture
def environ(server: HubServer, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a user without models who shares the tests' cache of compiled kernels."""
    kept = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": kept,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "",
        "HF_ENDPOINT": server.url,
        "LLAMA_CACHE": str(tmp_path / "llama"),
        "OLLAMA_MODELS": str(tmp_path / ".ollama/models"),
    }


@pytest.fixture
def shell(environ: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    url = environ["HF_ENDPOINT"]  # read once, when huggingface_hub is imported
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    return Shell(capsys, monkeypatch)


def test_search_lists_the_hub_s_models(shell: Shell, server: HubServer) -> None:
    tiny = server.repos["ann/Tiny-GGUF"]
    tiny.facts = {"downloads": 1234, "gguf": {"total": 1_000_000, "architecture": "strange"}, "gated": "auto"}
    code, out, err = shell("search", "tiny")
    assert code == 0
    assert re.search(r"^ann/Tiny-GGUF +1\.00 M +strange +1,234 +not supported, gated: accept its", out, re.MULTILINE)
    assert err == "`localllm pull NAME` downloads one\n"
    assert json.loads(shell("search", "Tiny", "--json")[1])["models"][0]["downloads"] == 1234
    assert shell("search", "no such thing")[:2] == (0, "")
    code, out, err = shell("search")
    assert (code, out) == (2, "")
    assert err.startswith("error: expected words to search for")
    assert shell("search", "tiny", "-n", "0")[0] == 2


def test_pull_list_show_run_rm(shell: Shell, tiny: Path) -> None:
    code, out, err = shell("list")
    assert (code, out) == (0, "")
    assert "no models here yet; `localllm pull USER/REPO` downloads one" in err

    code, out, err = shell("pull", "ann/tiny-gguf:q8")
    assert (code, out) == (0, "ann/Tiny-GGUF:Q8_0\n")
    assert re.fullmatch(r"fetched: \d+\.\d\d KiB, /.*/Tiny-Q8_0\.gguf\n", err)
    assert shell("pull", "ann/Tiny-GGUF:Q8_0")[2].startswith("already here: ")

    assert re.search(r"^ann/Tiny-GGUF:Q8_0 +\S+ KiB +Q8_0 +pulled +now$", shell("list")[1], re.MULTILINE)
    (facts,) = json.loads(shell("list", "--json")[1])["models"]
    assert (facts["name"], facts["pulled"], facts["store"], facts["bytes"]) == (
        "ann/Tiny-GGUF:Q8_0", True, "Hugging Face", tiny.stat().st_size,
    )  # fmt: skip
    for name in ("ann/Tiny-GGUF:Q8_0", "tiny-gguf", "Tiny-Q8_0"):
        assert "architecture   llama" in shell("show", name)[1]
    assert shell("run", "-m", "ann/tiny-gguf", "hi", *QUICK) == shell("run", tiny, "hi", *QUICK)

    assert shell("rm", "ann/Tiny-GGUF") == (2, "", "error: use --yes to delete without confirmation\n")
    code, out, err = shell("rm", "ann/Tiny-GGUF", "--yes")
    assert (code, out) == (0, "")
    assert err.startswith("deleted ann/Tiny-GGUF:Q8_0: ")
    assert shell("list")[1] == ""


def test_the_environment_says_where(environ: dict[str, str], tmp_path: Path) -> None:
    """HF_* environment variables apply. The test starts a process, because huggingface_hub reads these
    variables only at import.
    """
    done = localllm("pull", "ann/Tiny-GGUF:Q8_0", environ=environ)
    assert (done.returncode, done.stdout) == (0, "ann/Tiny-GGUF:Q8_0\n")
    assert len(list(tmp_path.glob("hf/hub/models--ann--Tiny-GGUF/snapshots/*/Tiny-Q8_0.gguf"))) == 1
    offline = localllm("pull", "ann/Tiny-GGUF:Q4_K_M", environ=environ | {"HF_HUB_OFFLINE": "1"})
    assert (offline.returncode, offline.stdout) == (1, "")
    assert offline.stderr == (
        "error: HF_HUB_OFFLINE is set, so ann/Tiny-GGUF cannot be fetched; unset it to use the network\n"
    )


def test_rm_asks_on_a_terminal(shell: Shell, environ: dict[str, str]) -> None:
    shell("pull", "ann/Tiny-GGUF:Q8_0")
    for answer, told in (("\n", "nothing was deleted"), ("y\n", "deleted ann/Tiny")):
        terminal = Terminal("rm", "ann/Tiny-GGUF", environ=environ)
        terminal.wait_for(r"delete ann/Tiny-GGUF:Q8_0 \(\S+ KiB\)\? \[y/N\] ")
        terminal.type(answer)
        terminal.wait_for(told)
        assert terminal.end() == 0
    assert shell("list")[1] == ""


def test_rm_keeps_what_is_not_its_own(shell: Shell, tiny: Path, tmp_path: Path) -> None:
    manifest = ollama_model(tmp_path, "registry.ollama.ai/library/tiny/1b")
    for name, told in (
        ("tiny:1b", "tiny:1b was not downloaded by `localllm pull`, so it is kept; `ollama rm tiny:1b` removes it"),
        ("demo", "demo is part of localllm and cannot be deleted"),
        (tiny, "is your own file"),
        ("nothing", "error: no model nothing on this computer; `localllm list` shows the models"),
    ):
        code, _, err = shell("rm", name, "--yes")
        assert code == 1
        assert told in err
    assert manifest.exists()
    assert tiny.exists()


def test_hf_fetches_first_and_then_needs_no_network(shell: Shell, server: HubServer, tiny: Path) -> None:
    answer = shell("run", tiny, "hi", *QUICK)[1]
    code, out, err = shell("run", "-hf", "ann/Tiny-GGUF:Q8_0", "hi", *QUICK)
    assert (code, out) == (0, answer)
    assert "fetched: " in err
    server.seen.clear()
    shell.patch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert shell("run", "-hf", "hf.co/ann/tiny-gguf:q8", "hi", *QUICK) == (0, answer, "")
    assert server.seen == []
    code, out, err = shell("show", "-hf", "ann/Tiny-GGUF:Q4_K_M")
    assert (code, out) == (1, "")
    assert "HF_HUB_OFFLINE is set" in err


def test_a_pull_that_is_stopped_goes_on(shell: Shell, environ: dict[str, str], server: HubServer) -> None:
    server.faults.pause = 0.2
    terminal = Terminal("pull", "ann/Tiny-GGUF:Q4_K_M", environ=environ, columns=100)
    terminal.wait_for(r"Tiny-Q4_K_M\.gguf .* KiB/s")
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.wait_for("stopped; run the same command to resume")
    assert terminal.end() == 130
    server.faults.pause = 0
    code, _, err = shell("pull", "ann/Tiny-GGUF:Q4_K_M")
    assert code == 0
    assert re.match(r"continuing Tiny-Q4_K_M\.gguf at [1-9]\d* %\nfetched: ", err)


# -- `localllm MODEL` ------------------------------------------------------------------------------------------------


def test_a_model_as_the_first_word_opens_a_chat(shell: Shell, tiny: Path) -> None:
    shell("pull", "ann/Tiny-GGUF:Q8_0")
    chat = shell("chat", tiny, *QUICK, "--no-stats", stdin="hi\n")
    assert (chat[0], chat[2]) == (0, "")
    assert len(chat[1]) > 3
    for words in (["ann/tiny-gguf"], ["-hf", "ann/Tiny-GGUF:Q8_0"], ["-m", "tiny-gguf"], ["tiny-gguf:q8"], [tiny]):
        assert shell(*words, *QUICK, "--no-stats", stdin="hi\n") == chat


def test_a_chat_says_the_name_of_a_model_whose_file_has_none(
    environ: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    manifest = ollama_model(tmp_path, "registry.ollama.ai/library/tiny/1b")
    digest = json.loads(manifest.read_text())["layers"][1]["digest"]
    (tmp_path / ".ollama/models/blobs" / digest.replace(":", "-")).write_bytes(tiny.read_bytes())
    terminal = Terminal("tiny", *QUICK, environ=environ)
    terminal.wait_for(r"tiny: [\d.]+M parameters")
    terminal.wait_for(">>> ")
    terminal.type("/bye\r")
    assert terminal.end() == 0


def test_run_without_a_prompt_opens_a_chat_on_a_terminal(tiny: Path) -> None:
    terminal = Terminal("run", tiny, *QUICK)
    terminal.wait_for(">>> ")
    terminal.type("hi\r")
    terminal.wait_for("first token")
    terminal.wait_for(">>> ")
    terminal.type("/bye\r")
    assert terminal.end() == 0
    refused = Terminal("run", tiny, "--raw")
    refused.wait_for("error: --raw needs a prompt; without one, run opens a chat")
    assert refused.end() == 2


def test_a_folder_says_the_next_step(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "Model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    step = f"`localllm quantize {folder} OUT.gguf Q4_K_M` makes a file that runs"
    for words in ([folder], ["run", folder, "hi"], ["show", folder], ["bench", folder], ["serve", folder]):
        assert shell(*words) == (1, "", f"error: {folder} is a Hugging Face folder; {step}\n")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            ["run", "llama3", "hi"],
            1,
            "No such file or model: llama3; did you mean llama3.2:1b, llama3.2:3b or llama3.1:8b? `localllm pull",
        ),
        (
            ["llama3"],
            2,
            "unknown command 'llama3'; did you mean the model llama3.2:1b, llama3.2:3b or llama3.1:8b? (localllm",
        ),
        (
            ["mistral"],
            2,
            "'mistral' is neither a command nor a model on this computer: localllm --help lists the commands, ",
        ),
        (["docter"], 2, "unknown command 'docter'; did you mean doctor? ("),
        (["docs"], 2, "'docs' is neither a command nor a model on this computer"),  # a folder without models
        (["llama3.gguf"], 1, "No such file: llama3.gguf"),
        (["new/Tiny-GGUF"], 1, "new/Tiny-GGUF is not on this computer; `localllm pull new/Tiny-GGUF` downloads it"),
        (["run", "demo", "hi", "-md", "new/Tiny"], 1, "new/Tiny is not on this computer; `localllm pull new/Tiny`"),
        (["perplexity", "demo", "--kld", "new/Tiny", "-f", "README.md"], 1, "new/Tiny is not on this computer"),
    ],
)
def test_an_unknown_name_says_the_next_step(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, told: str
) -> None:
    monkeypatch.chdir(REPOSITORY)
    found, out, err = shell(*words)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert err.startswith(f"error: {told}")


def test_a_misspelled_first_word_names_the_nearest_model(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ollama_model(tmp_path, "registry.ollama.ai/library/llama3.2/1b")
    ollama_model(tmp_path, "registry.ollama.ai/library/bennch/latest")
    assert "did you mean the model llama3.2:1b?" in shell("llama3.3")[2]
    assert "did you mean bench or the model bennch:latest?" in shell("benchh")[2]
    monkeypatch.chdir(tmp_path)
    Path("mine-Q8_0.gguf").touch()
    assert "did you mean the file mine-Q8_0.gguf? (" in shell("mine-Q8_0.ggf")[2]


# -- list ------------------------------------------------------------------------------------------------------------


def test_list_fits_a_narrow_terminal_and_names_what_is_damaged(environ: dict[str, str], tmp_path: Path) -> None:
    ollama_model(tmp_path, "registry.ollama.ai/library/a-rather-long-name-of-a-model/latest", "Q5_K_M")
    ollama_model(tmp_path, "registry.ollama.ai/library/broken/1").write_text("{")
    wide = Terminal("list", environ=environ, columns=100)
    wide.wait_for(r"a-rather-long-name-of-a-model:latest +\d+ B +Q5_K_M +Ollama +now\r\n")
    wide.wait_for(r"(?s)broken:1\s+\(Ollama\):.*\sis\s+not\s+JSON")
    assert wide.end() == 0
    narrow = Terminal("list", environ=environ, columns=40)
    narrow.wait_for(r"a-rather-long-name-of-a-model:latest\r\n  \d+ B, Q5_K_M, Ollama, now\r\n")
    assert narrow.end() == 0


def test_list_reads_the_quantization_where_no_name_tells_it(shell: Shell, tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / ".lmstudio/models/ann/Plain/model.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(tiny.read_bytes())
    assert re.search(r"^ann/Plain +\S+ KiB +Q8_0 +LM Studio", shell("list")[1], re.MULTILINE)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "now"), (59, "now"), (60, "1 minute ago"), (7200, "2 hours ago"), (90000, "1 day ago"), (9e7, "2 years ago")],
)
def test_ages_are_in_one_unit(seconds: float, shown: str) -> None:
    assert age(seconds) == shown
