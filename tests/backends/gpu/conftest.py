"""Provide devices for the GPU tests: always PoCL, which runs OpenCL on the CPU, and with `pytest -m gpu` all others.

With RUSTICL_ENABLE=llvmpipe, `-m gpu` also finds Mesa's rusticl, which runs OpenCL on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import time

import pytest

from localllm.backends.base import Backend, BackendError
from localllm.backends.opencl.backend import OPTIONS, OpenClBackend
from localllm.backends.opencl.devices import opencl_devices
from tests.pocl import needed

UNOPTIMIZED = (*OPTIONS, "-cl-opt-disable")


def pocl(optimized: bool = True) -> OpenClBackend:
    """Provide PoCL, a test dependency. Tests fail without it, and are skipped if it cannot compile for this
    processor. Without optimization it compiles a kernel in a quarter of the time.
    """
    found = [number for number, device in enumerate(opencl_devices()) if "pocl" in device.version.lower()]
    assert found, "PoCL is missing: pip install 'pyopencl[pocl]'"
    needed()
    backend = OpenClBackend(found[0], cache=None)
    backend.device.options = OPTIONS if optimized else UNOPTIMIZED
    return backend


def others() -> dict[str, int]:
    """Return the number of every OpenCL device except PoCL, by name."""
    try:
        found = list(enumerate(opencl_devices()))
    except BackendError:
        return {}
    return {
        f"{device.platform.name} {device.name.strip()}": number
        for number, device in found
        if "pocl" not in device.version.lower()
    }


def cuda() -> Backend:
    from localllm.backends.cuda.backend import CudaBackend

    return CudaBackend(cache=None)


UNUSED = 30 * 24 * 3600.0  # seconds after which an emulated kernel is deleted

CARDS: dict[str, Callable[[], Backend]] = {
    **{name: partial(OpenClBackend, number, cache=None) for name, number in others().items()}, "cuda": cuda
}  # fmt: skip


def of_card(name: str) -> Backend:
    try:
        return CARDS[name]()
    except BackendError as error:
        pytest.skip(f"{name}: {error}")


CARD_PARAMETERS = [pytest.param(name, marks=pytest.mark.gpu) for name in CARDS]


@pytest.fixture(scope="session", params=["pocl", *CARD_PARAMETERS])
def gpu(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Provide PoCL and the GPUs that `-m gpu` finds. Skip the tests of an unusable device, with the reason."""
    backend = pocl() if request.param == "pocl" else of_card(request.param)
    yield backend
    backend.close()


@pytest.fixture(scope="session", params=["pocl", *CARD_PARAMETERS])
def plain_gpu(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Provide the devices of `gpu`, with PoCL's kernels unoptimized, for comparisons with the reference.

    Tests that compare bits use `gpu`, because an optimizer may change them. `test_device_check.py` compares every
    kernel, format and cache type optimized, for one or two narrow shapes. Of the other shapes of attention, only wide
    heads are compared optimized, in `test_operations.py`.
    """
    backend = pocl(optimized=False) if request.param == "pocl" else of_card(request.param)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def folder() -> Path:
    """Provide the cache folder of emulated kernels. All pytest-xdist workers and later runs share the folder, so each
    kernel is compiled once.
    """
    found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "localllm-emulated"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    for library in found.glob("*.so"):
        with suppress(FileNotFoundError):  # another worker has deleted it
            if time() - library.stat().st_mtime > UNUSED:
                library.unlink()
    return found


@pytest.fixture(params=["opencl", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend_name(request: pytest.FixtureRequest) -> str:
    """Provide the command-line name of a backend: OpenCL on the first device, and CUDA."""
    if request.param == "cuda":
        of_card("cuda").close()
    return str(request.param)
