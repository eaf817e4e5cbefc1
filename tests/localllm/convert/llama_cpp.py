"""Check that llama.cpp (package `xllamacpp`) loads converted files and decodes a few tokens.

    python -m tests.localllm.convert.llama_cpp [NAME...]    # all checkpoints of the tables, in two minutes

llama.cpp aborts its process when an assertion fails, so a child process loads each file. Its C functions are called
through ctypes. The parameter structures are declared larger than they are, so that the calls work with every version.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SECONDS = 30  # time limit for one file; loading takes 0.3 s
TOKENS = (3, 4, 5, 6)
# Converted files that llama.cpp cannot run, with the reason. Most have sizes that no published model has.
_DELTA = ("qwen35", "qwen35moe", "qwen3next", "qwen4exp", "MiniCPMV4_6ForConditionalGeneration")
REFUSED = {
    "command-r": "reads norms of heads in models of 64 layers alone",
    "deepseek2": "allows queries without a rank in models of 26, 27 and 48 layers alone",
    "deepseek4-fp4": "asserts in its attention at these sizes; its own converter writes the same keys and tensors",
    "dots1": "requires equal numbers of query and key heads",
    "gemma3n": "has the width per layer fixed at 256",
    "jina-bert-v3-rank": "reads no classifier in this architecture",
    "modern-bert-silu": "reads no biases in this architecture",
    "olmoe": "requires equal numbers of query and key heads",
    "phimoe": "requires heads whose total width is the model's",
    "plamo2": "does not end decoding at these sizes",
    "plm": "hands values to its cache without their heads; no file of this architecture runs",
    "qwen3tts": "has 3072 codes fixed",
    "t5": "requires equal numbers of encoder and decoder layers",
    **dict.fromkeys(_DELTA, "requires equal widths of keys and values in linear attention"),
}
# Converted files that llama.cpp once failed to load: keys were missing, or keys announced absent experts.
REPAIRED = (
    *("afmoe", "ernie4_5-moe", "falcon-h1", "granite-hybrid", "hunyuan-moe", "llama4", "minimax-m2", "nemotron_h"),
    *("nemotron_h_moe", "distilbert", "mamba-falcon"),
)
_LOADED = "llama.cpp loaded it"


def folders() -> dict[str, Callable[[Path], Any]]:
    """Return, for each checkpoint name of the tables, a function that writes the checkpoint."""
    from tests.localllm.convert.checkpoints import SPECS, write

    return {name: partial(write, name) for name in SPECS}


def convert(write: Callable[[Path], Any], folder: Path) -> Path:
    """Write a checkpoint, convert it without changing tensor types, and return the GGUF path."""
    from localllm.convert import open_checkpoint
    from localllm.gguf.writer import NewTensor, write_gguf

    (folder / "model").mkdir()
    write(folder / "model")
    with open_checkpoint(folder / "model") as model:
        tensors = [NewTensor(x.name, x.format, x.shape, lambda x=x: x.read(0, x.rows)) for x in model.tensors.values()]
        write_gguf(folder / "model.gguf", {**model.stored, "general.quantization_version": 2}, tensors)
    return folder / "model.gguf"


def refusals(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the reason why llama.cpp cannot run each file, or "" if it can."""
    for path in paths:
        command = [sys.executable, "-m", "tests.localllm.convert.llama_cpp", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        except subprocess.TimeoutExpired:
            yield "it does not end"
            continue
        yield "" if _LOADED in done.stdout else _reason(done.stderr) or f"exit code {done.returncode}"


def _reason(log: str) -> str:
    lines = [line for line in log.splitlines() if "error" in line.lower() or "GGML_ASSERT" in line]
    return lines[0][:300] if lines else log.strip().rpartition("\n")[2][:300]


class _Whole(ctypes.Structure):
    """Placeholder for a C parameter structure, larger than any of them."""

    _fields_ = (("first", ctypes.c_uint32), ("rest", ctypes.c_char * 1020))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int32), ("tokens", ctypes.c_void_p), ("others", ctypes.c_void_p * 5)
    )  # fmt: skip


def _load(path: str) -> str:
    """Return "" if llama.cpp loads the file and decodes tokens, and an error otherwise."""
    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    [library] = Path(spec.submodule_search_locations[0]).glob("xllamacpp*.so")
    c = ctypes.CDLL(str(library))
    for name in ("llama_model_default_params", "llama_context_default_params"):
        getattr(c, name).restype = _Whole
    for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab"):
        getattr(c, name).restype = ctypes.c_void_p
    c.llama_backend_init()
    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    if not model:
        return "it is not loaded"
    settings = c.llama_context_default_params()
    settings.first = 64  # n_ctx
    context = c.llama_init_from_model(ctypes.c_void_p(model), settings)
    if not context:
        return "it has no context"
    tokens = (ctypes.c_int32 * len(TOKENS))(*TOKENS)
    c.llama_model_has_encoder.restype = ctypes.c_bool
    run = c.llama_encode if c.llama_model_has_encoder(ctypes.c_void_p(model)) else c.llama_decode
    done = run(ctypes.c_void_p(context), _Batch(len(tokens), ctypes.addressof(tokens)))
    return f"it decodes with {done}" if done else ""


def _main(names: list[str]) -> int:
    found = {}
    for name, write in folders().items():
        if not names or name in names:
            with tempfile.TemporaryDirectory() as place:
                [found[name]] = refusals([convert(write, Path(place))])
            print(json.dumps({name: found[name], "expected": REFUSED.get(name, "")}), flush=True)
    wrong = [name for name, reason in found.items() if bool(reason) != (name in REFUSED)]
    print(
        f"{len(found)} files, {sum(map(bool, found.values()))} refused; not as expected: {', '.join(wrong) or 'none'}"
    )
    return bool(wrong)


if __name__ == "__main__":
    if not sys.argv[1:] or not Path(sys.argv[1]).is_file():
        sys.exit(_main(sys.argv[1:]))
    print(_load(sys.argv[1]) or _LOADED, flush=True)
    os._exit(0)  # skip the library's cleanup, which the test does not cover
