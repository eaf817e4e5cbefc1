"""Write a float32 model that computes what the bundled model computes, with weights that fit no block's grid.

The bundled model is a Q4_K_M file, and its training checkpoint was not kept. Its dequantized weights are multiples of
their block's scale, and Q4_K stores them again with almost no error: a comparison of types would favour Q4_K_M. Here
the residual stream and the feed-forward neurons are permuted, and the values of each KV head are rotated. The next
matrix undoes each change, so that logits differ only by rounding. A new block holds weights of many old blocks.

Values are rotated because columns of attn_output can only be permuted within a head. A head's 64 columns hold two old
blocks of 32, and Q4_K would keep an error of 6.0 % there. It has 7.0 to 7.2 % in all other matrices, 7.1 % after a
rotation, and 7.1 % for normally distributed weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from compare import ROOT
from numpy.typing import NDArray

sys.path.insert(0, str(ROOT))

from localllm.gguf import NewTensor, open_gguf, write_gguf
from localllm.quant import dequantize

F32 = NDArray[np.float32]
SEED = 0


def write_base(source: Path, target: Path) -> None:
    """Write `source`, a GGUF of a Llama with tied output and without biases, as an equivalent F32 model."""
    with open_gguf(source) as file:
        rng = np.random.default_rng(SEED)
        residual = rng.permutation(int(file.metadata["llama.embedding_length"]))
        changes: dict[str, Mapping[str, Callable[[F32], F32]]] = {"": around(residual)}
        tensors = []
        for name, tensor in file.tensors.items():
            layer, _, kind = name.removesuffix(".weight").rpartition(".")
            if layer not in changes:
                changes[layer] = in_layer(rng, residual, file.metadata)
            old = dequantize(tensor.read(0, tensor.rows), tensor.format).reshape(tensor.shape)
            new = np.ascontiguousarray(changes[layer][kind](old), np.float32)
            tensors.append(NewTensor(name, "F32", new.shape, new.tobytes()))
        write_gguf(target, {**file.stored, "general.file_type": np.uint32(0)}, tensors, overwrite=True)


def around(residual: NDArray[np.intp]) -> Mapping[str, Callable[[F32], F32]]:
    """Return the change of each tensor outside the layers."""
    return dict.fromkeys(("token_embd", "output_norm"), lambda w: w[..., residual])


def in_layer(
    rng: np.random.Generator, residual: NDArray[np.intp], metadata: Mapping[str, object]
) -> Mapping[str, Callable[[F32], F32]]:
    """Return the change of each tensor of a layer. Query and key rows keep their order, which RoPE needs."""
    neurons, heads, kv_heads, head_dim = (
        int(str(metadata[f"llama.{key}"]))
        for key in ("feed_forward_length", "attention.head_count", "attention.head_count_kv", "attention.value_length")
    )
    order = rng.permutation(neurons)
    turns = np.linalg.qr(rng.normal(size=(kv_heads, head_dim, head_dim)))[0]  # a rotation for each KV head

    def rotated_rows(w: F32) -> F32:
        by_head = w[:, residual].reshape(kv_heads, head_dim, -1)
        rotated: F32 = (turns @ by_head).reshape(w.shape)
        return rotated

    def rotated_columns(w: F32) -> F32:
        by_head = w[residual].reshape(len(w), kv_heads, heads // kv_heads, head_dim)
        rotated: F32 = np.einsum("rgqd,ged->rgqe", by_head, turns).reshape(w.shape)
        return rotated

    return {
        **dict.fromkeys(("attn_norm", "ffn_norm", "attn_q", "attn_k"), lambda w: w[..., residual]),
        **dict.fromkeys(("ffn_gate", "ffn_up"), lambda w: w[order][:, residual]),
        "ffn_down": lambda w: w[residual][:, order],
        "attn_v": rotated_rows,
        "attn_output": rotated_columns,
    }
