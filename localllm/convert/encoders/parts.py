"""Tables and changes of tensors that several rows share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from localllm.convert import tensor as t
from localllm.convert.changes import of_one, share
from localllm.convert.recipe import Change, From, Layer, taken

NORMS: Layer = {"ln1": "norm1", "ln2": "norm2"}
SIGLIP: Layer = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2", "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}  # fmt: skip
SIGLIP_SIZES = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 16,
    "image_size": 224, "layer_norm_eps": 1e-6,
}  # fmt: skip
HEAD = r"^vision_tower\.(vision_model\.)?head\."  # SigLIP's pooling, which only classifiers use
TOWER = ((r"^vision_tower\.vision_model\.", "vision_tower."),)  # older and newer names
GATED: Layer = {"ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj"}


def thirds(name: str, part: int) -> From:
    """Return the source of queries, keys or values, which are the thirds of one tensor."""
    return taken(name, share(part, 3))


QKV: Layer = {f"attn_{x}": thirds("attn.qkv", which) for which, x in enumerate("qkv")}


def embeddings(name: str) -> Layer:
    """Return the sources of the patch kernel and the position table."""
    return {"v.patch_embd": f"{name}.patch_embedding", "v.position_embd.weight": f"{name}.position_embedding.weight"}


def _frame(which: int) -> Change:
    """Return a change that picks the kernel of one of two frames."""

    def picked(values: NDArray[Any]) -> NDArray[Any]:
        out, channels, frames, height, width = values.shape
        if frames != 2:
            raise ValueError
        return values[:, :, which].reshape(out, channels, height, width)

    return reordered(picked)


def reordered(change: Callable[[NDArray[Any]], NDArray[Any]]) -> Change:
    """Return a change of the order of a small tensor's values."""
    return of_one(lambda tensor: t.rearranged(tensor, change))


def squares(values: NDArray[Any]) -> NDArray[Any]:
    """Return kernels (outputs, side * side * 3), whose channels vary fastest, as (outputs, 3, side, side)."""
    side = round((values.shape[1] // 3) ** 0.5)
    return values.reshape(len(values), side, side, 3).transpose(0, 3, 1, 2)


column = reordered(lambda values: values[:, None])  # (n,) as (n, 1)
cube = reordered(lambda values: values[:, None, None])  # (n,) as (n, 1, 1)
row = reordered(lambda values: values[None])  # (n,) as (1, n)
FRAMES: Layer = {
    "v.patch_embd.weight": taken("visual.patch_embed.proj.weight", _frame(0)),
    "v.patch_embd.weight.1.": taken("visual.patch_embed.proj.weight", _frame(1)),
}
