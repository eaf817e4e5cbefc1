"""Files appear complete or not at all, and leftovers of killed processes are removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import time
from types import FrameType
from typing import Any

import pytest

from localllm.base.files import atomic
from localllm.base.files.atomic import ABANDONED, NewFile, hidden_path
from tests.conftest import full_disk

DEAD = 2**22 + 1  # above Linux's maximum process id


def leftover(folder: Path, age: float = ABANDONED + 60, process: int = DEAD) -> Path:
    path = folder / f".localllm-{process}-0123456789abcdef.tmp"
    path.write_bytes(b"half")
    os.utime(path, (time() - age, time() - age))
    return path


def write(path: Path, data: bytes = b"whole") -> None:
    with NewFile(path) as new:
        new.file.write(data)
        new.commit()


def test_a_file_is_hidden_until_it_is_whole(tmp_path: Path) -> None:
    with NewFile(tmp_path / "a") as new:
        new.file.write(b"whole")
        (only,) = tmp_path.iterdir()
        assert only.name.startswith(".")
        new.commit()
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"whole"


# free bytes on the disk, so that the write fails at close, at flush, or inside a write
@pytest.mark.parametrize("room", [0, 4096, 10_000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, room: int) -> None:
    (tmp_path / "a").write_bytes(b"before")
    for size in (100, 20_000):
        with full_disk(min(room, size - 1)), pytest.raises(OSError, match="File too large"):
            write(tmp_path / "a", bytes(size))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"before"


def test_a_file_without_commit_is_removed(tmp_path: Path) -> None:
    with NewFile(tmp_path / "a") as new:
        new.file.write(b"half")
    with pytest.raises(KeyboardInterrupt), NewFile(tmp_path / "a") as new:
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def interrupted(path: Path, moment: int) -> bool:
    """Write a file, and raise KeyboardInterrupt before the module's bytecode instruction number `moment`.

    Return whether KeyboardInterrupt was raised.
    """
    left = moment

    def trace(frame: FrameType, event: str, value: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != atomic.__file__ or frame.f_code.co_name == "_remove":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 reads this flag in settrace
    sys.settrace(trace)
    try:
        write(path)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the interrupt may hit a file that is open but not yet assigned
def test_an_interrupt_at_any_moment_leaves_no_hidden_file(tmp_path: Path) -> None:
    moment = 1
    while interrupted(tmp_path / "a", moment):
        for path in tmp_path.iterdir():
            assert (path.name, path.read_bytes()) == ("a", b"whole"), f"at bytecode {moment}"
            path.unlink()
        moment += 1
    assert moment > 100


def test_a_file_that_was_never_entered_is_removed(tmp_path: Path) -> None:
    """An unused NewFile is removed when its object is deleted and at exit, but not by a forked child."""
    new = NewFile(tmp_path / "a")
    if os.name == "posix":
        if (child := os.fork()) == 0:
            del new
            os._exit(0)
        os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    del new
    assert list(tmp_path.iterdir()) == []
    code = (
        "import pathlib, sys, localllm.base.files.atomic as a; "
        "a.kept = a.NewFile(pathlib.Path(sys.argv[1])); sys.exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], timeout=60).returncode == 9
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_is_removed_a_day_later(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys, localllm.base.files.atomic as a; "
        "new = a.NewFile(pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], timeout=60).returncode == 9
    (left,) = tmp_path.iterdir()
    write(tmp_path / "b")
    assert left.exists()  # leftovers are kept for a day
    os.utime(left, (time() - ABANDONED - 60,) * 2)
    write(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_nothing_else_is_swept(tmp_path: Path) -> None:
    alive = leftover(tmp_path, process=os.getpid())  # its process still runs
    young = leftover(tmp_path, age=ABANDONED - 60, process=DEAD + 1)
    (link := tmp_path / f".localllm-{DEAD}-0000000000000000.tmp").symlink_to("/no/where")
    os.utime(link, (0, 0), follow_symlinks=False)
    (folder := tmp_path / f".localllm-{DEAD}-0000000000000001.tmp").mkdir()
    os.utime(folder, (0, 0))
    (other := tmp_path / f".localllm-{DEAD}-0000000000000001.tmp.gguf").touch()
    os.utime(other, (0, 0))
    dead = leftover(tmp_path)
    write(tmp_path / "a")
    assert not dead.exists()
    assert sorted(tmp_path.iterdir()) == sorted([alive, young, link, folder, other, tmp_path / "a"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
def test_another_user_s_leftovers_stay(tmp_path: Path) -> None:
    left = leftover(tmp_path)
    os.chown(left, 65534, 65534)
    write(tmp_path / "a")
    assert left.exists()


def test_every_hidden_name_is_new_and_known_to_the_sweep(tmp_path: Path) -> None:
    names = {hidden_path(tmp_path) for _ in range(100)}
    assert len(names) == 100
    for path in names:
        path.touch()
        path = path.rename(path.with_name(path.name.replace(f"-{os.getpid()}-", f"-{DEAD}-")))
        os.utime(path, (0, 0))
    write(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_name_that_must_be_new(tmp_path: Path) -> None:
    """If two processes create the same new file, one succeeds and the other gets an error."""
    with NewFile(tmp_path / "a") as mine, NewFile(tmp_path / "a") as theirs:
        theirs.file.write(b"theirs")
        theirs.commit(replace=False)
        with pytest.raises(FileExistsError):
            mine.commit(replace=False)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"theirs")]


def test_a_name_that_must_be_new_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with NewFile(tmp_path / "a") as new:
        new.commit(replace=False)
    with NewFile(tmp_path / "a") as other, pytest.raises(FileExistsError):
        other.commit(replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
