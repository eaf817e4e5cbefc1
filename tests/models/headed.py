"""Test models with an added next-token prediction head. Its weights follow the test models' rule.

The head's layer has the same tensors as one of the model's layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.models.kit import KIT, values
from tests.models.support import MemoryWeight

OTHERS = ("rope.dimension_sections", "attention.indexer.types")  # keys with a value per layer, but none for the head


@dataclass(frozen=True, slots=True)
class Headed:
    """A test model and the description of its head."""

    model: str
    like: int  # the layer whose tensors the head has
    experts: int | None = None  # the layer whose feed-forward tensors the head has, if different
    norm: str = "nextn.shared_head_norm"
    own: tuple[str, ...] = ()  # embedding or output matrices of the head itself; otherwise it uses the model's
    values: tuple[tuple[str, int], ...] = ()  # per-layer keys whose value for the head differs

    @property
    def tokens(self) -> list[int]:
        return KIT[self.model].tokens

    def loaded(self) -> tuple[dict[str, Any], dict[str, MemoryWeight]]:
        """Return the metadata and all tensors, in memory."""
        metadata, tensors = KIT[self.model].loaded()
        architecture = metadata["general.architecture"]
        layers, width = (int(metadata[f"{architecture}.{key}"]) for key in ("block_count", "embedding_length"))
        own = dict(self.values)
        for key, value in metadata.items():
            name = key.removeprefix(f"{architecture}.")
            if name != key and name not in OTHERS and np.shape(value) == (layers,):
                numbers = np.asarray(value).tolist()
                metadata[key] = [*numbers, own.get(name, numbers[self.like])]
        added = {f"{architecture}.block_count": layers + 1, f"{architecture}.nextn_predict_layers": 1}
        other = self.like if self.experts is None else self.experts
        shapes = {}
        for name, tensor in tensors.items():
            for layer, feeds in ((self.like, False), (other, True)):
                own = name.removeprefix(f"blk.{layer}.")
                if own != name and own.startswith(("ffn", "exp_probs")) == feeds:
                    shapes[own] = tensor.shape
        shapes |= {"nextn.eh_proj.weight": (width, 2 * width)}
        shapes |= {f"{name}.weight": (width,) for name in ("nextn.enorm", "nextn.hnorm", self.norm)}
        shapes |= {f"nextn.{name}.weight": tensors["token_embd.weight"].shape for name in self.own}
        made = {f"blk.{layers}.{name}": shape for name, shape in shapes.items()}
        return metadata | added, tensors | {
            name: MemoryWeight.of(name, values(name, shape, architecture)) for name, shape in made.items()
        }


HEADED = {
    "bailingmoe3": Headed("bailingmoe3-moe", 0, 1, "layer_output_norm"),
    "cohere2moe": Headed("cohere2moe-moe", 1),
    "deepseek32": Headed("deepseek32-8of40", 1, own=("embed_tokens", "shared_head_head")),
    "deepseek4": Headed("deepseek4-moe", 0, values=(("attention.compress_ratios", 0),)),
    "glm-dsa": Headed("glm-dsa-8of40", 1),
    "hy_v3": Headed("hy_v3-moe", 1),
    "qwen3next": Headed("qwen3next-moe", 1),
}
