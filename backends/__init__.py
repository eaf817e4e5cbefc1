"""How operations run: one table of backends. A backend's own packages are imported when it is opened, not before."""

from __future__ import annotations

from collections.abc import Callable

from backends.base import Backend, BackendError

__all__ = ["BACKENDS", "BackendError", "open_backend"]


def _cpu(threads: int | None) -> Backend:
    from backends.cpu.backend import CpuBackend

    return CpuBackend(threads)


def _reference(threads: int | None) -> Backend:
    from backends.reference import ReferenceBackend

    return ReferenceBackend()


BACKENDS: dict[str, Callable[[int | None], Backend]] = {"cpu": _cpu, "reference": _reference}


def open_backend(name: str, threads: int | None = None) -> Backend:
    """The backend called `name`; "auto" is the fastest that this machine has. BackendError says which there are."""
    if name == "auto":
        return _cpu(threads)
    if name not in BACKENDS:
        raise BackendError(f"unknown backend '{name}'; there are: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](threads)
