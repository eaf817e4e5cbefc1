"""Run the small plans on Oclgrind, which simulates a GPU and reports races, uninitialized reads and out-of-bounds
accesses.

`simulate.py` starts it as a program, because Oclgrind reads its environment when it is loaded.

It works around limits of Oclgrind 21.10. Oclgrind takes the size of a buffer from the last write of the host, even if
that write was to an earlier buffer at the same address, and it ignores clEnqueueFillBuffer. So buffers here are not
initialized (a stricter check), are always written whole, and are never freed. Oclgrind also aborts at LLVM's `freeze`
instruction, which the optimizer emits for a division and its remainder, so kernels are compiled without optimization.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.gpu.backend import GpuBackend
from localllm.backends.opencl.backend import OpenClBackend, OpenClDevice
from localllm.backends.opencl.devices import SIMULATOR, opencl_devices
from tests.backends.gpu.conftest import UNOPTIMIZED
from tests.backends.gpu.small import PLANS, check

# Injected bugs: a snippet of kernel source -> its replacement, the plan that runs, and the expected report.
MUTANTS = {
    "no barrier": (("#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE)", "#define BARRIER()"), "rows", "data race"),
    "beyond a row": (("y[i] = v;", "y[i + 99999] = v;"), "rows", "Invalid write"),
    "never set": (("float mean = 0.0f", "float mean"), "rows", "ninitialized value"),
}


class Simulator(OpenClDevice):
    """An OpenCL device simulated by Oclgrind. `mutant` is a snippet of kernel source and its replacement."""

    def __init__(self, mutant: tuple[str, str] | None = None) -> None:
        import pyopencl

        (found,) = (p.get_devices()[0] for p in pyopencl.get_platforms() if SIMULATOR in p.name.lower())
        super().__init__(found, cache=None)
        self.options = UNOPTIMIZED
        self._mutant = mutant
        self._images: dict[int, tuple[Any, NDArray[np.uint8]]] = {}  # every buffer, with the data the host wrote

    def alloc(self, size: int, what: str) -> Any:
        buffer = self._cl.Buffer(self._context, self._cl.mem_flags.READ_WRITE, max(size, 4))
        self._images[buffer.int_ptr] = buffer, np.zeros(max(size, 4), np.uint8)
        return buffer

    def free(self, buffer: Any) -> None: ...

    def upload(self, target: Any, offset: int, data: NDArray[Any]) -> None:
        _, image = self._images[target.int_ptr]
        image[offset : offset + data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        super().upload(target, 0, image)

    def compile(self, source: str, kernel: str) -> Any:
        if source not in self._programs:
            text = source.replace(*self._mutant) if self._mutant else source
            program = self._cl.Program(self._context, text)
            self._programs[source] = program.build(list(self.options), cache_dir=False)
        return self._programs[source], kernel


def main(name: str, mutant: str = "") -> None:
    backend = GpuBackend(Simulator(MUTANTS[mutant][0] if mutant else None))
    quick = next(number for number, device in enumerate(opencl_devices()) if "pocl" in device.version.lower())
    for small in PLANS[name]:
        check(backend, replace(small, steps=(1,)) if mutant else small, OpenClBackend(quick, cache=None))
