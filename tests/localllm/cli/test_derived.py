"""Derived models on the command line: `list`, and the defaults of `run` and `chat`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localllm.cli.app import CommandLine
from localllm.cli.derived import with_derived
from localllm.cli.main import main
from localllm.hub import StoreFolders
from localllm.hub.derived import save_derived
from localllm.hub.stored_model import DerivedModel
from tests.localllm.hub.stores import hub_model

BASE = "ann/Toy-GGUF:Q4_0"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreFolders:
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    hub_model(tmp_path, "ann/Toy-GGUF", "Toy-Q4_0.gguf")
    places = StoreFolders.here()
    parameters = {"temperature": 0, "num_predict": 7, "stop": ["x"], "num_ctx": 4096, "top_k": "x"}
    save_derived(places.derived, DerivedModel("mario", BASE, "You are Mario.", parameters))
    return places


def test_a_derived_model_gives_the_defaults(store: StoreFolders, capsys: pytest.CaptureFixture[str]) -> None:
    found = with_derived(CommandLine("run", {"words": ("Mario", "Hi")})).values
    assert found["system_prompt"] == "You are Mario."
    assert (found["temperature"], found["max_tokens"], found["stop"]) == (0, 7, ("x",))
    told = capsys.readouterr().err
    assert "the parameter num_ctx of mario has no effect here" in told
    assert "top_k" in told
    given = {"model": "mario", "system_prompt": "Be brief.", "temperature": 1.0}
    found = with_derived(CommandLine("chat", given)).values
    assert (found["system_prompt"], found["temperature"]) == ("Be brief.", 1.0)
    for line in (CommandLine("bench", {"words": ("mario",)}), CommandLine("run", {"words": (BASE, "Hi")})):
        assert with_derived(line) == line


def test_list_and_rm(store: StoreFolders, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert f"from {BASE}" in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    [model] = [each for each in json.loads(capsys.readouterr().out)["models"] if each["base"]]
    assert (model["name"], model["base"], model["pulled"]) == ("mario", BASE, False)
    assert main(["rm", "mario", "--yes"]) == 0
    assert not list(store.derived.glob("*.json"))
    assert list(store.hub.glob("*/blobs/*"))
