"""`localllm devices`: the CPU, OpenCL on PoCL, and for CUDA a card or the reason why there is none."""

from __future__ import annotations

import json

import pytest

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
