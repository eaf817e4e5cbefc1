"""Small EAGLE-3 files for the test models. Their weights follow the test models' rule.

`data/drafter_logits.npz` contains llama.cpp's logits for them, of its library with a float32 KV cache and without flash
attention. Row t gets token t + 1 and the combined hidden states of token t: 32 rows in one batch, and the others one by
one. Three drafts follow, each from the most likely token and the hidden state of the row before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localllm.gguf import NewTensor, write_gguf
from tests.models.kit import KIT, values
from tests.models.support import MemoryWeight

TOKENIZER = "tokenizer."


@dataclass(frozen=True, slots=True)
class Eagle3:
    """A test model, and the properties of the file that drafts for it."""

    model: str
    layers: tuple[int, int, int]
    width: int = 0  # width of a file with its own embeddings; 0: the model's width and embeddings
    tokens: int = 0  # number of tokens with logits, from an own output matrix; 0: the model's tokens and matrix
    before_residual: bool = False
    before_fc: bool = False
    factors: bool = False  # has frequency factors

    def loaded(self) -> tuple[dict[str, Any], dict[str, MemoryWeight]]:
        """Return the metadata and all tensors, in memory."""
        theirs, _ = KIT[self.model].loaded()
        wide = int(theirs[f"{theirs['general.architecture']}.embedding_length"])
        width, words = self.width or wide, len(theirs[f"{TOKENIZER}ggml.tokens"])
        heads, kv_heads, head_dim, ffn = 4, 2, 32, 96
        keys = {
            "block_count": 1, "context_length": 256, "embedding_length": width, "feed_forward_length": ffn,
            "vocab_size": words, "attention.head_count": heads, "attention.head_count_kv": kv_heads,
            "attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim,
            "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, "target_hidden_size": wide,
            "target_layers": np.array(self.layers, np.int32), "norm_before_residual": self.before_residual,
            "norm_before_fc": self.before_fc,
        }  # fmt: skip
        metadata = {"general.architecture": "eagle3"} | {f"eagle3.{key}": value for key, value in keys.items()}
        metadata |= {key: value for key, value in theirs.items() if key.startswith(TOKENIZER)}
        shapes: dict[str, tuple[int, ...]] = {
            "fc": (width, 3 * wide), "output_norm": (width,), "blk.0.attn_norm": (width,),
            "blk.0.attn_norm_2": (width,), "blk.0.attn_q": (heads * head_dim, 2 * width),
            "blk.0.attn_k": (kv_heads * head_dim, 2 * width), "blk.0.attn_v": (kv_heads * head_dim, 2 * width),
            "blk.0.attn_output": (width, heads * head_dim), "blk.0.ffn_norm": (width,), "blk.0.ffn_gate": (ffn, width),
            "blk.0.ffn_up": (ffn, width), "blk.0.ffn_down": (width, ffn),
        }  # fmt: skip
        shapes |= {"enc.output_norm": (3 * wide,)} if self.before_fc else {}
        shapes |= {"token_embd": (words, width)} if self.width else {}
        shapes |= {"output": (self.tokens or words, width)} if self.tokens or self.width else {}
        shapes |= {"rope_freqs": (head_dim // 2,)} if self.factors else {}
        tensors = {
            f"{name}.weight": MemoryWeight.of(f"{name}.weight", values(f"{name}.weight", shape, "eagle3"))
            for name, shape in shapes.items()
        }
        if self.tokens:
            chosen = np.sort(np.random.default_rng(self.tokens).permutation(words)[: self.tokens])
            rows = chosen.astype(np.int64).view(np.uint8)[None]
            tensors["d2t"] = MemoryWeight("d2t", "I64", (self.tokens,), rows)
        return metadata, tensors

    def write(self, path: Path, **changed: Any) -> Path:
        """Write the file; `changed` replaces keys, whose names have `__` for dots."""
        metadata, tensors = self.loaded()
        metadata |= {f"eagle3.{key.replace('__', '.')}": value for key, value in changed.items()}
        write_gguf(path, metadata, [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values()])
        return path


EAGLES = {
    "shared": Eagle3("llama-gqa", (0, 1, 2)),
    "own": Eagle3("llama-gqa", (1, 2, 2), width=64, tokens=48, before_residual=True, before_fc=True),
    "hybrid": Eagle3("qwen35-dense", (0, 1, 1), tokens=100, factors=True),
    "last": Eagle3("gpt-oss-moe", (2, 0, 1), before_fc=True),
}
