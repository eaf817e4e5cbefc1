"""Derived models on the command line: `list`, and the defaults of `run` and `chat`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from localllm.chat import Conversation
from localllm.cli.app import CommandLine
from localllm.cli.derived import with_derived
from localllm.cli.main import main
from localllm.hub import StoreFolders
from localllm.hub.derived import save_derived
from localllm.hub.stored_model import DerivedModel
from localllm.loading.resolve import resolve
from tests.localllm.hub.stores import hub_model

BASE = "ann/Toy-GGUF:Q4_0"
FIRST = ({"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A plumber."})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreFolders:
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    hub_model(tmp_path, "ann/Toy-GGUF", "Toy-Q4_0.gguf")
    places = StoreFolders.here()
    parameters = {"temperature": 0, "num_predict": 7, "stop": ["x"], "num_ctx": 4096, "top_k": "x"}
    save_derived(places.derived, DerivedModel("mario", BASE, "You are Mario.", parameters, FIRST))
    return places


def test_a_derived_model_gives_the_defaults(store: StoreFolders, capsys: pytest.CaptureFixture[str]) -> None:
    found = with_derived(CommandLine("run", {"words": ("Mario", "Hi")})).values
    assert found["system_prompt"] == "You are Mario."
    assert (found["temperature"], found["max_tokens"], found["stop"]) == (0, 7, ("x",))
    assert found["first_messages"] == FIRST
    told = capsys.readouterr().err
    assert "first messages" not in told
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


def test_run_chat_and_explain_begin_with_the_first_messages(
    store: StoreFolders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (blob,) = store.hub.glob("*/blobs/*")
    blob.write_bytes(resolve("demo").read_bytes())
    save_derived(store.derived, DerivedModel("plain", BASE, "You are Mario."))
    save_derived(store.derived, DerivedModel("mario", BASE, "You are Mario.", {}, FIRST))
    prompts, render = list[str](), Conversation._prompt

    def prompt(self: Conversation, messages: list[dict[str, str]], complete: bool = False) -> list[int]:
        prompts.append(str(messages))
        return render(self, messages, complete)

    monkeypatch.setattr(Conversation, "_prompt", prompt)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    asked = [{"role": "system", "content": "You are Mario."}, *FIRST, {"role": "user", "content": "Hi"}]
    for command in ("run", "explain"):
        assert main([command, "mario", "Hi", "-n", "3", "--temp", "0"]) == 0
        assert prompts[0] == str(asked)
        prompts.clear()
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/clear\nHi\n/undo\n/undo\n"))
    assert main(["chat", "mario", "-n", "3", "--temp", "0"]) == 0
    assert [each for each in prompts if each.endswith("'Hi'}]")] == [str(asked)] * 2
    assert "no turn to undo: nothing has been answered yet" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["run", "plain", "Hi", "-n", "3", "--temp", "0", "--raw"]) == 0
    assert "-sys (the model plain) has no effect on plain text" in capsys.readouterr().err
