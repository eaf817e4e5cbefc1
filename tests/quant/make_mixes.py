"""Make mixes.json.gz: the format that llama-quantize chooses for each tensor, for many models and quantization types.

    python -m tests.quant.make_mixes LLAMA_QUANTIZE

LLAMA_QUANTIZE is the path to the program, from llama.cpp of 2026-10-01 or later (it needs --dry-run). The models are
the reference models in ../shared/data/archs, and small generated models with geometries that the rules distinguish.
"""

from __future__ import annotations

import gzip
import json
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from localllm.gguf import NewTensor, open_gguf, write_gguf
from localllm.quant import FORMATS
from localllm.quant.mixes import ALIASES, MIXES, in_order
from localllm.quantize.source import geometry_of
from tests.conftest import SHARED_DATA

OUT = Path(__file__).with_name("mixes.json.gz")
TYPES = [name for name in (*MIXES, *ALIASES) if name != "MXFP4"]
SHORT = ("Q4_K_M", "Q2_K_S", "IQ2_M", "IQ3_XXS", "Q8_0", "F16", "MXFP4_MOE", "Q5_0")
# fmt: off
MADE = {  # name: architecture, layers, heads, KV heads, experts, width, ffn, tied
    "llama-16":       ("llama", 16, 8, 2, 0, 256, 256, True),
    "llama-33-mha":   ("llama", 33, 4, 4, 0, 256, 256, False),
    "llama-80-gqa":   ("llama", 80, 16, 2, 0, 256, 256, False),
    "llama-80-mha":   ("llama", 80, 4, 4, 0, 256, 256, False),
    "llama-8-moe2":   ("llama", 8, 4, 2, 2, 256, 256, False),
    "llama-17-moe4":  ("llama", 17, 4, 2, 4, 256, 256, True),
    "llama-32-moe8":  ("llama", 32, 8, 2, 8, 256, 256, False),
    "llama-24-moe16": ("llama", 24, 8, 2, 16, 256, 256, False),
    "qwen2-80":       ("qwen2", 80, 8, 1, 0, 256, 256, False),
    "falcon-32":      ("falcon", 32, 8, 1, 0, 256, 512, False),
    "llama-w288":     ("llama", 4, 4, 2, 0, 288, 352, False),
    "llama-w48":      ("llama", 4, 4, 2, 0, 48, 96, True),
    "llama-w192":     ("llama", 16, 8, 2, 0, 192, 384, True),
}
# fmt: on
OPTIONS = {  # more options -> the types to combine them with
    "": ([], TYPES),
    "imatrix": (["--imatrix", "IMATRIX"], TYPES),
    "pure": (["--pure"], SHORT),
    "leave-output": (["--leave-output-tensor"], SHORT),
    "types": (["--output-tensor-type", "q5_k", "--token-embedding-type", "q3_k"], SHORT),
    "regex": (["--tensor-type", "attn_v=q8_0", "--tensor-type", r"blk\.[01]\.ffn_.*=q6_k"], SHORT[:-3]),
}
LINE = re.compile(r"^\[ *\d+/ *\d+\] +(\S+) +- \[.*type = +(\S+), size = .*?(?:\((\w+)\))?$", re.MULTILINE)
LOWER = {name.lower(): name for name in FORMATS}


def tensors_of(
    architecture: str, layers: int, heads: int, kv: int, experts: int, width: int, ffn: int, tied: bool
) -> list[tuple[str, tuple[int, ...]]]:
    found: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (32, width)), ("output_norm.weight", (width,))]
    head = width // heads
    for layer in range(layers):
        own: dict[str, tuple[int, ...]] = {"attn_norm": (width,), "attn_output": (width, width)}
        if architecture == "falcon":
            own |= {"attn_qkv": (width + 2 * kv * head, width)}
        else:
            own |= {"attn_q": (width, width), "attn_k": (kv * head, width), "attn_v": (kv * head, width)}
        if experts:
            own |= {"ffn_gate_inp": (experts, width), "ffn_gate_exps": (experts, ffn, width)}
            own |= {"ffn_up_exps": (experts, ffn, width), "ffn_down_exps": (experts, width, ffn)}
        else:
            own |= {"ffn_up": (ffn, width), "ffn_down": (width, ffn)}
            own |= {} if architecture == "falcon" else {"ffn_gate": (ffn, width)}
        found += [(f"blk.{layer}.{name}.weight", shape) for name, shape in own.items()]
    return found if tied else [*found, ("output.weight", (32, width))]


def make(path: Path, *sizes: Any) -> None:
    architecture, layers, heads, kv, experts, width, ffn, _ = sizes
    keys = {
        "context_length": 64, "embedding_length": width, "block_count": layers, "feed_forward_length": ffn,
        "attention.head_count": heads, "attention.head_count_kv": kv,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
        **({"expert_count": experts, "expert_used_count": 2} if experts else {}),
    }  # fmt: skip
    metadata = {"general.architecture": architecture, **{f"{architecture}.{k}": v for k, v in keys.items()}}
    metadata |= {"tokenizer.ggml.model": "no_vocab", f"{architecture}.vocab_size": 32}
    new = [
        NewTensor(
            name, "F32" if len(shape) == 1 else "F16", shape, bytes(int(np.prod(shape)) * (4 if len(shape) == 1 else 2))
        )
        for name, shape in tensors_of(*sizes)
    ]
    write_gguf(path, metadata, new)


def chosen(program: str, model: Path, kind: str, arguments: list[str], names: list[str]) -> list[str] | None:
    """Return the formats in the order of `names`, or None if llama-quantize rejects the type."""
    done = subprocess.run([program, *arguments, "--dry-run", str(model), kind], capture_output=True, text=True)
    if done.returncode:
        return None
    found = {name: LOWER[(after or before).lower()] for name, before, after in LINE.findall(done.stdout + done.stderr)}
    assert sorted(found) == sorted(names), (model, kind, set(names) ^ set(found))
    return [found[name] for name in names]


def main() -> None:
    program = sys.argv[1]
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        imatrix = Path(folder) / "imatrix.dat"
        imatrix.write_bytes(struct.pack("<ii1sii1f", 1, 1, b"x", 1, 1, 1.0))
        models = {path.stem: path for path in sorted((SHARED_DATA / "archs").glob("*.gguf"))}
        for name, sizes in MADE.items():
            models[name] = Path(folder) / f"{name}.gguf"
            make(models[name], *sizes)
        for name, path in models.items():
            with open_gguf(path) as file:
                geometry = asdict(geometry_of(file.stored))
                tensors = [(t, file.tensors[t].shape, file.tensors[t].format) for t in in_order(file.tensors)]
            table: dict[str, dict[str, str | None]] = {}
            for options, (arguments, types) in OPTIONS.items():
                given = [str(imatrix) if a == "IMATRIX" else a for a in arguments]
                for kind in types:
                    formats = chosen(program, path, kind, given, [t for t, _, _ in tensors])
                    table.setdefault(options, {})[kind] = formats and " ".join(formats)
            cases.append({"model": name, "geometry": geometry, "tensors": tensors, "formats": table})
            print(name, len(tensors), flush=True)
    OUT.write_bytes(gzip.compress(json.dumps(cases, separators=(",", ":")).encode(), 9, mtime=0))
    print(OUT, OUT.stat().st_size)


if __name__ == "__main__":
    main()
