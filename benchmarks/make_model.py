"""Write a GGUF with the geometry of a real model and random weights, to time any program that reads GGUF.

    python benchmarks/make_model.py llama-1b Q4_0 /tmp/llama-1b-q4_0.gguf [--vocab ggml-vocab-llama-bpe.gguf]

Speed depends on the sizes and types of weights, not on their values: a thousand random rows are quantized and repeated
in random order. Q4_K_M is the mix of that name: Q6_K for the output and for half of the value and down matrices, Q4_K
for the rest. `--vocab` copies the tokenizer of another GGUF. Without it the vocabulary is single bytes and filler
tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from localllm.gguf import NewTensor, open_gguf, write_gguf
from localllm.quant import FORMATS, quantize

PIECE = 1024  # distinct random rows per matrix
CHUNK = 4096  # rows written at a time


@dataclass(frozen=True, slots=True)
class Geometry:
    """The geometry of a model with the Llama architecture."""

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    context: int = 131072
    rope_base: float = 500000.0


MIXES = {"Q4_K_M": ("Q4_K", "Q6_K")}  # format of most matrices, and of the more sensitive matrices
NEED_IMPORTANCE = ("IQ1_S", "IQ2_XXS", "IQ2_XS")

GEOMETRIES = {
    "llama-1b": Geometry(16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "llama-8b": Geometry(32, 4096, 14336, 32, 8, 128, 128256, tied=False),
    "llama-1b-layer": Geometry(1, 2048, 8192, 32, 8, 64, 512, tied=True),  # a single layer, for slow measurements
    "llama-4l": Geometry(4, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "mha-4l": Geometry(4, 2048, 8192, 16, 16, 128, 50304, tied=True),  # a quarter of OLMo 1B, without grouped heads
    "llama-100m": Geometry(4, 768, 2048, 12, 4, 64, 128256, tied=True),  # a draft model for llama-1b: a tenth of it
    "tiny": Geometry(2, 256, 512, 4, 2, 64, 512, tied=True, context=1024),
}


class Rows:
    """Random rows (standard deviation 1 / sqrt(columns)), quantized once per format and width."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._pieces: dict[tuple[str, int], NDArray[np.uint8]] = {}

    def _piece(self, format_name: str, columns: int) -> NDArray[np.uint8]:
        key = format_name, columns
        if key not in self._pieces:
            x = self._random.standard_normal((PIECE, columns), np.float32) / np.float32(np.sqrt(columns))
            needs_importance = format_name in NEED_IMPORTANCE
            self._pieces[key] = quantize(x, format_name, np.ones(columns, np.float32) if needs_importance else None)
        return self._pieces[key]

    def of(self, rows: int, columns: int, format_name: str) -> Iterator[NDArray[np.uint8]]:
        piece = self._piece(format_name, columns)
        for start in range(0, rows, CHUNK):
            yield piece[self._random.integers(0, PIECE, min(CHUNK, rows - start))]


def more_bits(layer: int, layers: int) -> bool:
    """Return whether the value and down matrices of the layer get Q6_K in a Q4_K_M GGUF.

    This applies to the first and the last eighth of the layers, and to every third layer in between.
    """
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def tensors(g: Geometry, type_name: str, seed: int) -> Iterator[NewTensor]:
    source = Rows(seed)
    usual, better = MIXES.get(type_name, (type_name, type_name))

    def matrix(name: str, rows: int, columns: int, format_name: str = usual) -> NewTensor:
        return NewTensor(name, format_name, (rows, columns), lambda: source.of(rows, columns, format_name))

    def ones(name: str) -> NewTensor:
        return NewTensor(name, "F32", (g.width,), np.ones(g.width, np.float32).view(np.uint8))

    yield matrix("token_embd.weight", g.vocabulary, g.width, better if g.tied else usual)
    for layer in range(g.layers):
        blk, here = f"blk.{layer}.", better if more_bits(layer, g.layers) else usual
        yield ones(blk + "attn_norm.weight")
        yield matrix(blk + "attn_q.weight", g.heads * g.head_dim, g.width)
        yield matrix(blk + "attn_k.weight", g.kv_heads * g.head_dim, g.width)
        yield matrix(blk + "attn_v.weight", g.kv_heads * g.head_dim, g.width, here)
        yield matrix(blk + "attn_output.weight", g.width, g.heads * g.head_dim)
        yield ones(blk + "ffn_norm.weight")
        yield matrix(blk + "ffn_gate.weight", g.ffn, g.width)
        yield matrix(blk + "ffn_up.weight", g.ffn, g.width)
        yield matrix(blk + "ffn_down.weight", g.width, g.ffn, here)
    yield ones("output_norm.weight")
    if not g.tied:
        yield matrix("output.weight", g.vocabulary, g.width, better)


def byte_vocabulary(size: int) -> dict[str, Any]:
    """Return a byte-level vocabulary: 256 bytes, one merge (readers expect at least one), BOS, EOS, filler tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable} | {
        b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)
    }
    tokens = [letters[b] for b in range(256)] + ["th", "<|begin|>", "<|end|>"]
    tokens += [f"<filler_{i}>" for i in range(len(tokens), size)]
    kinds = np.array([1] * 257 + [3, 3] + [5] * (size - 259), np.int32)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
    }


def tokenizer_of(path: Path, size: int) -> dict[str, Any]:
    """Return the tokenizer keys of another GGUF, whose vocabulary must have the geometry's size."""
    with open_gguf(path) as file:
        keys = {k: v for k, v in file.metadata.items() if k.startswith("tokenizer.")}
        found = {k: v.to_list() if hasattr(v, "to_list") else v for k, v in keys.items()}
    if len(found["tokenizer.ggml.tokens"]) != size:
        raise SystemExit(f"{path}: has {len(found['tokenizer.ggml.tokens'])} tokens, the geometry needs {size}")
    return found


def metadata(name: str, g: Geometry, vocab: Path | None) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.name": f"{name} geometry, random weights",
        "llama.vocab_size": g.vocabulary,
        "llama.context_length": g.context,
        "llama.embedding_length": g.width,
        "llama.block_count": g.layers,
        "llama.feed_forward_length": g.ffn,
        "llama.attention.head_count": g.heads,
        "llama.attention.head_count_kv": g.kv_heads,
        "llama.attention.key_length": g.head_dim,
        "llama.attention.value_length": g.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": g.rope_base,
        "llama.rope.dimension_count": g.head_dim,
        **(tokenizer_of(vocab, g.vocabulary) if vocab else byte_vocabulary(g.vocabulary)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("format", choices=[*(name for name, f in FORMATS.items() if f.quantize), *MIXES])
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab", type=Path, help="GGUF file to take the tokenizer from")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    g = GEOMETRIES[arguments.geometry]
    write_gguf(
        arguments.out,
        metadata(arguments.geometry, g, arguments.vocab),
        tensors(g, arguments.format, arguments.seed),
        overwrite=True,
    )
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
