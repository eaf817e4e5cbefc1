"""Build and run `llama_logits.cpp`, which computes llama.cpp's logits of a GGUF for comparisons."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("llama_logits.cpp")


def build(llama: Path, target: Path) -> None:
    """Compile against a llama.cpp source tree with built libraries in build/bin."""
    libraries = llama / "build" / "bin"
    include = [f"-I{llama / 'include'}", f"-I{llama / 'ggml' / 'include'}"]
    link = [f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    subprocess.run(["g++", "-O1", *include, str(SOURCE), "-o", str(target), *link], check=True)


def cached(program: Path, model: Path, windows: np.ndarray, cache_type: str, work: Path) -> np.ndarray:
    """Return the logits (windows, ctx, V) for token windows (windows, ctx), with a KV cache of this type."""
    count, ctx = windows.shape
    (work / "ids").write_bytes(windows.astype(np.int32).tobytes())
    subprocess.run([program, model, work / "out", "cache", cache_type, str(ctx), work / "ids"], check=True)
    return np.fromfile(work / "out", np.float32).reshape(count, ctx, -1)
