"""The kernel cache on disk: kernels are reused, a damaged entry is never loaded, and without a usable folder
kernels are compiled again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
from pathlib import Path

import pytest

from localllm.backends.cpu import isa
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.jit import Kernel, Library
from localllm.backends.cpu.simd import Function
from localllm.quant.codecache import NoCodeCache

HOST = isa.host()


def answer(number: int, name: str = "answer") -> Kernel:
    """Return a kernel that returns the given number."""

    def emit(isa: Isa):  # type: ignore[no-untyped-def]
        return Function(name, 0, isa).finish(number)

    return Kernel(name, emit)


def run(library: Library, name: str = "answer") -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64)(library.address(name))())


def load(folder: Path | None, kernel: Kernel, isa: Isa = HOST) -> Library:
    library = Library(isa, folder)
    library.load([kernel])
    return library


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = load(tmp_path, answer(42))
    assert (run(first), first.compiled) == (42, 1)
    second = load(tmp_path, answer(0))  # the cache key is the name, so the file on disk is loaded
    assert (run(second), second.compiled) == (42, 0)


def test_loading_again_and_more(tmp_path: Path) -> None:
    library = load(tmp_path, answer(1))
    heard: list[tuple[int, int, str]] = []
    library.load([answer(1), answer(2, "other"), answer(3, "third")], lambda *news: heard.append(news))
    assert [run(library, name) for name in ("answer", "other", "third")] == [1, 2, 3]
    assert heard == [(0, 2, "other"), (1, 2, "third"), (2, 2, "")]
    assert library.compiled == 3


def test_names_of_the_c_library_are_ours(tmp_path: Path) -> None:
    """Kernels named read and select do not shadow the libc functions, and are not shadowed by them."""
    library = load(tmp_path, answer(7, "read"))
    assert run(library, "read") == 7
    assert library.address("read") != ctypes.cast(ctypes.CDLL(None).read, ctypes.c_void_p).value


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "garbage"])
def test_a_damaged_object_is_compiled_again(tmp_path: Path, damage: str) -> None:
    load(tmp_path, answer(42))
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(
        {
            "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "cut": data[:middle],
            "empty": b"",
            "garbage": os.urandom(200),
        }[damage]
    )
    again = load(tmp_path, answer(42))
    assert (run(again), again.compiled) == (42, 1)
    assert path.read_bytes() == data  # the kernel was written again
    assert load(tmp_path, answer(42)).compiled == 0


def test_an_object_is_its_checksum_and_its_code(tmp_path: Path) -> None:
    load(tmp_path, answer(42))
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    assert data[:32] == hashlib.sha256(data[32:]).digest()
    assert data[32:36] == b"\x7fELF"


def test_the_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    load(folder, answer(42))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(NoCodeCache, match=f"{tmp_path}/file: Not a directory"):
        library = load(tmp_path / "file" / "kernels", answer(42))
    assert (run(library), library.compiled) == (42, 1)
    with pytest.warns(NoCodeCache, match="/proc/no: No such file or directory"):
        assert load(Path("/proc/no/such/place"), answer(42)).compiled == 1


def test_no_folder_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load(None, answer(42)).compiled == 1
    assert load(None, answer(42)).compiled == 1
    assert not list(tmp_path.iterdir())


def test_the_key_holds_the_instruction_set_and_the_name(tmp_path: Path) -> None:
    keys = set()
    rows = [isa.isa_named(name) for name in ("avx512-vnni", "avx-vnni", "avx2", "generic")]
    rows.append(isa.for_cpu("znver4", dict.fromkeys(isa.X86_ROWS["avx2"][0], True), "x86_64"))
    for row in rows:
        for name in ("a", "b"):
            keys.add(Library(row, tmp_path)._key(name))
    assert len(keys) == 2 * len(rows)


def test_the_key_holds_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache key includes the kernel's source, so code compiled from an older source is not loaded."""
    load(tmp_path, answer(42))
    monkeypatch.setattr("localllm.backends.cpu.jit._source_hash", lambda: b"another version")
    changed = load(tmp_path, answer(43))
    assert (run(changed), changed.compiled) == (43, 1)
