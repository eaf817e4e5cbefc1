"""A device that runs the CUDA version of the kernels on the host, with a C++ compiler and `emulation.h`.

Only the GPU is replaced, so plans use tensor-core kernels and run end to end.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import F16_CACHE, CacheTypes, Limits, Progress
from localllm.backends.gpu.device import Facts, Grid
from localllm.backends.gpu.executable import GpuExecutable
from localllm.plan import Plan, Value

HEADER = Path(__file__).with_name("emulation.h")
OPTIONS = (
    "-std=c++17",
    "-O0",  # a kernel runs once or twice, so optimization would take longer than it saves
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-w",
    "-DHOST_EMULATION",
    "-fsanitize=alignment",  # a violation calls a function of emulation.h
    "-nodefaultlibs",
)
LIBRARIES = ("-lm", "-lc", "-lgcc")
COMPILER = next((path for name in ("g++", "clang++") if (path := shutil.which(name))), None)
WHY_NOT = "no C++ compiler (g++ or clang++) to emulate CUDA with"


@cache
def _compiler() -> str:
    """Return the part of a kernel's key that is the same for all kernels."""
    assert COMPILER is not None, WHY_NOT
    version = subprocess.run([COMPILER, "--version"], check=True, capture_output=True, text=True).stdout
    return "\n".join((version, *OPTIONS, *LIBRARIES))


class EmulatedDevice:
    """Buffers are NumPy arrays, and kernels are shared libraries in `folder`. `backwards` runs threads in reverse
    order.

    Several processes may share the folder.
    """

    generic = False
    errors: tuple[type[Exception], ...] = ()

    def __init__(self, folder: Path, compute: str = "sm_90", backwards: bool = False) -> None:
        self.facts = Facts("emulation", "host", compute, 1 << 30, 1 << 30, 48 << 10)
        self.backwards = backwards
        self.launched: list[str] = []  # names of the launched kernels, in order
        self._folder = folder

    def alloc(self, size: int, what: str) -> Any:
        size = max(size, 4)
        memory = np.zeros(size + 256, np.uint8)
        start = -memory.ctypes.data % 256  # the alignment of GPU allocations
        return memory[start : start + size]

    def free(self, buffer: Any) -> None: ...

    def upload(self, target: Any, offset: int, data: NDArray[Any]) -> None:
        found = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        target[offset : offset + len(found)] = found

    def staging(self, size: int) -> NDArray[np.int32]:
        return np.zeros(size, np.int32)

    def send(self, target: Any, data: NDArray[Any]) -> None:
        self.upload(target, 0, data)

    def download(self, source: Any, offset: int, into: NDArray[Any]) -> None:
        view = into.reshape(-1).view(np.uint8)
        view[:] = source[offset : offset + len(view)]

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        target[target_offset : target_offset + size] = source[source_offset : source_offset + size].copy()

    def translate(self, source: str, kernel: str) -> None: ...

    def library(self, source: str, kernel: str) -> Path:
        """Compile a kernel for this machine and load it."""
        assert COMPILER is not None, WHY_NOT
        call = f"emulated::launch([](void **p) {{ emulated::call({kernel}, p); }}, a, grid, size, local, backwards)"
        run = 'extern "C" const char *run(void **a, const int *grid, int size, int local, int backwards) {\n'
        run += f"  return {call};\n}}\n"
        copy = re.search(r"^#define COPY (\d+)$", source, re.MULTILINE)
        given = "".join(f"#define EMULATED_COPY {found[1]}\n" for found in [copy] if found)
        given += f"#define __CUDA_ARCH__ {self.facts.compute.removeprefix('sm_')}0\n"
        text = "".join((given, HEADER.read_text(encoding="utf-8"), source, run))
        library = self._folder / (hashlib.sha256((_compiler() + text).encode()).hexdigest()[:24] + ".so")
        try:
            os.utime(library)  # it is in use
        except FileNotFoundError:
            with TemporaryDirectory(dir=self._folder) as own:  # another process may be compiling the same kernel
                path, made = Path(own, "kernel.cpp"), Path(own, "kernel.so")
                path.write_text(text, encoding="utf-8")
                subprocess.run([COMPILER, *OPTIONS, "-o", str(made), str(path), *LIBRARIES], check=True)
                made.replace(library)
        return library

    def compile(self, source: str, kernel: str) -> Any:
        compiled = ctypes.CDLL(str(self.library(source, kernel))).run
        compiled.restype = ctypes.c_char_p
        return kernel, compiled

    def prepare(self, kernel: Any, size: int, local_bytes: int, arguments: Sequence[Any]) -> Callable[[Grid], None]:
        name, run = kernel
        pointers = (ctypes.c_void_p * len(arguments))(*(argument.ctypes.data for argument in arguments))

        def launch(grid: Grid) -> None:
            self.launched.append(name)
            failure = run(pointers, (ctypes.c_int * 3)(*grid), size, local_bytes, int(self.backwards))
            assert failure is None, f"{name}: {failure.decode()}"

        return launch

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def sync(self) -> None: ...

    def seconds(self, work: Callable[[], None]) -> float:
        work()
        return 1.0

    def close(self) -> None: ...


class EmulatedBackend:
    """A backend for `EmulatedDevice`, with the executable that all GPUs share."""

    name = "emulated"

    def __init__(self, folder: Path, compute: str = "sm_90", backwards: bool = False) -> None:
        self.device = EmulatedDevice(folder, compute, backwards)

    def describe(self) -> str:
        return "emulation of CUDA"

    def bind(
        self,
        plan: Plan,
        limits: Limits,
        cache: CacheTypes = F16_CACHE,
        progress: Progress | None = None,
        keep: Collection[Value] = (),
    ) -> GpuExecutable:
        return GpuExecutable(self.device, plan, limits, cache, progress, keep)

    def close(self) -> None:
        self.device.close()
