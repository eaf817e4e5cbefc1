"""Whole models on OpenCL give llama.cpp's logits for every reference architecture, llama.cpp's greedy output,
and a chat.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import numpy as np
import pytest

import localllm
from localllm.backends.base import Backend
from localllm.backends.reference import ReferenceBackend
from localllm.cli.main import main
from tests.backends.test_kit import logits as kit_logits
from tests.backends.test_reference_logits import ARCHITECTURES, logits, paths
from tests.conftest import reference
from tests.localllm.support import Terminal
from tests.models.kit import KIT, LIMIT
from tests.models.support import nmse
from tests.models.test_embeddings import HALVES, off


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_position_of_the_reference_models(backend_name: str, architecture: str) -> None:
    """The prompt is evaluated in one prefill chunk, in several chunks, and token by token."""
    found = list(paths(architecture))
    assert found
    for path in found:
        truth = np.load(path.with_suffix(".npz"))["logits"]
        for chunks in ((32,), (1, 3, 7, 21)):
            assert nmse(logits(path, backend_name, chunks), truth).max() < 5e-6


@pytest.mark.parametrize("name", ["stories260K-f32", "babyllama-969K-tok361-f32"])
def test_greedy_text(backend_name: str, name: str) -> None:
    with localllm.load(reference("models", f"{name}.gguf"), backend=backend_name) as model:
        pieces = list(model.generate("Once upon a time", max_tokens=160, temperature=0))
    text = "Once upon a time" + "".join(piece.text for piece in pieces)
    expected = reference("models", f"{name}.greedy160.txt").read_text(encoding="utf-8")
    assert text.strip() == expected.strip()


def said(backend: str, words: list[str], typed: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the greedy answer of the program on a backend."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    with redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--backend", backend, "--temp", "0", "-n", "24"]) == 0
    return out.getvalue()


@pytest.mark.parametrize(
    ("words", "typed"),
    [(["chat", "--no-stats"], "Hello! How are you?\n"), (["run", "demo", "Tell me a story."], "")],
    ids=["chat", "run"],
)
def test_the_model_in_the_box_says_what_it_says_on_the_cpu(
    backend_name: str, words: list[str], typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (said(name, words, typed, monkeypatch) for name in (backend_name, "cpu"))
    assert len(ours.split()) > 3
    assert ours == theirs


def test_chat_in_a_terminal(backend_name: str) -> None:
    """`localllm chat --backend opencl` names its device, answers, and prints statistics."""
    terminal = Terminal("chat", "demo", "-v", "--backend", backend_name, "--temp", "0", "-n", "16")
    assert f"{backend_name}: " in terminal.wait_for(">>> ")
    for text in ("Hello! How are you?", "What is your name?"):
        terminal.type(text + "\n")
        shown = terminal.wait_for(r"[\d.]+ tokens/s")
        assert len(shown.partition("first token")[0].rpartition(text)[2].split()) > 2
        terminal.wait_for(r">>> $")
    terminal.type("/bye\n")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen


# Together these models use every operation. `python -m tests.backends.gpu.kit` runs the other test models.
OF_EVERY_OPERATION = (
    "apertus", "deepseek2-groups", "gemma3n-e2b", "gemma4-26b-a4b", "gemma4-e2b", "jamba-dense", "llama4-moe",
    "kimi-k3-moe", "mpt-dense", "nemotron3", "qwen35-mtp", "qwen4exp-8of40", "rwkv7",
)  # fmt: skip


@pytest.mark.parametrize("name", OF_EVERY_OPERATION)
def test_every_position_of_models_of_the_kit(gpu: Backend, name: str) -> None:
    """The models have layers with shared KV caches, hyper-connections, per-layer embeddings, MLA latents, recurrent
    states, and every kind of experts.
    """
    model = KIT[name]
    ours = kit_logits(gpu, model)
    assert model.error(ours) < model.limit()
    assert nmse(ours, kit_logits(ReferenceBackend(), model)).max() < LIMIT


@pytest.mark.parametrize("name", ["modern-bert", "jina-bert-v2", "nomic-bert-moe"])
def test_encoders_of_the_kit(gpu: Backend, name: str) -> None:
    """The encoders have bidirectional attention with sliding windows, with relative position biases, and in a
    mixture of experts.
    """
    assert off(gpu, name) < HALVES
