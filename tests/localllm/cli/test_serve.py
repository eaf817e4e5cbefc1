"""The options of `localllm serve`, and its startup messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import localllm
from localllm import backends
from localllm.backends import cache
from localllm.base.units import size
from localllm.cli.commands.serve import plan_line
from localllm.cli.main import main
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Request
from localllm.options import LoadOptions, declared
from localllm.options.load import BACKENDS, CACHE_TYPES
from localllm.server.served import Served
from tests.localllm.generation.support import ask
from tests.localllm.generation.test_scheduler import each_alone
from tests.localllm.support import localllm as program
from tests.localllm.support import write_model


def test_a_draft_model_is_used_and_its_memory_told() -> None:
    sampling = localllm.SamplingOptions(temperature=0.0)
    requests = [Request([1, 2 + number], sampling, 30, ignore_eos=True) for number in range(2)]
    with localllm.load("demo", threads=1, ctx_size=256, sequences=2, model_draft="draft", spec="draft") as model:
        expected = each_alone(model, requests)
        assert model.draft is not None
        with Served(model, SchedulerLimits(2)) as served:
            line = plan_line(served, 2)
            answers = [ask(served.scheduler, request) for request in requests]
            for answer in answers:
                answer.result()
        assert [answer.tokens for answer in answers] == expected
    own = model.draft.executable.memory
    assert f", draft model {size(own.weights + own.cache + own.scratch)};" in line


def refused(*words: object) -> str:
    """Return the one-line error of a server that fails to start, without "error: "."""
    done = program("serve", *words, "--port", 0, environ={"NO_COLOR": "1"})
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    return line.removeprefix("error: ")


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    """If a model fails to load, stderr has one line, although uvicorn already runs and would log its start and end."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(write_model(tmp_path / "whole.gguf").read_bytes()[:3000])
    assert refused(cut).startswith(f"{cut}: ")
    assert refused(tmp_path / "none.gguf").startswith(f"No such file: {tmp_path}/none.gguf")


BAD = {  # values with an invalid format: exit code 2
    "ctx_size": ["-1", "much"],
    "threads": ["0", "all"],
    "backend": ["abacus", ""],
    "gpu_layers": ["-3", "most"],
    "n_cpu_moe": ["-1", "x"],
    "cache_type_k": ["foo", "", "F16"],
    "cache_type_v": ["foo", "f16,f16"],
    "image_min_tokens": ["-1", "x"],
    "image_max_tokens": ["-1", "x"],
    "spec": ["maybe"],
    "draft_max": ["0", "x"],
    "draft_earlier": ["-1", "x"],
}
LATE = {  # valid values that fail on this machine or with this model: exit code 1
    "ctx_size": (["-c", 2147483647], "the cache needs"),
    "device": (["--backend", "cpu", "--device", 7], "--device 7: the cpu backend has no devices"),
    "gpu_layers": (["--backend", "cpu", "-ngl", 3], "-ngl 3: the cpu backend has no GPU"),
    "mmproj": (["--mmproj", "none.gguf"], "No such file: none.gguf"),
    "image_min_tokens": (["--image-min-tokens", 9, "--image-max-tokens", 8], "a picture cannot have 9 to 8 tokens"),
    "model_draft": (["-md", "none.gguf"], "No such file: none.gguf"),
    "spec": (["--spec", "draft"], "speculation with a draft model requires one: give it (-md FILE)"),
}
LOADING = {each.name: each.option for each in declared(LoadOptions) if each.option.flags and each.default is not False}


@pytest.mark.parametrize("name", LOADING)
def test_a_bad_load_option_is_one_line_before_the_model_is_open(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in BAD or name in LATE
    for flag in LOADING[name].flags:
        for value in BAD.get(name, ()):
            assert main(["serve", "demo", "--port", "0", flag, value]) == 2
            out, err = capsys.readouterr()
            assert err.startswith(f"error: {'/'.join(LOADING[name].flags)}: {value!r} is not ")
            assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize("name", LATE)
def test_a_load_option_that_does_not_fit_is_one_line(name: str) -> None:
    words, told = LATE[name]
    assert refused("demo", *words).startswith(told)


def test_options_name_every_cache_type_and_backend() -> None:
    assert sorted(CACHE_TYPES) == sorted([*cache.CACHE_TYPES, "auto"])
    assert sorted(BACKENDS) == sorted([*backends.BACKENDS, "auto"])


def test_a_folder_of_slots_is_not_made(tmp_path: Path) -> None:
    """A missing --slot-save-path is an error, as in llama-server. Creating it would hide a typing error."""
    missing, file = tmp_path / "none", write_model(tmp_path / "tiny.gguf")
    said = refused("demo", "--slot-save-path", missing)
    assert said == f"no such folder: {missing}; create it first, so that slots can be saved there"
    assert not missing.exists()
    assert refused("demo", "--slot-save-path", file) == f"{file}: not a folder; give a folder for saving slots"
    assert refused("--models", tmp_path, "--slot-save-path", missing) == said


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has access lists instead of modes")
@pytest.mark.parametrize(
    ("option", "mode", "told"),
    [
        ("--cache-dir", 0o777, True),
        ("--slot-save-path", 0o777, True),
        ("--cache-dir", 0o1777, False),
        ("--cache-dir", 0o755, False),
    ],
)
def test_a_folder_that_others_can_write_is_told(option: str, mode: int, told: bool, tmp_path: Path) -> None:
    """A note warns about folders that others can write, unless the sticky bit keeps them from deleting files."""
    cut, folder = tmp_path / "cut.gguf", tmp_path / "kept"
    cut.write_bytes(b"GGUF")  # an invalid model, so that the server exits
    folder.mkdir()
    folder.chmod(mode)
    done = program("serve", cut, option, folder, "--port", 0, environ={"NO_COLOR": "1"})
    *notes, last = done.stderr.splitlines()
    assert last.startswith(f"error: {cut}: ")
    note = f"note: other users can write to {folder} and delete the prompts stored there; chmod go-w {folder}"
    assert notes == ([note] if told else [])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_slots_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "fixed").mkdir(mode=0o500)
    assert "permission denied" in refused("demo", "--slot-save-path", tmp_path / "fixed")


SLOW_LOAD = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import localllm.cli.commands.serve as command
from localllm.cli.main import main

def load(*words, **more):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(time.sleep, 600)
        print("loading", flush=True)
        waiting.result()

command.load = load
sys.exit(main(["serve", "demo", "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_does_not_wait_for_a_load(number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW_LOAD], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_target_for_the_time_between_tokens_reaches_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given in milliseconds. Without one, the scheduler chooses."""
    found: list[float] = []

    class Enough(Exception):
        pass

    def served(model: localllm.Model, limits: SchedulerLimits, *rest: object) -> Served:
        found.append(limits.itl_target)
        raise Enough

    monkeypatch.setattr("localllm.cli.commands.serve.Served", served)
    for words in ([], ["--itl-target", "250"]):
        main(["serve", "demo", "--port", "0", "-c", "64", *words])
    assert found == [0.0, 0.25]
