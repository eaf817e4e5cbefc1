"""Hostile stores: every defect gives one line, and nothing outside a store is opened, offered, or deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from localllm.hub import StoreError, StoreFolders, everything, find
from localllm.hub.owned import RECORD, is_owned, owned, remove_model
from localllm.hub.reading import MAX_ENTRIES, MAX_JSON, Unusable, files_below, read_object
from tests.localllm.hub.stores import COMMIT, hub_model, llama_model, lm_studio_model, ollama_model, places

OUTSIDE = "/etc/passwd"
WEIGHTS = "application/vnd.ollama.image.model"


def problem(root: Path, name: str) -> str:
    """Return the one-line error for an unusable model."""
    with pytest.raises(StoreError) as caught:
        find(name, everything(places(root)))
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 1000
    return text


# -- Ollama --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:../../../../etc/passwd", "../../../etc/passwd", "/etc/passwd", "sha256:" + "A" * 64,
        "sha256:" + "0" * 63, "sha256:" + "0" * 64 + "/../x", "sha256:" + "0" * 64 + "\n", "", None, 7,
        ["sha256:" + "0" * 64], {"a": 1},
    ],
    ids=repr,
)  # fmt: skip
def test_a_digest_that_is_no_digest(tmp_path: Path, digest: object) -> None:
    ollama_model(tmp_path, "registry.ollama.ai/library/bad/1", layer={"mediaType": WEIGHTS, "digest": digest})
    assert "bad:1 (Ollama): its manifest has an invalid digest" in problem(tmp_path, "bad:1")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 150_000, "nested too deeply"),
        (b'{"layers": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b" " * (MAX_JSON + 1), "is larger than 1 MiB"),
        (b"[]", "is not a JSON object"),
        (b"{}", "has no weights"),
        (b'{"layers": "all"}', "has no weights"),
        (b'{"layers": [1, null, []]}', "has no weights"),
        (b'{"layers": [{"mediaType": ["x"], "digest": 1}]}', "has no weights"),
        (b'{"layers": [{"mediaType": "application/vnd.ollama.image.tensor"}]}', "which only Ollama can read"),
        (json.dumps({"layers": [{"mediaType": WEIGHTS, "digest": "sha256:" + "0" * 64}] * 2}).encode(), "2 GGUF files"),
        (json.dumps({"layers": [{"mediaType": WEIGHTS, "digest": "sha256:" + "0" * 64}]}).encode(), "file is missing"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else "",
)
def test_a_manifest_that_is_none(tmp_path: Path, content: bytes, told: str) -> None:
    ollama_model(tmp_path, "registry.ollama.ai/library/bad/1").write_bytes(content)
    assert told in problem(tmp_path, "bad:1")


def test_names_of_manifests_that_are_no_names_are_skipped(tmp_path: Path) -> None:
    good = ollama_model(tmp_path, "registry.ollama.ai/library/good/1")
    for name in ("\x1b[2J", "a b", "-x", "x" * 129, "ü"):
        good.with_name(name).write_bytes(good.read_bytes())
    (good.parent / "deep/er").mkdir(parents=True)
    (good.parent / "deep/er/1").write_bytes(good.read_bytes())
    assert [each.name for each in everything(places(tmp_path))] == ["good:1"]


# -- links ---------------------------------------------------------------------------------------------------------


def linked(kind: str, target: Path) -> tuple[str, Path]:
    """Create a model; return its name and the file to replace by a symbolic link."""
    if kind == "hub":
        folder = hub_model(target, "ann/Bad", "bad-Q4_0.gguf")
        return "ann/Bad", folder / "snapshots" / COMMIT / "bad-Q4_0.gguf"
    if kind == "hub blob":
        folder = hub_model(target, "ann/Bad", "bad-Q4_0.gguf")
        return "ann/Bad", next((folder / "blobs").iterdir())
    if kind == "llama":
        return "ann/Bad", llama_model(target, "ann/Bad", "bad-Q4_0.gguf")
    if kind == "manifest":
        return "bad:1", ollama_model(target, "registry.ollama.ai/library/bad/1")
    if kind == "blob":
        manifest = ollama_model(target, "registry.ollama.ai/library/bad/1")
        digest = json.loads(manifest.read_text())["layers"][1]["digest"]
        return "bad:1", target / ".ollama/models/blobs" / digest.replace(":", "-")
    return "ann/Bad", lm_studio_model(target, "ann/Bad/bad-Q4_0.gguf")


KINDS = ("hub", "hub blob", "llama", "manifest", "blob", "lm studio")


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_that_leaves_its_store_is_not_followed(tmp_path: Path, kind: str) -> None:
    name, file = linked(kind, tmp_path)
    assert find(name, everything(places(tmp_path))).problem == ""
    file.unlink()
    file.symlink_to(OUTSIDE)
    assert f"links to {OUTSIDE}, which is outside" in problem(tmp_path, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["loop", "dangling", "folder", "pipe"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, kind: str, what: str) -> None:
    name, file = linked(kind, tmp_path)
    file.unlink()
    match what:
        case "loop":
            file.symlink_to(file.name)
        case "dangling":
            file.symlink_to("nowhere")
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
    told = problem(tmp_path, name)
    shown = {"loop": "cannot be opened", "dangling": "file is missing", "pipe": "is not a regular file"}
    assert shown.get(what, "") in told


def test_folders_that_are_links_are_not_entered(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/ann/Bad").mkdir(parents=True)
    (tmp_path / "elsewhere/ann/Bad/x-Q4_0.gguf").write_bytes(b"GGUF")
    models = tmp_path / ".lmstudio/models"
    models.mkdir(parents=True)
    (models / "ann").symlink_to(tmp_path / "elsewhere/ann")
    (models / "loop").symlink_to(models)
    assert everything(places(tmp_path)) == []


def test_a_store_may_itself_be_a_link(tmp_path: Path) -> None:
    """The store's root directory may be a symbolic link, because many users keep models on another disk."""
    lm_studio_model(tmp_path / "disk", "ann/Good/x-Q4_0.gguf")
    (tmp_path / ".lmstudio").symlink_to(tmp_path / "disk/.lmstudio")
    assert [each.problem for each in everything(places(tmp_path))] == [""]


# -- the hub cache and llama.cpp -----------------------------------------------------------------------------------


def test_refs_that_lie_are_ignored(tmp_path: Path) -> None:
    folder = hub_model(tmp_path, "ann/Good", "x-Q4_0.gguf")
    for text in ("../../../../etc", "", "f" * 40, "0" * 4000, "\x00"):
        (folder / "refs/main").write_text(text)
        assert [each.path.parent.name for each in everything(places(tmp_path))] == [COMMIT]
    (folder / "refs/main").unlink()
    (folder / "refs/main").symlink_to("/dev/zero")
    assert [each.path.parent.name for each in everything(places(tmp_path))] == [COMMIT]


def test_folders_that_are_no_repositories_or_commits_are_skipped(tmp_path: Path) -> None:
    folder = hub_model(tmp_path, "ann/Good", "x-Q4_0.gguf")
    for name in ("datasets--ann--Good", "models--", "models--a--b--c--d", "models--..--x", "models--\x1b[2J--x"):
        (folder.parent / name).symlink_to(folder)
        os.unlink(folder.parent / name)
        (folder.parent / name / "snapshots" / COMMIT).mkdir(parents=True)
        (folder.parent / name / "snapshots" / COMMIT / "x.gguf").write_bytes(b"GGUF")
    (folder / "snapshots/main").mkdir()
    (folder / "snapshots/main/y.gguf").write_bytes(b"GGUF")
    assert [each.name for each in everything(places(tmp_path))] == ["ann/Good:Q4_0"]


@pytest.mark.parametrize("file", ["../../../../etc/passwd", "/etc/passwd", "..\\..\\x.gguf", "", 7, None, ["x"], {}])
def test_a_manifest_of_llama_cpp_names_only_files_beside_it(tmp_path: Path, file: Any) -> None:
    llama_model(tmp_path, "ann/Bad", "x-Q4_0.gguf").unlink()
    manifest = tmp_path / ".cache/llama.cpp/manifest=ann=Bad=latest.json"
    manifest.write_text(json.dumps({"ggufFile": {"rfilename": file}}))
    told = problem(tmp_path, "ann/Bad")
    assert "its file is missing" in told or "names no GGUF file" in told


def test_deep_and_crowded_folders_end(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * 50)
    deep.mkdir(parents=True)
    (deep / "x.gguf").touch()
    (tmp_path / "d/y.gguf").touch()
    assert list(files_below(tmp_path)) == ["d/y.gguf"]
    for number in range(30):
        (tmp_path / f"{number}.gguf").touch()
    assert len(list(files_below(tmp_path, budget=[10]))) <= 10
    assert MAX_ENTRIES <= 1_000_000


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b" " * (MAX_JSON + 1))
    with pytest.raises(Unusable, match="larger than"):
        read_object(tmp_path, tmp_path / "m")


# -- deletion ----------------------------------------------------------------------------------------------------------


def test_a_list_of_owned_files_that_lies_deletes_nothing_else(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    folder = hub_model(tmp_path, "ann/Bad", "x-Q4_0.gguf")
    hub = StoreFolders.of({}, tmp_path, "linux").hub
    (found,) = everything(places(tmp_path))
    for blob in ("../../../../../victim", str(victim), "", 5, None, "0" * 63):
        (folder / RECORD).write_text(json.dumps({"files": {"x-Q4_0.gguf": blob}}))
        assert owned(folder) == {}
        assert not is_owned(found, hub)
        with pytest.raises(StoreError, match="was not downloaded by `localllm pull`"):
            remove_model(found, hub)
    (folder / RECORD).unlink()
    (folder / RECORD).symlink_to(victim)
    assert owned(folder) == {}
    # a snapshot that links to a directory outside, with a file of the same name
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x-Q4_0.gguf").write_bytes(b"mine")
    (folder / "snapshots" / ("9" * 40)).symlink_to(tmp_path / "elsewhere")
    (folder / RECORD).unlink()
    (folder / RECORD).write_text(
        json.dumps({"files": {"x-Q4_0.gguf": os.path.realpath(found.path).rpartition("/")[2]}})
    )
    # a blobs directory that links outside
    (tmp_path / "blobs").mkdir()
    (folder / "blobs").rename(tmp_path / "old")
    (folder / "blobs").symlink_to(tmp_path / "blobs")
    (tmp_path / "blobs" / Path(os.readlink(found.path)).name).write_bytes(b"mine")
    remove_model(found, hub)
    assert [path.read_bytes() for path in (tmp_path / "blobs").iterdir()] == [b"mine"]
    assert victim.read_bytes() == (tmp_path / "elsewhere/x-Q4_0.gguf").read_bytes() == b"mine"
    assert not os.path.lexists(found.path)
