"""Whole models on OpenCL: llama.cpp's logits of every reference architecture, its greedy texts, a chat."""

from __future__ import annotations

import io

import numpy as np
import pytest

import localllm
from localllm.cli.main import main
from models import ARCHITECTURES
from tests.backends.test_reference_logits import logits, paths
from tests.conftest import reference
from tests.models.support import nmse


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_position_of_the_reference_models(architecture: str) -> None:
    """Prefilled in one and in several pieces, then token by token."""
    found = list(paths(architecture))
    if not found:
        pytest.skip(f"no reference model of {architecture}")
    for path in found:
        truth = np.load(path.with_suffix(".npz"))["logits"]
        for chunks in ((32,), (1, 3, 7, 21)):
            assert nmse(logits(path, "opencl", chunks), truth).max() < 5e-6


@pytest.mark.parametrize("name", ["stories260K-f32", "babyllama-969K-tok361-f32"])
def test_greedy_text(name: str) -> None:
    with localllm.load(reference("models", f"{name}.gguf"), backend="opencl") as model:
        pieces = list(model.generate("Once upon a time", max_tokens=160, temperature=0))
    text = "Once upon a time" + "".join(piece.text for piece in pieces)
    expected = reference("models", f"{name}.greedy160.txt").read_text(encoding="utf-8")
    assert text.strip() == expected.strip()


def test_chat_with_the_model_in_the_box(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`localllm chat --backend opencl`; greedy, so that it says what it says on the CPU."""
    answers = {}
    for backend in ("opencl", "cpu"):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello! How are you?\n"))
        assert main(["chat", "--backend", backend, "--temp", "0", "-n", "24", "--no-stats"]) == 0
        answers[backend] = capsys.readouterr().out
    assert len(answers["opencl"].split()) > 3
    assert answers["opencl"] == answers["cpu"]
