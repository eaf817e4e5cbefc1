"""Opening untrusted paths: pipes, sockets, devices, directories and foreign files are refused at once, with a clear
message.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.base.files.regular import inside, open_regular, read_given, read_regular
from tests.localllm.support import localllm as program

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has none of these")


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """Fail after a minute instead of waiting forever for a pipe's writer."""

    def late(*_: object) -> None:
        raise AssertionError("opening waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def special(folder: Path, kind: str) -> Path:
    path = folder / kind
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(path))
        case "device":
            path.symlink_to("/dev/zero")
    return path


KINDS = ("pipe", "folder", "socket", "device")


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    path = special(tmp_path, kind)
    with pytest.raises(OSError, match=f"is not a regular file but a {kind}"):
        open_regular(path)
    if kind == "pipe":
        assert read_given(path, 10) == b""  # a pipe without a writer reads as empty
    else:
        with pytest.raises(OSError, match=f"a {kind}"):
            read_given(path, 10)


def test_own_files_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert open_regular(tmp_path / "link").read() == b"x"
    assert open_regular(tmp_path / "file", own=True).read() == b"x"
    with pytest.raises(OSError, match="is a link, which is not followed"):
        open_regular(tmp_path / "link", own=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_files_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.chown(tmp_path / "file", 12345, -1)
    with pytest.raises(OSError, match="belongs to another user"):
        open_regular(tmp_path / "file", own=True)


def test_what_a_shell_passes_is_read(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"grammar")
    os.close(writer)
    assert read_given(f"/dev/fd/{reader}", 100) == b"grammar"
    os.close(reader)
    assert read_given(os.devnull, 100) == b""


def test_sizes_are_limited(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(11))
    assert read_regular(tmp_path / "file", 11) == bytes(11)
    with pytest.raises(OSError, match="is larger than 0 MB"):
        read_regular(tmp_path / "file", 10)


def test_links_stay_inside_a_folder_or_a_repository_of_the_hub(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs, tmp_path / "other"):
        folder.mkdir(parents=True)
    for path in (blobs / "f00", tmp_path / "secret"):
        path.touch()
    for name, target in (("weights", "../../blobs/f00"), ("out", "../../../secret"), ("beside", "weights")):
        (snapshot / name).symlink_to(target)
    (tmp_path / "other" / "out").symlink_to(blobs / "f00")
    found = {name: inside(snapshot / name, snapshot) for name in ("weights", "out", "beside", "missing")}
    assert found == {"weights": True, "out": False, "beside": True, "missing": True}
    assert not inside(tmp_path / "other" / "out", tmp_path / "other")


TEXTS = (
    ("run", "demo", "-f"),
    ("run", "demo", "hi", "--grammar-file"),
    ("run", "demo", "hi", "--chat-template"),
    ("perplexity", "demo", "-f"),
    ("embed", "demo", "-f"),
    ("serve", "demo", "--port", "0", "--api-key-file"),
    ("run", "demo", "hi", "--prompt-cache"),
    ("show",),
    ("run",),
)


@pytest.mark.parametrize("words", TEXTS, ids=" ".join)
def test_a_pipe_without_a_writer_never_stops_a_command(words: tuple[str, ...], tmp_path: Path) -> None:
    done = program(*words, special(tmp_path, "pipe"), environ={"NO_COLOR": "1"})
    assert done.returncode in (1, 2)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_special_files_are_one_line(kind: str, tmp_path: Path) -> None:
    done = program("run", "demo", "hi", "--grammar-file", special(tmp_path, kind), environ={"NO_COLOR": "1"})
    assert (done.returncode, done.stdout) == (1, "")
    assert f"a {kind}" in done.stderr


def test_a_grammar_from_a_shell(tmp_path: Path) -> None:
    words = f"{sys.executable} -m localllm run demo hi -n 4 --grammar-file <(echo 'root ::= \"yes\"')"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "yes"
