"""The architectures that can run: one row each, holding only what a model file cannot say about itself.

Biases, q/k norms, tied output, head sizes and rope frequency factors are read from the file. A new architecture that
fits `models.forward` is one more row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.errors import ModelError


@dataclass(frozen=True, slots=True)
class Architecture:
    """`norm` rotates neighbouring dimensions (2i, 2i + 1), `neox` the halves (i, i + n_rot/2)."""

    name: str  # general.architecture, and the prefix of the keys
    rope_style: Literal["norm", "neox"]
    activation: Literal["silu", "gelu"] = "silu"
    no_rope_every: int = 0  # layers n - 1, 2n - 1, ... are not rotated; 0: all are
    qk_norm: bool = False  # the file must hold q/k norms (they are applied wherever it does)
    ffn_scales: bool = True  # `.scale` tensors of the feed-forward matrices count (llama.cpp reads them for some only)


_ROWS = (
    Architecture("llama", "norm"),  # Llama 1-3, Mistral 7B, Nemo and Small, TinyLlama, SmolLM 1-2, Yi, ...
    Architecture("mistral3", "norm"),  # Mistral Small 3.1 and later, Ministral 3
    Architecture("qwen2", "neox", ffn_scales=False),
    Architecture("qwen3", "neox", qk_norm=True),
    Architecture("smollm3", "norm", no_rope_every=4, ffn_scales=False),
)

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _ROWS}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """The row of the file's `general.architecture`; ModelError lists the supported ones."""
    name = metadata.get("general.architecture")
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        found = "the key is missing" if name is None else f"{str(name)[:60]!r} is not supported"
        raise ModelError(f"general.architecture: {found}; supported: {', '.join(ARCHITECTURES)}")
    return row
