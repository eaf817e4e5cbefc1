"""Short names of the hub's models, the user's own ones, and a search on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.hub import NotHere, StoreError, everything, find
from localllm.hub import short_names as names
from localllm.hub.client import FoundRepo, Hub
from localllm.hub.reference import Reference
from localllm.hub.short_names import wanted_reference
from tests.localllm.hub.hub_server import HubServer, Repo
from tests.localllm.hub.stores import hub_model, ollama_model, places


def test_names_are_well_formed_and_different() -> None:
    assert len({each.name for each in names.KNOWN}) == len(names.KNOWN)
    for each in names.KNOWN:
        assert each.name == each.name.lower()
        assert wanted_reference(each.name) == Reference(each.repo, each.quant)
        assert 0 < each.read <= 1 <= each.bytes >> 20


def test_the_first_of_a_family_has_its_plain_name() -> None:
    assert names.full_name("Llama3.2") == names.full_name("llama3.2:latest") == names.full_name("llama3.2:1b")
    assert names.full_name("llama3.2:7b") == names.full_name("demo") == ""


def test_other_names_are_refused_as_before() -> None:
    with pytest.raises(StoreError, match="no-such-name is not of the form USER/REPO"):
        wanted_reference("no-such-name")
    with pytest.raises(StoreError, match=r"is not of the form USER/REPO or .*; did you mean llama3\.2:1b\?"):
        wanted_reference("lama3.2:1b")
    with pytest.raises(StoreError, match=r"; did you mean writer\?"):
        wanted_reference("wirter", {"writer": "ann/Writer-GGUF"})


def test_a_short_name_finds_what_was_pulled(tmp_path: Path) -> None:
    hub_model(tmp_path, "unsloth/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q8_0.gguf")
    assert find("qwen3:8b", everything(places(tmp_path))).path.name == "Qwen3-8B-Q4_K_M.gguf"
    with pytest.raises(NotHere, match=r"gemma3:4b \(ggml-org/gemma-3-4b-it-GGUF:Q4_K_M\) is not on this"):
        find("gemma3:4b", everything(places(tmp_path)))
    ollama_model(tmp_path, "registry.ollama.ai/library/gemma3/4b")
    assert find("gemma3:4b", everything(places(tmp_path))).store == "Ollama"  # a name in a store comes first


def test_a_search_lists_the_most_downloaded_first(server: HubServer) -> None:
    server.repos["bob/Toy-2-GGUF"] = Repo({}, facts={"downloads": 9, "likes": 2, "gated": "manual"})
    server.repos["ann/Toy-GGUF"].facts = {"downloads": 10, "gguf": {"total": 7, "architecture": "llama"}}
    found = Hub(server.url).search("toy gguf", 5)
    assert found == [
        FoundRepo("ann/Toy-GGUF", 10, 0, 7, "llama", False),
        FoundRepo("bob/Toy-2-GGUF", 9, 2, 0, "", True),
    ]
    assert Hub(server.url).search("toy", 1) == found[:1]
    assert Hub(server.url).search("nothing like it", 5) == []


@pytest.mark.parametrize("answer", [b'{"a": 1}', b"[3]", b"no", b'[{"x": 1}]'])
def test_a_hub_that_answers_a_search_with_something_else_is_told(server: HubServer, answer: bytes) -> None:
    server.faults.listing = answer
    with pytest.raises(StoreError, match="does not answer like a Hugging Face hub"):
        Hub(server.url).search("toy", 5)


def test_a_failed_search_is_not_repeated(server: HubServer) -> None:
    server.faults.busy = 9
    with pytest.raises(StoreError, match=r"cannot answer for toy now \(HTTP 503\)"):
        Hub(server.url).search("toy", 5)
    assert len(server.asked("/api/models")) == 1


def test_a_search_shows_the_token(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert Hub(server.url).search("no such", 5) == []
    assert [headers["authorization"] for headers in server.asked("/api/models")] == ["Bearer hf_secret"]


def test_results_that_are_no_repositories_are_left_out(server: HubServer) -> None:
    server.faults.listing = b'[{"id": "../etc"}, {"id": "ann/Toy", "downloads": -3, "likes": "x", "gguf": [1]}]'
    assert Hub(server.url).search("toy", 5) == [FoundRepo("ann/Toy", 0, 0, 0, "", False)]
