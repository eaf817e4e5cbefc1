"""The backend "auto": a GPU if there is one, and otherwise the CPU with a reason if a GPU was expected."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from localllm import backends
from localllm.backends import BackendError

SIGN = ("/",)  # exists everywhere


def _fails(threads: int | None, device: str, checked: bool = True) -> Any:
    raise BackendError("the backend needs a package; install it")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(required: str) -> None:
        monkeypatch.setattr(backends, "_CARDS", ((_fails, SIGN, required),))

    return use


def _described() -> str:
    backend = backends.open_backend("auto", 1)
    try:
        return backend.describe()
    finally:
        backend.close()


def test_a_driver_of_a_card_says_why_the_card_is_not_used(cards: Callable[[str], None]) -> None:
    cards("")
    assert _described().endswith(" (the backend needs a package)")


def test_a_driver_that_may_be_for_the_cpu_says_nothing_without_its_package(cards: Callable[[str], None]) -> None:
    cards("no_such_package")
    assert "needs a package" not in _described()
    cards("json")  # installed
    assert _described().endswith(" (the backend needs a package)")


def test_a_driver_for_opencl_alone_does_not_ask_for_pyopencl(monkeypatch: pytest.MonkeyPatch) -> None:
    (opencl,) = (each for each in backends._CARDS if each[2] == "pyopencl")
    monkeypatch.setattr(backends, "_CARDS", ((opencl[0], SIGN, opencl[2]),))
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == "pyopencl" else find_spec(name))
    monkeypatch.setitem(__import__("sys").modules, "pyopencl", None)  # its import fails, as if it were missing
    assert "PyOpenCL" not in _described()
