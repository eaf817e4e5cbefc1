"""Small EAGLE-3 and Gemma 4 assistant files for the test models. Their weights follow the test models' rule.

`data/drafter_logits.npz` contains llama.cpp's logits for them, of its library with a float32 KV cache and without flash
attention. Row t gets token t + 1 and the combined hidden states of token t: 32 rows in one batch, and the others one by
one. Three drafts follow, each from the most likely token and the hidden state of the row before. An assistant reads the
model's cache. For it, three drafts follow each row.
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
        return written(path, "eagle3", *self.loaded(), changed)


@dataclass(frozen=True, slots=True)
class Assistant:
    """A Gemma 4 test model, and the file that drafts for it."""

    model: str
    kv_heads: tuple[int, int]  # of the model's last sliding-window and full-attention layers

    def loaded(self) -> tuple[dict[str, Any], dict[str, MemoryWeight]]:
        """Return the metadata and all tensors, in memory."""
        theirs, _ = KIT[self.model].loaded()
        wide, words = int(theirs["gemma4.embedding_length"]), len(theirs[f"{TOKENIZER}ggml.tokens"])
        width, heads, ffn, slides = 64, 4, 96, (True, False, True, False)
        keys = {
            "block_count": len(slides), "nextn_predict_layers": len(slides), "context_length": 256,
            "embedding_length": width, "embedding_length_out": wide, "feed_forward_length": ffn,
            "attention.head_count": heads, "attention.head_count_kv": np.array(
                [self.kv_heads[not sliding] for sliding in slides], np.int32
            ),
            "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 32,
            "attention.value_length_swa": 32, "rope.dimension_count": 64, "rope.dimension_count_swa": 32,
            "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
            "attention.sliding_window": int(theirs["gemma4.attention.sliding_window"]),
            "attention.sliding_window_pattern": np.array(slides), "vocab_size": words,
            "attention.shared_kv_layers": len(slides), "embedding_length_per_layer_input": 0,
        }  # fmt: skip
        name = "gemma4-assistant"
        metadata = {"general.architecture": name} | {f"{name}.{key}": value for key, value in keys.items()}
        metadata |= {key: value for key, value in theirs.items() if key.startswith(TOKENIZER)}
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd": (words, width), "output_norm": (width,), "nextn.pre_projection": (width, 2 * wide),
            "nextn.post_projection": (wide, width), "rope_freqs": (32,),
        }  # fmt: skip
        for layer, sliding in enumerate(slides):
            size = 32 if sliding else 64
            own = {
                "attn_norm": (width,), "attn_q": (heads * size, width), "attn_output": (width, heads * size),
                "attn_q_norm": (size,), "post_attention_norm": (width,), "layer_output_scale": (1,),
                "ffn_norm": (width,), "ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn),
                "post_ffw_norm": (width,),
            }  # fmt: skip
            shapes |= {f"blk.{layer}.{part}": shape for part, shape in own.items()}
        return metadata, {
            f"{each}.weight": MemoryWeight.of(f"{each}.weight", values(f"{each}.weight", shape, name))
            for each, shape in shapes.items()
        }

    def write(self, path: Path, **changed: Any) -> Path:
        """Write the file; `changed` replaces keys, whose names have `__` for dots."""
        return written(path, "gemma4-assistant", *self.loaded(), changed)


def written(
    path: Path, name: str, metadata: dict[str, Any], tensors: dict[str, MemoryWeight], changed: dict[str, Any]
) -> Path:
    metadata = metadata | {f"{name}.{key.replace('__', '.')}": value for key, value in changed.items()}
    write_gguf(path, metadata, [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values()])
    return path


ASSISTANTS = {
    "assistant": Assistant("gemma4-31b", (2, 1)),
    "assistant, shared": Assistant("gemma4-e2b", (1, 1)),
}
EAGLES = {
    "shared": Eagle3("llama-gqa", (0, 1, 2)),
    "own": Eagle3("llama-gqa", (1, 2, 2), width=64, tokens=48, before_residual=True, before_fc=True),
    "hybrid": Eagle3("qwen35-dense", (0, 1, 1), tokens=100, factors=True),
    "last": Eagle3("gpt-oss-moe", (2, 0, 1), before_fc=True),
}
DRAFTERS: dict[str, Eagle3 | Assistant] = {**EAGLES, **ASSISTANTS}
