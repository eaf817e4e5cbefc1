"""What `localllm serve` makes of its options, and what it tells at the start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import localllm
from localllm.cli.commands.serve import plan_line
from localllm.scheduler.interfaces import SchedulerLimits
from localllm.scheduler.request import Request
from localllm.server.served import Served
from localllm.sizes import size
from tests.localllm.scheduler.support import ask
from tests.localllm.scheduler.test_scheduler import each_alone
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
    """The one line, without "error: ", that a server says which cannot begin."""
    done = program("serve", *words, "--port", 0, environ={"NO_COLOR": "1"})
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    return line.removeprefix("error: ")


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    """uvicorn accepts connections while a model loads, and would tell of its start and end."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(write_model(tmp_path / "whole.gguf").read_bytes()[:3000])
    assert refused(cut).startswith(f"{cut}: ")
    assert re.match(r"the cache needs \d+ MiB, and \d+ MiB are free", refused("demo", "-c", 10**11))
    assert refused(tmp_path / "none.gguf").startswith(f"No such file: {tmp_path}/none.gguf")


def test_a_folder_of_slots_is_not_made(tmp_path: Path) -> None:
    """A mistyped name must not go unnoticed; llama-server refuses it too."""
    missing, file = tmp_path / "none", write_model(tmp_path / "tiny.gguf")
    said = refused("demo", "--slot-save-path", missing)
    assert said == f"no such folder: {missing}; create it first, so that slots can be saved there"
    assert not missing.exists()
    assert refused("demo", "--slot-save-path", file) == f"{file}: not a folder; give one in which slots can be saved"
    assert refused("--models", tmp_path, "--slot-save-path", missing) == said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_slots_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "fixed").mkdir(mode=0o500)
    assert "permission denied" in refused("demo", "--slot-save-path", tmp_path / "fixed")


LOADING = """
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
    with subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            assert process.wait(60) == 0
        finally:
            process.kill()
