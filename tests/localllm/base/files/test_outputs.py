"""Output files of commands: never replaced without --force, never an input file, and never partial."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest

from localllm.base.files import outputs
from localllm.base.files.outputs import OutputError, check_target, new_file, scratch
from localllm.cli.main import main
from localllm.gguf import NewTensor, open_gguf, write_gguf
from tests.conftest import full_disk
from tests.localllm.support import PROGRAM, REPOSITORY, default_signals, write_model

TEXT = REPOSITORY / "benchmarks" / "demo" / "smalltalk.txt"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_exists_is_replaced_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(OutputError, match="a: exists; give another name, or force=True"), new_file(path):
        pytest.fail("nothing is to be written")
    assert path.read_bytes() == b"old"
    with new_file(path, overwrite=True) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert (path.read_bytes(), file.size) == (b"new", 3)


def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def write() -> None:
        with new_file(tmp_path / "a") as file:
            file.write(b"ours")
            (tmp_path / "a").write_bytes(b"theirs")

    with pytest.raises(OutputError, match="exists"):
        write()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"theirs"]


@pytest.mark.parametrize("make", [os.link, os.symlink, lambda read, path: None], ids=["hard link", "link", "itself"])
def test_what_is_read_is_never_replaced(make: Callable[[Path, Path], None], tmp_path: Path) -> None:
    read, path = tmp_path / "model", tmp_path / "out"
    read.write_bytes(b"model")
    make(read, path)
    target = path if path.exists() else tmp_path / "x" / ".." / "model"
    (tmp_path / "x").mkdir()
    for force in (False, True):
        with pytest.raises(OutputError, match="this file is being read; give the output another name"):
            check_target(target, force, ["/no/such/file", read])
    check_target(tmp_path / "other", False, [read])


def test_a_dangling_link_counts_as_there(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("nowhere")
    with pytest.raises(OutputError, match="exists"):
        check_target(tmp_path / "a", False)
    with new_file(tmp_path / "a", overwrite=True) as file:
        file.write(b"new")
    assert not (tmp_path / "a").is_symlink()
    assert not (tmp_path / "nowhere").exists()


def test_a_link_is_replaced_and_not_what_it_means(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "a").symlink_to("file")
    with new_file(tmp_path / "a", overwrite=True) as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert (tmp_path / "a").read_bytes() == b"new"


def test_only_a_file_is_replaced(tmp_path: Path) -> None:
    """--force replaces only regular files.

    Otherwise `quantize m.gguf /dev/null --force` as root would replace the device.
    """
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/null"), tmp_path / "pipe"):
        with pytest.raises(OutputError, match="is a device or a pipe, which cannot be replaced"):
            check_target(path, True)
    with pytest.raises(OutputError, match="is a folder; give the name of a file to write"):
        check_target(tmp_path, True)
    with pytest.raises(OutputError, match=f"no such folder: {tmp_path}/no; create it first"):
        check_target(tmp_path / "no" / "a", False)
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        check_target(Path("/dev/null/a"), False)


def test_a_file_keeps_the_permissions_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "link").symlink_to("secret")
    for name in ("new", "secret", "link"):
        with new_file(tmp_path / name, overwrite=True) as file:
            file.write(b"x")
    plain = (tmp_path / "plain").stat().st_mode
    # the link is replaced by a new file with the default mode, not the mode of the link's target
    assert [(tmp_path / name).stat().st_mode for name in ("new", "link")] == [plain, plain]
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError])
def test_an_error_of_the_writer_leaves_nothing_and_passes(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def write() -> None:
        with new_file(tmp_path / "a", overwrite=True) as file:
            file.write(b"new" * 10_000)
            raise error("ours")

    def work() -> None:
        with scratch(tmp_path / "a") as path:
            path.touch()
            raise error("ours")

    for failing in (write, work):
        with pytest.raises(error, match="ours"):
            failing()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("size", [100, 20_000])  # sizes that fail when the buffer is flushed, and inside a write
def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path: Path, size: int) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def write() -> None:
        with new_file(tmp_path / "a", overwrite=True) as file:
            file.write(bytes(size))

    with full_disk(size // 3), pytest.raises(OutputError, match=f"^{tmp_path}/a: cannot be written: File too large$"):
        write()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


# -- commands ------------------------------------------------------------------------------------------------------


def commands(model: Path, out: Path) -> dict[str, list[str]]:
    """Return the arguments of every command that writes a file, by command name."""
    measured = ["-f", str(TEXT), "-c", "64", "--chunks", "2"]
    return {
        "perplexity": ["perplexity", str(model), *measured, "--save-base", str(out)],
        "imatrix": ["imatrix", str(model), *measured, "-o", str(out)],
        "imatrix.dat": ["imatrix", str(model), *measured, "-o", f"{out}.dat"],
        "quantize": ["quantize", str(model), str(out), "Q5_0", "--allow-requantize"],
    }


@pytest.mark.parametrize("name", ["perplexity", "imatrix", "imatrix.dat", "quantize"])
def test_every_command_overwrites_with_force_alone(
    name: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = commands(tiny, tmp_path / "out")[name]
    target = tmp_path / ("out.dat" if name.endswith(".dat") else "out")
    target.write_text("mine")
    assert main(words) == 1
    assert capsys.readouterr().err == f"error: {target}: exists; give another name, or --force\n"
    assert target.read_text() == "mine"
    assert main([*words, "--force"]) == 0
    assert target.read_bytes() != b"mine"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["perplexity", "imatrix", "quantize"])
def test_no_command_writes_a_file_named_like_stdout(
    name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(commands(tiny, Path("-"))[name]) == 1
    assert capsys.readouterr() == (
        "",
        "error: -: this output cannot go to stdout, because a file appears only when complete; name a file\n",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["perplexity", "imatrix", "quantize"])
def test_no_command_writes_over_what_it_reads(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands refuse an output path that is their input, a hard link to it, or a symbolic link to it."""
    model = write_model(tmp_path / "tiny.gguf")
    os.link(model, tmp_path / "hard")
    (tmp_path / "soft").symlink_to("tiny.gguf")
    before = model.read_bytes()
    for out in ("tiny.gguf", "hard", "soft"):
        assert main([*commands(model, tmp_path / out)[name], "--force"]) == 1
        assert (
            capsys.readouterr().err
            == f"error: {tmp_path / out}: this file is being read; give the output another name\n"
        )
    assert (model.read_bytes(), (tmp_path / "hard").stat().st_nlink) == (before, 2)


def test_base_logits_that_are_read_are_not_replaced(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    assert main(commands(tiny, base)["perplexity"]) == 0
    (text := tmp_path / "text").write_bytes(TEXT.read_bytes())
    for read, words in ((base, ["--kld", str(base)]), (text, ["-f", str(text)])):
        assert main(["perplexity", str(tiny), *words, "--save-base", str(read), "--force"]) == 1
        assert "this file is being read" in capsys.readouterr().err


def split(folder: Path) -> list[Path]:
    """Write a model split into two parts."""
    parts = [folder / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    with open_gguf(write_model(folder / "whole.gguf")) as file:
        tensors = [NewTensor(t.name, t.format, t.shape, t.read(0, t.rows)) for t in file.tensors.values()]
        for number, (path, own) in enumerate(zip(parts, (tensors[:4], tensors[4:]), strict=True)):
            counts: dict[str, np.integer] = {"split.no": np.uint16(number), "split.count": np.uint16(2)}
            counts["split.tensors.count"] = np.int32(len(tensors))
            write_gguf(path, {**file.stored, **counts} if number == 0 else counts, own)
    return parts


@pytest.mark.parametrize("name", ["perplexity", "imatrix", "quantize"])
def test_no_part_of_a_split_model_is_replaced(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = split(tmp_path)
    assert main([*commands(first, second)[name], "--force"]) == 1
    assert capsys.readouterr().err == f"error: {second}: this file is being read; give the output another name\n"


# -- signals -------------------------------------------------------------------------------------------------------


def writing(out: Path, *before: str) -> subprocess.Popen[bytes]:
    """Start `perplexity --save-base` and wait until it writes."""
    words = ["perplexity", "demo", "-f", str(TEXT), "-c", "4", "--chunks", "100000", "--save-base", str(out / "base")]
    text = out.parent / "long.txt"
    text.write_text(TEXT.read_text() * 20)
    words[words.index(str(TEXT))] = str(text)
    process = subprocess.Popen(
        [*before, *PROGRAM, *words], cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, preexec_fn=default_signals,
    )  # fmt: skip
    end = monotonic() + 60
    while not list(out.iterdir()) and process.poll() is None:
        assert monotonic() < end, "it wrote nothing for a minute"
        sleep(0.02)
    return process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)], ids=lambda x: str(x)
)
def test_a_signal_leaves_no_file(number: signal.Signals, code: int, tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    with writing(out) as process:
        assert [path.name.startswith(".localllm-") for path in out.iterdir()] == [True]
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    stopped = rb"(stopped: the numbers cover \d+ of \d+ windows; .*base was not written\n)?"
    assert re.fullmatch(stopped if number == signal.SIGINT else b"", err)  # no message if no window is complete
    assert list(out.iterdir()) == []


def test_what_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    with writing(out, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        sleep(0.5)
        assert process.poll() is None
        assert len(list(out.iterdir())) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        process.communicate(timeout=60)
    assert list(out.iterdir()) == []


def test_a_second_signal_does_not_interrupt_the_cleaning_up(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from localllm.cli.terminal.signals import unwinding\n"
        "with unwinding():\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    finally: os.kill(os.getpid(), signal.SIGHUP); os.kill(os.getpid(), signal.SIGTERM); print('clean')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, timeout=60, preexec_fn=default_signals
    )
    assert (done.returncode, done.stdout) == (143, b"clean\n")


def test_a_file_that_appears_at_the_last_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that appears between the last check and the rename is not overwritten."""
    path = tmp_path / "a"
    path.write_bytes(b"theirs")
    monkeypatch.setattr(outputs, "check_target", lambda path, force: None)
    with pytest.raises(OutputError, match="a: exists; give another name"), new_file(path) as file:
        file.write(b"mine")
    assert [(other.name, other.read_bytes()) for other in tmp_path.iterdir()] == [("a", b"theirs")]
