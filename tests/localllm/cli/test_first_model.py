"""The offer of a first model, on a pseudo-terminal with a hub on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.cli.commands import first_model
from localllm.cli.commands.first_model import COMFORTABLE, WORTH, Offer, best_here, best_known
from localllm.cli.forecast import TokenCost
from localllm.hub import StoredModel, StoreError
from localllm.hub.short_names import KNOWN, KnownModel, known_model
from tests.localllm.hub.hub_server import HubServer, Repo, serving
from tests.localllm.hub.stores import hub_model
from tests.localllm.support import Terminal, localllm, write_model

GIB = 1 << 30
OFFER = r"(\S+), (\S+), [\d.]+ GB, [\w .-]+\? \[Y/n\] $"
PROMPT = r">>> $"
TOY = "demo: a toy with 11M parameters. For a real model, leave and type: localllm pull"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny-Q8_0.gguf")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[HubServer]:
    """Serve every model that may be offered, each with the content of a tiny one."""
    data, repos = tiny.read_bytes(), {}
    for name in WORTH:
        known = known_model(name)
        assert known is not None
        repos[known.repo] = Repo({f"{known.repo.rpartition('/')[2]}-{known.quant}.gguf": data})
    with serving(repos) as hub:
        yield hub


@pytest.fixture
def environ(server: HubServer, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a new user, who shares the tests' cache of compiled kernels."""
    return {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
        "LOCALLLM_CONFIG": "",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "HF_HOME": str(tmp_path / ".cache/huggingface"),
        "HF_TOKEN": "",
        "HF_ENDPOINT": server.url,
        "LLAMA_CACHE": str(tmp_path / "llama"),
        "OLLAMA_MODELS": str(tmp_path / "ollama"),
    }


def default_of(environ: dict[str, str]) -> str:
    file = Path(environ["XDG_CONFIG_HOME"]) / "localllm/config.toml"
    return file.read_text() if file.exists() else ""


def started(environ: dict[str, str], *words: str) -> Terminal:
    return Terminal(*words, environ=environ, columns=120)


def test_a_busy_computer_is_told_before_the_offer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(first_model, "accepts", lambda question: False)
    monkeypatch.setattr("os.getloadavg", lambda: (999.0, 1.0, 1.0))
    first_model.offer_again()
    told = "the 1-minute load average was 999.0, so these speeds are low; `localllm pull` measures again"
    assert told in capsys.readouterr().err
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 1.0, 1.0))
    first_model.offer_again()
    assert "load average" not in capsys.readouterr().err


# -- on a terminal ---------------------------------------------------------------------------------------------------


def test_yes_fetches_the_model_and_makes_it_the_default(environ: dict[str, str]) -> None:
    terminal = started(environ)
    asked = terminal.wait_for(OFFER)
    assert "tokens/s: fetch " in asked
    terminal.type("\n")
    shown = terminal.wait_for(PROMPT)
    assert "fetched: " in shown
    assert "it is now the default model; `localllm config unset model` undoes this" in shown
    assert "parameters, a context of 512 tokens" in shown
    terminal.type("\x04")
    assert terminal.end() == 0
    assert default_of(environ).startswith('model = "')
    again = started(environ)
    assert "[Y/n]" not in again.wait_for(PROMPT)
    again.type("\x04")
    assert again.end() == 0
    done = localllm("run", "Why is the sky blue?", "-n", 2, "--temp", 0, environ=environ)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_is_remembered_and_pull_asks_again(environ: dict[str, str]) -> None:
    terminal = started(environ)
    terminal.wait_for(OFFER)
    terminal.type("n\n")
    shown = terminal.wait_for(PROMPT)
    assert "`localllm pull` makes this offer again" in shown
    assert TOY in shown
    terminal.type("\x04")
    assert terminal.end() == 0
    again = started(environ, "chat")
    assert "[Y/n]" not in again.wait_for(PROMPT)
    again.type("\x04")
    assert again.end() == 0
    pulling = started(environ, "pull")
    pulling.wait_for(OFFER)
    pulling.type("y\n")
    pulling.wait_for("it is now the default model")
    assert pulling.end() == 0
    assert default_of(environ).startswith('model = "')


@pytest.mark.parametrize("words", [("chat",), ("pull",)])
def test_the_choice_is_written_to_the_given_file(
    environ: dict[str, str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("temp = 0\n")
    terminal = started(environ, *words, "--config", str(file))
    terminal.wait_for(OFFER)
    terminal.type("y\n")
    said = f"it is now the default model; `localllm config unset model --config {file}` undoes this"
    terminal.wait_for(said.replace(" ", r"\s+"))
    if words == ("chat",):
        terminal.wait_for(PROMPT)
        terminal.type("\x04")
    assert terminal.end() == 0
    assert file.read_text().startswith('temp = 0\nmodel = "')
    assert default_of(environ) == ""


@pytest.mark.parametrize(("key", "code"), [("\x03", 130), ("\x04", 0)])
def test_ctrl_c_and_ctrl_d_leave_without_an_answer(environ: dict[str, str], key: str, code: int) -> None:
    terminal = started(environ)
    terminal.wait_for(OFFER)
    terminal.type(key)
    assert terminal.end() == code
    assert "Traceback" not in terminal.written
    assert default_of(environ) == ""
    again = started(environ)
    again.wait_for(OFFER)
    again.type("\x03")
    again.end()


def test_without_a_network_the_bundled_model_answers(environ: dict[str, str]) -> None:
    terminal = started({**environ, "HF_ENDPOINT": "http://127.0.0.1:9"})
    terminal.wait_for(OFFER)
    terminal.type("y\n")
    shown = terminal.wait_for(PROMPT)
    assert shown.count("error: ") == 1
    assert "using the bundled model for now" in shown
    assert TOY in shown
    terminal.type("\x04")
    assert terminal.end() == 0
    assert default_of(environ) == ""


def test_a_model_on_this_computer_is_offered_first(environ: dict[str, str], tiny: Path, server: HubServer) -> None:
    hub_model(Path(environ["HOME"]), "ann/Here-GGUF", "Here-Q8_0.gguf", data=tiny.read_bytes())
    before = len(server.seen)
    terminal = started(environ)
    assert "you already have ann/Here-GGUF:Q8_0, " in terminal.wait_for(r"use it\? \[Y/n\] $")
    terminal.type("n\n")
    terminal.wait_for(OFFER)
    terminal.type("\x03")
    assert terminal.end() == 130
    terminal = started(environ)
    terminal.wait_for(r"use it\? \[Y/n\] $")
    terminal.type("y\n")
    terminal.wait_for(PROMPT)
    terminal.type("\x04")
    assert terminal.end() == 0
    assert default_of(environ) == 'model = "ann/Here-GGUF:Q8_0"\n'
    assert len(server.seen) == before


def test_without_a_terminal_nothing_is_asked_or_fetched(environ: dict[str, str], server: HubServer) -> None:
    before = len(server.seen)
    bare = localllm(environ=environ)
    assert bare.returncode == 0
    assert "Usage: localllm" in bare.stdout
    chat = localllm("chat", "-n", 2, environ=environ, stdin="Hello\n")
    assert chat.returncode == 0
    assert "[Y/n]" not in chat.stderr
    pull = localllm("pull", environ=environ)
    assert (pull.returncode, pull.stdout) == (2, "")
    assert len(server.seen) == before
    assert default_of(environ) == ""


# -- the choice ------------------------------------------------------------------------------------------------------


def models() -> list[KnownModel]:
    return [known for name in WORTH if (known := known_model(name)) is not None]


def reading(bandwidth: float) -> dict[str, float]:
    return {known.name: bandwidth / (known.bytes * known.read) for known in KNOWN}


@pytest.mark.parametrize(
    ("free", "bandwidth", "name"),
    [
        (64 * GIB, 60e9, "qwen3.5:35b"),  # a mixture of experts reads little
        (14 * GIB, 35e9, "qwen3.5:4b"),
        (6 * GIB, 35e9, "qwen3.5:4b"),
        (2 * GIB, 35e9, "qwen3:1.7b"),
        (64 * GIB, 5e9, "qwen3:0.6b"),  # a slow memory
        (64 * GIB, 1e9, "qwen3:0.6b"),  # nothing is comfortable: the fastest
        (GIB // 2, 35e9, ""),  # nothing fits
    ],
)
def test_the_best_model_that_fits_and_is_comfortable_is_offered(free: int, bandwidth: float, name: str) -> None:
    speeds = reading(bandwidth)
    offer = best_known(models(), free, 1000 * GIB, lambda each: speeds[each.name])
    assert (offer.name if offer is not None else "") == name


def test_a_model_larger_than_the_disk_is_not_offered() -> None:
    offer = best_known(models(), 64 * GIB, 10**9, lambda each: 100.0)
    assert offer is not None
    assert offer.name == "llama3.2:1b"
    assert best_known(models(), 64 * GIB, 0, lambda each: 100.0) is None


def test_every_model_of_the_list_has_a_short_name() -> None:
    assert [each.name for each in models()] == list(WORTH)


def test_a_stored_model_is_chosen_by_size_and_speed(tiny: Path, tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare.gguf", template=None)

    def stored(name: str, path: Path, held: int) -> StoredModel:
        return StoredModel(name, "Hugging Face", (path,), held, "Q8_0")

    def speed(cost: TokenCost) -> float:
        return next(speeds)

    found = [
        stored("large", tiny, 9 * GIB),  # too large
        stored("bare", bare, 3 * GIB),  # has no chat template
        stored("broken", Path(__file__), 3 * GIB),
        stored("slow", tiny, 2 * GIB),
        stored("good", tiny, GIB),
        stored("small", tiny, 1000),
    ]
    speeds = iter([COMFORTABLE - 1, COMFORTABLE])
    assert best_here(found, 8 * GIB, speed) == Offer("good", "Q8_0, 1.00 GiB", COMFORTABLE)
    speeds = iter([3.0, 2.0, 1.0])
    slow = best_here(found, 8 * GIB, speed)
    assert slow is not None
    assert slow.name == "slow"  # the fastest, if none is comfortable
    assert best_here([], 8 * GIB, speed) is None


@pytest.mark.parametrize("fits", [True, False])
def test_a_memory_or_a_disk_that_is_too_small_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fits: bool
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(first_model, "everything", lambda places: [])
    monkeypatch.setattr(first_model, "accepts", lambda question: True)
    if not fits:
        monkeypatch.setattr(first_model, "free_memory", lambda: GIB // 4)
        assert first_model.offer_again() == ""
        assert "no model in the table fits in 256.00 MiB of free memory" in capsys.readouterr().err
        return

    def full(text: str) -> Path:
        raise StoreError("2.50 GiB are needed and 1.00 GiB are free")

    monkeypatch.setattr(first_model, "fetched", full)
    assert first_model.offer_again() == ""
    err = capsys.readouterr().err
    assert "error: 2.50 GiB are needed and 1.00 GiB are free\nusing the bundled model for now\n" in err
