"""Presets, `localllm config`, and the effect of the configuration on real runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import localllm as api
from localllm.cli.catalogue import SHARED, Catalogue
from localllm.cli.main import main
from localllm.cli.presets import PRESETS
from localllm.cli.table import COMMANDS
from localllm.cli.values import keys_of
from localllm.options import SamplingOptions
from tests.localllm.cli.user import User
from tests.localllm.support import REPOSITORY, localllm, write_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose metadata recommends a temperature."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_model(path, extra={"general.sampling.temp": 3.0})


# -- presets and the catalogue ---------------------------------------------------------------------------------------


def test_presets_that_come_along(user: User) -> None:
    for name, values in PRESETS.items():
        SamplingOptions.of(values)
        found = user.runs("run", "--preset", name)
        assert {option: found[option] for option in values} == values
        assert user.runs("devices", "--preset", name) == {"json": False}
    own = user.has("[presets.precise]\ntop-k = 3").runs("run", "--preset", "precise")
    assert (own["top_k"], "temperature" in own) == (3, False)


def test_every_key_of_a_command_names_one_option() -> None:
    catalogue = Catalogue(COMMANDS)
    for command in (*catalogue.commands, SHARED):
        keys = [key for each in catalogue.of(command).values() for key in keys_of(each)]
        assert len(set(keys)) == len(keys), command
    assert not {*keys} & {*catalogue.commands, "presets"}  # no top-level key has the name of a table


def test_shared_options_mean_the_same_in_every_command() -> None:
    catalogue = Catalogue(COMMANDS)
    different = {
        (command, name)
        for name, shared in catalogue.of(SHARED).items()
        for command in catalogue.takers(name)
        if (own := catalogue.of(command)[name]).option.kind is not shared.option.kind or own.default != shared.default
    }
    lists = {"threads", "model", "gpu_layers", "cache_type_k", "cache_type_v"}
    assert different == {("bench", name) for name in lists}


def test_web_is_configured_as_serve(user: User) -> None:
    found = user.has("[serve]\nport = 9000\n").runs("web", "demo")
    assert (found["port"], found["host"]) == (9000, "127.0.0.1")
    assert "[serve]" in user.has("[web]\nport = 9000").is_refused("web", "demo")


# -- localllm config -------------------------------------------------------------------------------------------------


def test_config_shows_where_every_option_comes_from(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    user.has("threads = 3\npreset = 'precise'\n[run]\nthreads = 2\n[serve]\nport = 9", TOP_K="7", RAW="on")
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    facts = {tuple(re.split(" {2,}", line.strip())) for line in out.splitlines() if line.startswith("  ")}
    none = "default model: none (localllm config set model NAME chooses one)"
    assert f"file: {user.path}\n{none}\npreset: precise (known: creative, precise, coding)\n" in out
    assert facts >= {
        ("threads", "config.toml:1", "3"), ("threads", "config.toml:4", "2"), ("port", "config.toml:6", "9"),
        ("top-k", "environment LOCALLLM_TOP_K", "7"), ("raw", "environment LOCALLLM_RAW", "true"),
        ("temperature", "preset precise", "0.0"), ("host", "default", "127.0.0.1"), ("ctx-size", "default", "0"),
        ("min-p", "default, or the model file's", "0.05"), ("ignore-eos", "default", "false"),
    }  # fmt: skip
    assert main(["config", "run", "--json", "--preset", "creative"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["preset"], found["file"], list(found["options"])) == ("creative", str(user.path), ["run"])
    assert found["options"]["run"]["threads"] == {"value": 2, "source": "file", "where": f"{user.path}:4"}
    assert found["options"]["run"]["temperature"] == {"value": 1.2, "source": "preset", "where": "preset creative"}
    assert found["options"]["run"]["predict"] == {"value": None, "source": "default", "where": ""}


def test_config_shows_every_option_of_every_command(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["options"]
    catalogue = Catalogue(COMMANDS)
    shown = {key for section in found.values() for key in section}
    for command in catalogue.commands:
        missing = {keys_of(each)[0] for each in catalogue.of(command).values()} - shown - {"preset"}
        assert missing == set(), command


def test_config_path_and_check(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    user.has("threads = 3")
    assert main(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{user.path}\n"
    assert main(["config", "check"]) == 0
    assert capsys.readouterr().out == f"{user.path}: no errors\n"
    user.has("[serve]\nport = 'x'")
    assert main(["config", "path"]) == 0  # works even if the file is invalid
    capsys.readouterr()
    for words in (["config"], ["config", "check"], ["config", "run"], ["run", "demo", "hi"], ["devices"]):
        assert main(words) == 2
        assert capsys.readouterr() == ("", f"error: {user.path}:2: port: 'x' is not a whole number of at least 0\n")
    user.has(PORT="x")
    assert main(["config", "check"]) == 2
    assert capsys.readouterr().err == "error: LOCALLLM_PORT: 'x' is not a whole number of at least 0\n"
    for words, told in ((["config", "rnu"], "got 'rnu'; did you mean run?"), (["config", "a", "b"], "got 'a b'")):
        assert main(words) == 2
        assert told in capsys.readouterr().err


# -- in real runs ----------------------------------------------------------------------------------------------------


def home(folder: Path, text: str) -> dict[str, str]:
    """Return the environment of a user with home `folder` and this configuration file."""
    (folder / ".config/localllm").mkdir(parents=True, exist_ok=True)
    (folder / ".config/localllm/config.toml").write_text(text)
    kept = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # share the compiled code of other tests
    return {"HOME": str(folder), "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": kept, "LOCALLLM_CONFIG": ""}


def test_the_file_is_found_in_the_home_folder(tiny: Path, tmp_path: Path) -> None:
    ask = ("run", tiny, "hi", "--raw", "-n", "12", "-s", "5")
    greedy, free = (localllm(*ask, *more).stdout for more in (("--temp", "0"), ()))
    assert greedy != free  # the model's recommended temperature applies
    environ = home(tmp_path, "temperature = 0\n")
    assert localllm(*ask, environ=environ).stdout == greedy
    assert localllm(*ask, "--temp", "3", environ=environ).stdout == free
    assert localllm(*ask, environ=environ | {"LOCALLLM_TEMPERATURE": "3"}).stdout == free
    other = tmp_path / "xdg/localllm"
    other.mkdir(parents=True)
    (other / "config.toml").write_text("tempp = 0")
    done = localllm(*ask, environ=environ | {"XDG_CONFIG_HOME": str(tmp_path / "xdg")})
    told = f"error: {other}/config.toml:1: unknown option tempp; did you mean temp?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
    done = localllm("config", "path", environ=environ)
    assert done.stdout == f"{tmp_path}/.config/localllm/config.toml\n"


def test_without_a_file_none_is_read(tmp_path: Path) -> None:
    code = (
        "import sys; from localllm.cli.main import main; main(sys.argv[1:]);"
        "print('tomllib' in sys.modules, file=sys.stderr)"
    )
    environ = {**os.environ, **home(tmp_path, ""), "XDG_CONFIG_HOME": str(tmp_path / "none")}
    for words in (["--help"], ["rm", "--help"], ["rm"]):
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
        assert done.stderr.endswith("False\n"), words


def test_help_and_the_version_come_whatever_the_configuration(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    user.has("what = 1", NONSENSE="1")
    for words in (["--help"], ["run", "--help"], ["--version"], ["help", "config"]):
        assert main(words) == 0
    assert "usage" in capsys.readouterr().out.lower()


def test_python_takes_options_from_its_caller_alone(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in home(tmp_path, "ctx-size = 64\nnonsense = 1").items():
        monkeypatch.setenv(name, value)
    for name, value in {"CTX_SIZE": "64", "TEMPERATURE": "0", "NONSENSE": "1"}.items():
        monkeypatch.setenv(f"LOCALLLM_{name}", value)
    with api.load(tiny) as model:
        assert model.context == 512
        assert model.sampling_defaults.options({}).temperature == 3
