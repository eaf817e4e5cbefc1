"""`localllm devices`: the CPU, OpenCL on PoCL, and CUDA GPUs or the reason why there are none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import localllm.backends.opencl.backend
from localllm.backends.base import BackendError
from localllm.cli.main import main


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = [device["backend"] for device in found["devices"]]
    assert kinds[0] == "cpu"
    assert "opencl" in kinds
    assert ("cuda" in kinds) != ("cuda" in found["missing"])
    for device in found["devices"]:
        assert device["memory"] > 1 << 28
        assert device["copy_bandwidth"] > 1e7


def test_devices_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("cpu 0: ")
    assert "GB/s" in out
    if "cuda 0" not in out:
        assert "cuda: " in err
        assert len(err.splitlines()) == 1


def test_every_device_of_several_is_listed_and_what_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every GPU is listed: one works, one is out of memory during the measurement, and one fails to open."""
    pocl = localllm.backends.opencl.devices.opencl_devices()[0]
    opened = []

    class Device(localllm.backends.opencl.backend.OpenClDevice):
        def __init__(self, card: int) -> None:
            if card == 2:
                raise BackendError("card 2 is held by another program")
            super().__init__(pocl)
            opened.append(self)
            self.facts = replace(self.facts, name=f"Card {card}", memory=1 << 33, free=(1 << 33) >> card)
            self.full = card == 1

        def alloc(self, size: int, what: str) -> Any:
            if self.full:
                raise BackendError(f"out of memory for {what}")
            return super().alloc(size, what)

        def close(self) -> None:
            opened.remove(self)

    monkeypatch.setattr("localllm.backends.opencl.devices.opencl_devices", lambda: [0, 1, 2])
    monkeypatch.setattr("localllm.backends.opencl.backend.OpenClDevice", Device)
    assert main(["devices"]) == 0
    out = capsys.readouterr().out
    parts = out.split("opencl ")[1:]
    assert [part.splitlines()[0] for part in parts] == ["0: Card 0", "1: Card 1", "2: cannot be opened"]
    assert "8.00 GiB\n" in parts[0]
    assert "GB/s" in parts[0]
    assert "8.00 GiB, 4.00 GiB free" in parts[1]
    assert "out of memory for a measurement of bandwidth" in parts[1]
    assert "card 2 is held by another program" in parts[2]
    assert not opened
