"""Slot files have plain names, and links are refused. Only slot files are replaced, and a missing folder is
an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import localllm
from localllm.engine import SequenceRows
from localllm.saved.prompt_cache import CacheFileError
from localllm.saved.slot_files import NAME_BYTES, SlotFiles


@pytest.fixture(scope="module")
def model() -> Iterator[localllm.Model]:
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=256, sequences=2) as model:
        yield model


@pytest.fixture
def files(model: localllm.Model, tmp_path: Path) -> Iterator[SlotFiles]:
    (tmp_path / "slots").mkdir()
    yield SlotFiles(tmp_path / "slots", model)
    assert model.pool.free_blocks == model.pool.blocks


def test_a_sequence_comes_back(model: localllm.Model, files: SlotFiles) -> None:
    sequence = model.engine.add()
    tokens = list(range(3, 90))
    model.engine.step([SequenceRows(sequence, tokens)])
    size = files.save("ü b (1).bin", sequence)
    model.engine.release(sequence)
    found, read = files.load("ü b (1).bin")
    assert (list(found.tokens), read) == (tokens, size)
    found.free()


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/b", "/a", "a\\b", "C:a", "a*", "a?", "a\0", "a\n", " a", "a ", "a.", ".a", "\ud800",
     "é" * (NAME_BYTES // 2 + 1), "a" * (NAME_BYTES + 1), "a\x85b", "con|", '"a"', "<a>"],
)  # fmt: skip
def test_names_are_plain(files: SlotFiles, model: localllm.Model, name: str) -> None:
    sequence = model.engine.add()
    for attempt in (lambda: files.save(name, sequence), lambda: files.load(name)):
        with pytest.raises(CacheFileError, match="is not a name"):
            attempt()
    assert list(Path(files._folder).iterdir()) == []


def test_links_are_not_followed(files: SlotFiles, model: localllm.Model, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"LOCALLLM")
    (files._folder / "link").symlink_to(tmp_path / "target")
    with pytest.raises(CacheFileError, match="is a link"):
        files.save("link", model.engine.add())
    with pytest.raises(CacheFileError, match="is a link"):
        files.load("link")
    assert (tmp_path / "target").read_bytes() == b"LOCALLLM"


def test_other_files_stay_and_errors_do_not_name_the_folder(files: SlotFiles, model: localllm.Model) -> None:
    (files._folder / "notes").write_text("mine")
    sequence = model.engine.add()
    for attempt in (lambda: files.save("notes", sequence), lambda: files.load("notes"), lambda: files.load("none")):
        with pytest.raises(CacheFileError) as raised:
            attempt()
        assert str(files._folder) not in str(raised.value)
        assert str(raised.value).startswith(("notes", "none"))
    assert (files._folder / "notes").read_text() == "mine"


def test_what_is_no_file_is_refused_at_once(files: SlotFiles, model: localllm.Model) -> None:
    """Opening a pipe would block the thread that evaluates all requests."""
    os.mkfifo(files._folder / "pipe")
    (files._folder / "folder").mkdir()
    sequence = model.engine.add()
    for name in ("pipe", "folder"):
        for attempt in (lambda name=name: files.save(name, sequence), lambda name=name: files.load(name)):
            with pytest.raises(CacheFileError, match=f"{name}: (exists and is not|cannot be read: is not a regular)"):
                attempt()
    model.engine.release(sequence)


def test_only_this_user_reads_saved_prompts(files: SlotFiles, model: localllm.Model) -> None:
    sequence = model.engine.add()
    model.engine.step([SequenceRows(sequence, [1, 2, 3])])
    files.save("a", sequence)
    (files._folder / "a").chmod(0o644)  # the mode that earlier versions gave the file
    files.save("a", sequence)
    model.engine.release(sequence)
    assert (files._folder / "a").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_files_and_folders_of_others_are_refused(files: SlotFiles, model: localllm.Model) -> None:
    sequence = model.engine.add()
    model.engine.step([SequenceRows(sequence, [1, 2, 3])])
    files.save("a", sequence)
    model.engine.release(sequence)
    os.chown(files._folder / "a", 12345, -1)
    with pytest.raises(CacheFileError, match="a: cannot be read: belongs to another user"):
        files.load("a")
    os.chown(files._folder, 12345, -1)
    with pytest.raises(localllm.LocalLLMError, match="belongs to another user, who could read prompts"):
        SlotFiles(files._folder, model)
