"""`localllm doctor`: facts about the computer as text and JSON. `--clean` deletes only known files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from localllm.backends.cpu.isa import Isa, for_cpu
from localllm.base.machine.memory import memory
from localllm.base.machine.processor import processor_name
from localllm.cli.commands import doctor as command
from localllm.cli.commands import doctor_speed
from localllm.cli.commands.doctor_caches import clean, find_caches
from localllm.cli.commands.doctor_speed import WatchedSpeed
from localllm.cli.commands.doctor_versions import PACKAGES, without_home
from localllm.cli.main import main
from localllm.saved.prompt_cache import MAGIC
from tests.localllm.support import Terminal

KERNEL, CODE, PREFIX = "a1" * 20 + ".o", "0f" * 12, "b2" * 16 + ".prefix"


def test_the_report_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    titles = [line for line in out.splitlines() if not line.startswith(" ")]
    assert titles[:3] == ["localllm", "processor", "memory"]
    assert titles[3].startswith("speed with ")
    assert titles[4] == f"device cpu 0: {processor_name()}"
    assert titles[-1] == "on disk"
    assert any(title.startswith("device opencl 0: ") for title in titles)
    assert any(title.startswith("device cuda") for title in titles)
    assert re.search(r"^  templates +confined by limits", out, re.M)
    assert "GB/s: the roof of decoding" in out
    assert "GOP/s on bytes: the roof of prompts" in out
    assert all(len(line) < 120 for line in out.splitlines())
    assert all(f"\n  {name} " in out for name in PACKAGES)


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["processor"]["name"] == processor_name()
    assert found["memory"]["total"] == memory().total
    assert found["confined"][0] == "limits"
    assert found["versions"]["numpy"]
    assert found["devices"][0]["backend"] == "cpu"
    speed = found["speed"]
    assert 1e8 < speed["read_bytes"] < 1e13
    assert 1e8 < speed["byte_operations"] < 1e15
    assert {each["name"] for each in found["caches"]} >= {"compiled code for the CPU"}


def test_what_better_instruction_sets_lack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(cpu: str, *features: str) -> dict[str, Any]:
        isa: Isa = for_cpu(cpu, dict.fromkeys(features, True), "x86_64")
        monkeypatch.setattr("localllm.backends.cpu.isa.host", lambda: isa)
        return command.kernel_facts()

    haswell = seen("haswell", "avx2", "fma", "f16c")
    assert haswell["instruction_set"] == "avx2"
    assert haswell["lacking"] == {
        "avx512-vnni": ["avx512f", "avx512bw", "avx512vl", "avx512vnni"], "avx-vnni": ["avxvnni"],
    }  # fmt: skip
    best = seen("znver4", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "fma", "f16c", "avx512bf16")
    assert (best["lacking"], best["bfloat_dot"], best["byte_permute"]) == ({}, True, False)
    old = seen("core2", "sse3")
    assert old["lacking"]["avx2"] == ["avx2", "fma", "f16c"]


# -- a busy computer -------------------------------------------------------------------------------------------------


def test_a_busy_computer_is_told() -> None:
    quiet = WatchedSpeed([10.0, 9.5, 9.0], 0.99)
    assert doctor_speed._doubts("reading", quiet) == []
    shared = doctor_speed._doubts("reading", WatchedSpeed([10.0, 9.5, 9.0], 0.6))
    assert shared == ["while reading, other programs took 40% of the processors"]
    (uneven,) = doctor_speed._doubts("multiplying", WatchedSpeed([20.0, 10.0, 10.0], 1.0))
    assert uneven == "multiplying was 2.0 times as fast in the best pass as in the middle one"


def test_doubts_are_beside_the_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (3.25, 1.0, 1.0))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "the computer is busy, so both may be too low" in out
    assert "the 1-minute load average was 3.2" in out


# -- caches ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create cache directories with known and unknown files, and with saved prefixes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    base = tmp_path / "cache" / "localllm"
    numba = base / "quant" / CODE / "search_1234"
    for folder in (base / "kernels", base / "gpu", numba, tmp_path / "prefixes", base / "quant" / "empty of another"):
        folder.mkdir(parents=True)
    (base / "kernels" / KERNEL).write_bytes(b"k" * 100)
    (base / "kernels" / "notes.txt").write_bytes(b"mine")
    (base / "kernels" / ("c3" * 20 + ".gguf")).write_bytes(b"GGUF")
    (base / "gpu" / ("d4" * 20)).write_bytes(b"g" * 10)
    (numba / "f-12.py312.nbi").write_bytes(b"n" * 5)
    (numba / "f-12.py312.1.nbc").write_bytes(b"n" * 5)
    (tmp_path / "outside.o").write_bytes(b"precious")
    (base / "kernels" / ("e5" * 20 + ".o")).symlink_to(tmp_path / "outside.o")
    (tmp_path / "prefixes" / PREFIX).write_bytes(MAGIC + b"p" * 50)
    (tmp_path / "prefixes" / ("f6" * 16 + ".prefix")).write_bytes(b"something else")
    (tmp_path / "prefixes" / "model.gguf").write_bytes(b"GGUF")
    return tmp_path


def left(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or path.is_file()}


def test_sizes_are_those_of_our_files(cache: Path) -> None:
    found = {each.name: each for each in find_caches(str(cache / "prefixes"))}
    cpu = found["compiled code for the CPU"]
    assert (len(cpu.files), cpu.bytes, cpu.others) == (1, 100, 3)
    assert found["compiled code for quantizing"].bytes == 10
    assert found["compiled code for graphics cards"].bytes == 10
    prefixes = found["prompt prefixes"]
    assert (len(prefixes.files), prefixes.bytes, prefixes.others) == (1, len(MAGIC) + 50, 2)


def test_clean_removes_only_what_localllm_made(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = {
        "cache/localllm/kernels/notes.txt", "cache/localllm/kernels/" + "c3" * 20 + ".gguf",
        "cache/localllm/kernels/" + "e5" * 20 + ".o", "outside.o", "prefixes/" + "f6" * 16 + ".prefix",
        "prefixes/model.gguf",
    }  # fmt: skip
    assert main(["doctor", "--clean", "--yes"]) == 0
    assert capsys.readouterr().err == "deleted 4 files: 120 B freed; code is compiled again when it is needed\n"
    assert left(cache) == strange | {f"prefixes/{PREFIX}"}
    assert main(["doctor", "--clean", "--yes", "--cache-dir", str(cache / "prefixes"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": 1, "bytes": len(MAGIC) + 50}
    assert left(cache) == strange
    assert not (cache / "cache/localllm/quant" / CODE).exists()
    assert (cache / "cache/localllm/quant/empty of another").is_dir()
    assert main(["doctor", "--clean", "--yes"]) == 0
    assert capsys.readouterr().err == "nothing to delete\n"


def test_files_that_vanish_meanwhile_are_no_error(cache: Path) -> None:
    found = find_caches()
    (cache / "cache/localllm/kernels" / KERNEL).unlink()
    assert clean(found) == (3, 20)


def test_without_a_terminal_clean_needs_yes(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = left(cache)
    assert main(["doctor", "--clean"]) == 2
    assert "use --yes to delete without confirmation" in capsys.readouterr().err
    assert main(["doctor", "--yes"]) == 2
    assert "--yes has no effect without --clean" in capsys.readouterr().err
    assert main(["doctor", "--clean", "--yes", "--cache-dir", str(cache / "nowhere")]) == 1
    assert f"no such folder: {cache / 'nowhere'}" in capsys.readouterr().err
    assert left(cache) == before


@pytest.mark.parametrize(("answer", "deleted"), [("n", False), ("", False), ("yes", True)])
def test_on_a_terminal_clean_asks(cache: Path, answer: str, deleted: bool) -> None:
    terminal = Terminal("doctor", "--clean", environ={"XDG_CACHE_HOME": str(cache / "cache")})
    terminal.wait_for(r"compiled code for the CPU: 1 file, 100 B")
    terminal.wait_for(r"delete 4 files \(120 B\)\? \[y/N\] ")
    terminal.type(f"{answer}\n")
    terminal.wait_for("4 files: 120 B freed" if deleted else "nothing was deleted")
    assert terminal.end() == 0
    assert (cache / "cache/localllm/kernels" / KERNEL).exists() is not deleted


def test_a_report_does_not_name_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.cli.commands.doctor_versions._HOME", "/home/ada")
    assert without_home("/home/ada/.cache/localllm") == "~/.cache/localllm"
    assert without_home("/home/adam/x") == "/home/adam/x"
    assert without_home(Path("/home/ada")) == "~"
