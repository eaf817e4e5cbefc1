"""Several processes write the same file at once, and some are killed. The file must always be complete, with
one process's content.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import ClassVar

import numpy as np
from llvmlite import ir

import localllm
from localllm.backends.cpu.isa import Isa, host
from localllm.backends.cpu.jit import Kernel, Library
from localllm.evaluation import Windows
from localllm.evaluation.logits_file import save_base
from localllm.gguf import write_gguf
from localllm.quantize.calibration import imatrix
from localllm.quantize.calibration.imatrix import Imatrix, ImatrixEntry
from localllm.saved import prompt_cache
from tests.fuzz.case import OURS, Case, Wrong
from tests.localllm.support import write_model

WRITERS = 3
_DONE, _REFUSED, _BROKEN = 0, 1, 2  # exit codes of a writer process

Writer = Callable[[Path, int], None]  # (path, number of the writer)


class Kind:
    together: ClassVar[int] = 25
    seconds: ClassVar[float] = 30.0

    def __init__(self, home: Path) -> None:
        path = write_model(home / "model.gguf")
        self._model = localllm.load(path, threads=1)
        self._sessions = []
        for number in range(WRITERS):
            self._sessions.append(session := self._model.session())
            session.evaluate([1 + number] * (65 + 40 * number), logits=False)

    def make(self, random: Random, folder: Path) -> Case:
        size = random.choice((1, 100, 10_000, 300_000))
        name = random.choice(("gguf", "imatrix", "base logits", "prompt cache", "kernel"))
        new = name != "kernel" and random.random() < 0.4  # only one process may create the file
        write = self._writer(name, size, not new)
        target, before = (
            folder / ("target.dat" if name == "imatrix" else "target"),
            name != "new gguf" and random.random() < 0.5,
        )
        if before:
            write(target, random.randrange(WRITERS))
        killed = [random.random() < 0.25 for _ in range(WRITERS)]
        delays = [random.choice((0.0, 0.0, 0.0002, 0.001)) for _ in range(WRITERS)]
        changes = (
            f"new {name}" if new else name,
            f"{size} values",
            "there before" if before else "not there before",
            f"killed: {killed}",
        )
        return Case(changes, lambda: _race(write, target, name, new, killed, delays, random))

    def _writer(self, name: str, size: int, force: bool) -> Writer:
        def gguf(path: Path, number: int) -> None:
            data = bytes([number]) * size
            write_gguf(path, {"number": number}, [("x", "I8", (size,), data)], overwrite=force)

        def matrix(path: Path, number: int) -> None:
            entry = ImatrixEntry(np.full((1, size), 1 + number, np.float32), np.array([1], np.int64))
            imatrix.write_imatrix(path, Imatrix({"x": entry}, 1, 1, ("a",)), force)

        def base(path: Path, number: int) -> None:
            windows = Windows(np.full((1, 16), number, np.int32))
            with save_base(path, windows, 10 + size // 100, force) as keep:
                keep(np.full((windows.scored, 10 + size // 100), -1.0 - number, np.float32))

        def cache(path: Path, number: int) -> None:
            said = [{"role": "user", "content": "x" * number}]
            prompt_cache.save(path, self._model, self._sessions[number].sequence, said, force)

        def kernel(path: Path, number: int) -> None:
            Library(host(), path).load([Kernel("answer", _answer)])

        return {"imatrix": matrix, "base logits": base, "prompt cache": cache, "kernel": kernel}.get(name, gguf)


def _race(
    write: Writer, target: Path, name: str, new: bool, killed: list[bool], delays: list[float], random: Random
) -> str:
    """Run the writers, read the file meanwhile, and check the result."""
    known = [_alone(write, target, number, name) for number in range(WRITERS)]
    began = monotonic() + 0.003  # all writers start together
    children = [_start(write, target, number, began + delays[number]) for number in range(WRITERS)]
    try:
        _watch(children, target, name, known, killed, random)
    finally:
        for child in children:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return _judge(target, name, new, known, killed)


def _watch(
    children: list[int], target: Path, name: str, known: list[bytes], killed: list[bool], random: Random
) -> None:
    """Read the file until all writers have ended. Kill some of them."""
    running = set(children)
    kills = {
        child: monotonic() + random.uniform(0, 0.004) for child, dies in zip(children, killed, strict=True) if dies
    }
    seen = _content(target, name) is not None
    while running:
        found = _content(target, name)
        if found is None and seen and name != "kernel":
            raise Wrong("the file was gone for a while")
        if found is not None and found not in known:
            raise Wrong(f"{len(found)} bytes that none of the writers wrote whole")
        seen = seen or found is not None
        for child in running & {c for c in kills if kills[c] < monotonic()}:
            os.kill(child, signal.SIGKILL)
            del kills[child]
        running -= {child for child in running if os.waitpid(child, os.WNOHANG) != (0, 0)}


def _judge(target: Path, name: str, new: bool, known: list[bytes], killed: list[bool]) -> str:
    codes = [int(path.read_text() or "9") for path in sorted(target.parent.glob("code-*"))]
    if _BROKEN in codes:
        raise Wrong("a writer failed with an error that is not ours")
    found, done = _content(target, name), codes.count(_DONE)
    if done and found not in known:
        raise Wrong("a writer said it was done, and the file is not one of theirs")
    if new and done > 1:
        raise Wrong(f"{done} writers say they made a file that was not to be written over")
    if not new and _REFUSED in codes:
        raise Wrong("a writer refused")
    if name == "kernel" and done and _called(target)[1]:
        raise Wrong("a kernel that was compiled is compiled again")
    place = target if name == "kernel" else target.parent
    mine = ("code-", "alone-", target.name)
    rest = [path.name for path in place.iterdir() if not path.name.startswith(mine) and path.suffix != ".o"]
    if rest and not any(killed):
        raise Wrong(f"left behind: {', '.join(rest)}")
    return f"{name}{' anew' if new else ''}, {done} wrote"


def _alone(write: Writer, target: Path, number: int, name: str) -> bytes:
    path = target.with_name(f"alone-{number}{target.suffix}")
    write(path, number)
    found = _content(path, name)
    assert found is not None
    return found


def _content(path: Path, name: str) -> bytes | None:
    """Return the content that a reader finds, or None if the file is missing."""
    if name == "kernel":
        return _called(path)[0]
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _called(folder: Path) -> tuple[bytes, int]:
    """Return the kernel's result, and the number of kernels compiled because of cache misses."""
    library = Library(host(), folder)
    library.load([Kernel("answer", _answer)])
    function = ctypes.CFUNCTYPE(ctypes.c_int64)(library.address("answer"))
    return str(function()).encode(), library.compiled


def _answer(isa: Isa) -> ir.Module:
    """Return a kernel that returns 42."""
    module, word = ir.Module("answer"), ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(word, []), "answer")
    ir.IRBuilder(function.append_basic_block()).ret(word(42))
    return module


def _start(write: Writer, target: Path, number: int, at: float) -> int:
    """Start a child that writes the file and stores its exit code in another file, unless it is killed."""
    child = os.fork()
    if child:
        return child
    code = _BROKEN
    try:
        sleep(max(0.0, at - monotonic()))
        write(target, number)
        code = _DONE
    except OURS:
        code = _REFUSED
    finally:
        with suppress(OSError):
            (target.parent / f"code-{number}").write_text(str(code))
        os._exit(0)
