"""Calls NVRTC through ctypes. NVRTC compiles CUDA C to a cubin for one architecture, without driver, GPU or headers."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from localllm.backends.base import BackendError
from localllm.base.notices import Notice, Setting

OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin, and ptxas's report on its kernel."""

    cubin: bytes
    registers: int
    spilled: int  # bytes of register spills: stores or loads
    stack: int  # stack frame in bytes


def _libraries() -> list[str]:
    """Return the possible paths of the NVRTC library: in the pip wheel, then on the system."""
    found: list[Path] = []
    spec = find_spec("nvidia")
    for base in spec.submodule_search_locations or () if spec is not None else ():
        found += sorted(Path(base).glob("**/libnvrtc.so.*"), reverse=True)
    names = [str(path) for path in found if "builtins" not in path.name]
    system = ctypes.util.find_library("nvrtc")
    return names + ([system] if system else [])


class Nvrtc:
    """The NVRTC library, opened once."""

    def __init__(self) -> None:
        for name in _libraries():
            try:
                # NVRTC 13.0 does not find its builtins library by itself.
                for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
                self._library = ctypes.CDLL(name)
            except OSError:
                continue
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
            self.version = f"{major.value}.{minor.value}"
            return
        problem = "NVRTC, NVIDIA's run-time compiler, is missing: pip install nvidia-cuda-nvrtc, or use "
        raise BackendError(Notice(problem, Setting("backend", "cpu")))

    def _check(self, result: int) -> None:
        if result:
            raise BackendError(f"NVRTC: {self._library.nvrtcGetErrorString(result).decode()}")

    def compile(self, source: str, name: str, architecture: str, options: Sequence[str] = OPTIONS) -> Compiled:
        """Compile for an architecture such as sm_90. On failure, BackendError holds the compiler's log."""
        library, program = self._library, ctypes.c_void_p()
        self._check(
            library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
        )
        words = [f"--gpu-architecture={architecture}", "--ptxas-options=-v", *options]
        array = (ctypes.c_char_p * len(words))(*[word.encode() for word in words])
        result = library.nvrtcCompileProgram(program, len(words), array)
        log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        cubin = b"" if result else self._text(program, "CUBIN")
        library.nvrtcDestroyProgram(ctypes.byref(program))
        if result:
            raise BackendError(f"NVRTC {self.version}, {architecture}: it refuses {name}: {log[:2000]}")
        return Compiled(
            cubin, _number(r"Used (\d+) registers", log), _number(r"(\d+) bytes spill (?:stores|loads)", log),
            _number(r"(\d+) bytes stack frame", log),
        )  # fmt: skip

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw


def _number(pattern: str, log: str) -> int:
    return sum(int(found) for found in re.findall(pattern, log))
