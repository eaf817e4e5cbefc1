"""The bundled model in measurements: its file, chats that it was not trained on, and some of its training text."""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

import numpy as np
from compare import ROOT

sys.path.insert(0, str(ROOT))

from localllm import Model
from localllm.evaluation import Windows
from localllm.gguf import open_gguf
from localllm.quant.mixes import MIXES

DEMO = ROOT / "models" / "demo" / "demo.gguf"
TEXTS = ROOT.parent / "shared" / "data" / "text"  # the files that models/demo/README.md names
SEED = 0
CALIBRATION_CHATS = 120  # 70,000 characters


def identity(path: Path = DEMO) -> dict[str, object]:
    """Return the facts that tell a model file from another: its name, size in bytes, SHA-256 and type."""
    with open_gguf(path) as file:
        number = file.metadata.get("general.file_type")
    kind = next((name for name, mix in MIXES.items() if mix.file_type == number), None)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest, "type": kind}


def held_out(model: Model, texts: Path, ctx_size: int, windows: int) -> Windows:
    """Return windows of dialogues, tasks, chats with tools and stories that training left out, in random order."""
    chats = [chat for kind in _corpus(texts).held_out().values() for chat in kind]
    random.Random(SEED).shuffle(chats)
    text = "".join(
        "<|endoftext|>" + "".join(f"<|im_start|>{role}<|im_sep|>{said}<|im_end|>" for role, said in chat)
        for chat in chats
    )
    ids = np.array(model.tokenize(text, add_special=False, parse_special=True), np.int32)
    return Windows(ids[: ctx_size * windows].reshape(windows, ctx_size))


def calibration(texts: Path) -> str:
    """Return chats of the training text, a turn per line."""
    return "\n\n".join("\n".join(said for _, said in chat) for chat in _corpus(texts).epoch(SEED)[:CALIBRATION_CHATS])


def _corpus(texts: Path):  # type: ignore[no-untyped-def]
    """Return the bundled model's corpus. Its modules import each other by plain names."""
    own = ROOT / "benchmarks" / "demo"
    if str(own) not in sys.path:
        sys.path.append(str(own))
    from corpus import Corpus

    return Corpus(texts, own)
