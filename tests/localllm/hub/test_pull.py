"""Pulling models over HTTP with huggingface_hub: the choice of files, cached files, and refusals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from huggingface_hub import constants, scan_cache_dir, try_to_load_from_cache

from localllm.hub import StoreError, find
from localllm.hub.choose import choose_encoders
from localllm.hub.client import Hub
from localllm.hub.labels import variants
from localllm.hub.owned import remove_model
from localllm.hub.reference import Reference, reference
from tests.localllm.hub.hub_client import DATA, GIB, PARTS, Client
from tests.localllm.hub.hub_server import HubServer, Repo, sha256

# -- choice of files -----------------------------------------------------------------------------------------------


def test_a_pulled_file_is_in_the_cache_as_the_library_keeps_it(client: Client) -> None:
    done = client.pull("ann/Toy-GGUF:Q4_K_M")
    assert (done.name, done.fetched, done.bytes) == ("ann/Toy-GGUF:Q4_K_M", True, len(DATA["Q4_K_M"]))
    assert done.path.read_bytes() == DATA["Q4_K_M"]
    assert Path(os.path.realpath(done.path)).name == sha256(DATA["Q4_K_M"])
    assert try_to_load_from_cache("ann/Toy-GGUF", "Toy-Q4_K_M.gguf", cache_dir=client.cache) == str(done.path)
    found = scan_cache_dir(client.cache)
    assert found.warnings == []
    (repo,) = found.repos
    assert (repo.repo_id, repo.nb_files, [sorted(each.refs) for each in repo.revisions]) == (
        "ann/Toy-GGUF", 1, [["main"]],
    )  # fmt: skip
    assert client.partials() == []
    assert client.progress[-1] == ("Toy-Q4_K_M.gguf", len(DATA["Q4_K_M"]), len(DATA["Q4_K_M"]))
    assert find("ann/Toy-GGUF:Q4_K_M", client.models()).path == done.path


EYES = {"mmproj-F32.gguf": b"eyes" * 999, "mmproj-F16.gguf": b"eyes" * 500, "mmproj-Q8_0.gguf": b"eyes" * 250}


def test_the_encoders_of_a_model_come_with_it(client: Client, server: HubServer) -> None:
    server.repos["ann/Eyes"] = Repo({"Eyes-Q4_0.gguf": DATA["Q4_K_M"], "Eyes-Q8_0.gguf": DATA["Q8_0"], **EYES})
    done = client.pull("ann/Eyes:Q4_0")
    beside = done.path.with_name("mmproj-F16.gguf")
    assert beside.read_bytes() == EYES["mmproj-F16.gguf"]
    assert done.bytes == len(DATA["Q4_K_M"]) + len(EYES["mmproj-F16.gguf"])
    assert not done.path.with_name("mmproj-F32.gguf").exists()
    assert any(line.startswith("with mmproj-F16.gguf (1.95 KiB)") for line in client.told), client.told
    assert [each.name for each in client.models()] == ["ann/Eyes:Q4_0"]
    client.pull("ann/Eyes:Q8_0")
    remove_model(find("ann/Eyes:Q4_0", client.models()), client.cache)
    assert beside.exists()
    remove_model(find("ann/Eyes", client.models()), client.cache)
    assert not os.path.lexists(beside)


@pytest.mark.parametrize(
    ("model", "chosen"),
    [("a/x-Q4_0.gguf", "a/mmproj-BF16.gguf"), ("b/x-Q4_0.gguf", "mmproj-x.gguf"), ("x.gguf", "mmproj-x.gguf")],
)
def test_the_nearest_encoders_are_chosen(model: str, chosen: str) -> None:
    files = [
        "mmproj-x.gguf",
        "a/mmproj-Q8_0.gguf",
        "a/mmproj-BF16.gguf",
        "ab/mmproj-F16.gguf",
        "a/mmproj-F16.safetensors",
    ]
    assert choose_encoders(files, model) == chosen
    assert choose_encoders(files[3:], model) == ""


def test_what_is_there_is_not_fetched_again(client: Client, server: HubServer) -> None:
    first = client.pull("ann/Toy-GGUF:Q8_0")
    server.seen.clear()
    again = client.pull("ann/Toy-GGUF:q8")
    assert (again.path, again.fetched) == (first.path, False)
    assert [path for _, path, _ in server.seen] == ["/api/models/ann/Toy-GGUF?blobs=true"]


def test_all_parts_of_a_split_model_come(client: Client) -> None:
    done = client.pull("ann/Big-GGUF:Q4_0")
    assert done.bytes == sum(map(len, PARTS.values()))
    found = find("ann/Big-GGUF:Q4_0", client.models())
    assert [path.read_bytes() for path in found.paths] == list(PARTS.values())
    assert found.path == done.path
    assert done.path.name == "Big-Q4_0-00001-of-00003.gguf"


def test_a_small_file_that_git_keeps_is_checked_by_git_s_checksum(client: Client) -> None:
    assert client.pull("ann/Git").path.read_bytes() == b"GGUF, small enough for git"


@pytest.mark.parametrize("name", ["ann/Toy-GGUF:Q9", "ann/Toy-GGUF:Q2_K_S"])
def test_a_type_that_is_not_there_lists_those_that_are(client: Client, name: str) -> None:
    with pytest.raises(StoreError, match=r"has no Q.*; it has F16, Q2_K, Q4_K_M, Q8_0$"):
        client.pull(name)


def test_a_name_that_means_several_lists_them(client: Client, server: HubServer) -> None:
    server.repos["ann/Two"] = Repo({f"{name}.gguf": os.urandom(100) for name in ("a-Q4_0", "b-Q4_0", "a-Q4_1")})
    with pytest.raises(StoreError, match=r"ann/Two:Q4_0 is ambiguous: give one of a-Q4_0, b-Q4_0$"):
        client.pull("ann/Two:Q4_0")
    with pytest.raises(StoreError, match=r"give one of a-Q4_0, Q4_1, b-Q4_0$"):
        client.pull("ann/Two:Q4")
    assert client.pull("ann/Two:b-Q4_0.gguf").path.name == "b-Q4_0.gguf"


@pytest.mark.parametrize(
    ("free", "chosen", "reason"),
    [
        (16 * GIB, "Q8_0", "the largest usual type that fits in 16.00 GiB of free memory with room for the cache"),
        (8 * GIB, "Q4_K_M", "the largest usual type that fits in 8.00 GiB"),
        (5 * GIB, "Q2_K", "the largest usual type that fits in 5.00 GiB"),
        (4 * GIB, "IQ1_S", "the largest type that fits in 4.00 GiB"),
        (1 * GIB, "IQ1_S", "the smallest, but too large for 1.00 GiB of free memory"),
    ],
)
def test_without_a_type_the_memory_decides(free: int, chosen: str, reason: str) -> None:
    from localllm.hub.choose import choose_variant

    sizes = {
        "IQ1_S": 2 * GIB,
        "Q2_K": 3 * GIB,
        "Q4_K_M": 5 * GIB,
        "Q8_0": 8 * GIB,
        "UD-Q8_K_XL": 10 * GIB,
        "F16": 11 * GIB,
    }
    given = variants([f"m-{name}.gguf" for name in sizes])
    found = choose_variant("u/r", given, "", lambda each: sizes[each.label], free, [])
    assert found.variant.label == chosen
    assert found.reason.startswith(reason)
    kept = choose_variant("u/r", given, "", lambda each: sizes[each.label] * GIB, free, ["Q4_K_M"])
    assert (kept.variant.label, kept.reason) == ("Q4_K_M", "already on this computer")


def test_the_choice_is_told_in_one_line(client: Client) -> None:
    assert client.pull("ann/Toy-GGUF").name == "ann/Toy-GGUF:Q8_0"
    told = "the largest usual type that fits in 16.00 GiB of free memory with room for the cache"
    assert client.told == [f"ann/Toy-GGUF:Q8_0 (294.92 KiB): {told}"]
    assert client.pull("ann/Toy-GGUF", free=0).name == "ann/Toy-GGUF:Q8_0"  # the cached file is preferred
    client.pull("ann/One")
    assert client.told == ["ann/One (97.66 KiB): the only model in the repository"]


def test_a_repository_without_models_says_what_it_has(client: Client) -> None:
    with pytest.raises(
        StoreError, match=r"has safetensors files but no GGUF files; .* `localllm quantize Tensors OUT\.gguf Q4_K_M`"
    ):
        client.pull("ann/Tensors")
    with pytest.raises(StoreError, match=r"ann/Empty has no GGUF files, only README\.md; look for .* Empty-GGUF"):
        client.pull("ann/Empty")


# -- access --------------------------------------------------------------------------------------------------------


def test_no_such_repository(client: Client, server: HubServer) -> None:
    with pytest.raises(StoreError, match=r"has no model ann/Nothing that you may read; check the name, or"):
        client.pull("ann/Nothing")
    with pytest.raises(StoreError, match="has no model ann/Private that you may read"):
        client.pull("ann/Private")


def test_a_token_opens_what_is_private_and_stays_with_the_hub(
    client: Client, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    client.pull("ann/Private")
    assert all(headers["authorization"] == "Bearer hf_secret" for headers in server.asked("/resolve/"))
    assert server.asked("/content/")
    assert all("authorization" not in headers for headers in server.asked("/content/"))


@pytest.mark.parametrize("token", ["", "hf_other"])
def test_a_gated_repository_says_where_its_terms_are(
    client: Client, server: HubServer, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(StoreError, match=rf"ann/Gated is gated: accept its terms at {server.url}/ann/Gated, then set"):
        client.pull("ann/Gated")


def test_a_name_that_the_hub_cannot_have(client: Client) -> None:
    with pytest.raises(StoreError, match=r"ann/x\.git cannot be the name of a repository"):
        client.pull("ann/x.git")


def test_nobody_there(client: Client) -> None:
    with pytest.raises(StoreError, match=r"^cannot reach 127\.0\.0\.1:9: .*; check the network, or HF_ENDPOINT$"):
        client.pull("ann/Toy-GGUF", hub=Hub("http://127.0.0.1:9"))
    with pytest.raises(StoreError, match="HF_ENDPOINT is hub; it must be an address"):
        Hub("hub")


def test_offline_is_said(client: Client, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StoreError, match=r"HF_HUB_OFFLINE is set, so ann/Toy-GGUF cannot be fetched; unset it"):
        client.pull("ann/Toy-GGUF")
    assert server.seen == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ann/Toy", Reference("ann/Toy")),
        ("ann/Toy:q4_k_m", Reference("ann/Toy", "q4_k_m")),
        ("ann/Toy:sub/a.gguf", Reference("ann/Toy", "sub/a.gguf")),
        ("ann/Toy:latest", Reference("ann/Toy")),
        ("hf.co/ann/Toy:Q8_0", Reference("ann/Toy", "Q8_0")),
        ("https://huggingface.co/ann/Toy", Reference("ann/Toy")),
    ],
)
def test_a_reference_has_an_owner_and_a_repository(text: str, found: Reference) -> None:
    assert reference(text) == found


@pytest.mark.parametrize(
    "text", ["", "ann", "ann/", "/Toy", "ann/Toy/x", "../Toy", "ann/..", "a b/c", "ann/a--b", "x:y"]
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(StoreError, match="is not of the form USER/REPO"):
        reference(text)
