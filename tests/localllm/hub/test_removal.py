"""Removal of fetched models from the cache."""

from __future__ import annotations

import pytest
from huggingface_hub import scan_cache_dir

from localllm.hub import StoreError, find
from localllm.hub.owned import is_owned, owned, remove_model
from tests.localllm.hub.hub_client import DATA, PARTS, Client
from tests.localllm.hub.hub_server import HubServer, sha256


def test_removal_deletes_what_pull_fetched_and_nothing_else(client: Client) -> None:
    client.pull("ann/Toy-GGUF:Q4_K_M")
    client.pull("ann/Big-GGUF:Q4_0")
    client.pull("ann/Toy-GGUF:Q8_0")
    before = set(client.cache.rglob("*"))
    client.pull("ann/Toy-GGUF:Q2_K")
    assert remove_model(find("ann/Toy-GGUF:Q2_K", client.models()), client.cache) == len(DATA["Q2_K"])
    locks = {path for path in client.cache.rglob("*") if ".locks" in path.parts}
    assert set(client.cache.rglob("*")) - locks == before - locks
    assert remove_model(find("ann/Big-GGUF", client.models()), client.cache) == sum(map(len, PARTS.values()))
    assert [each.name for each in client.models()] == ["ann/Toy-GGUF:Q4_K_M", "ann/Toy-GGUF:Q8_0"]
    assert not (client.cache / "models--ann--Big-GGUF").exists()
    for name in ("Q4_K_M", "Q8_0"):
        remove_model(find(f"ann/Toy-GGUF:{name}", client.models()), client.cache)
    assert [path.name for path in client.cache.iterdir() if path.name.startswith("models")] == []
    assert scan_cache_dir(client.cache).warnings == []


def test_what_another_program_fetched_stays(client: Client, server: HubServer) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download("ann/Toy-GGUF", "Toy-Q8_0.gguf", cache_dir=client.cache, endpoint=server.url)
    assert client.pull("ann/Toy-GGUF:Q8_0").fetched is False
    client.pull("ann/Toy-GGUF:Q4_K_M")
    mine, theirs = client.models()
    assert (is_owned(mine, client.cache), is_owned(theirs, client.cache)) == (True, False)
    with pytest.raises(StoreError, match=r"not downloaded by `localllm pull`, so it is kept; `hf cache rm model/ann/T"):
        remove_model(theirs, client.cache)
    remove_model(mine, client.cache)
    assert [each.name for each in client.models()] == ["ann/Toy-GGUF:Q8_0"]


def test_a_newer_commit_replaces_what_pull_fetched(client: Client, server: HubServer) -> None:
    old = client.pull("ann/Toy-GGUF:Q8_0").path
    client.pull("ann/Toy-GGUF:Q4_K_M")
    repo = server.repos["ann/Toy-GGUF"]
    repo.commit, repo.files = "f" * 40, {**repo.files, "Toy-Q8_0.gguf": b"better" * 9999}
    new = client.pull("ann/Toy-GGUF:Q8_0").path
    assert new.read_bytes() == b"better" * 9999
    assert not old.exists()
    folder = client.cache / "models--ann--Toy-GGUF"
    assert owned(folder)["Toy-Q8_0.gguf"] == sha256(b"better" * 9999)
    assert {path.name for path in (folder / "blobs").iterdir()} == set(owned(folder).values())
    assert [each.name for each in client.models()] == ["ann/Toy-GGUF:Q4_K_M", "ann/Toy-GGUF:Q8_0"]
    client.pull("ann/Toy-GGUF:Q4_K_M")  # identical bytes at the new commit: linked, not fetched
    assert len(server.asked("/content/ann/Toy-GGUF/Toy-Q4_K_M.gguf")) == 1
    assert scan_cache_dir(client.cache).warnings == []


def test_a_file_that_two_commits_share_outlives_neither(client: Client, server: HubServer) -> None:
    client.pull("ann/One")
    server.repos["ann/One"].commit = "f" * 40
    client.pull("ann/One")
    assert len(list(client.cache.glob("*/snapshots/*/model.gguf"))) == 2
    remove_model(find("ann/One", client.models()), client.cache)
    assert not (client.cache / "models--ann--One").exists()
