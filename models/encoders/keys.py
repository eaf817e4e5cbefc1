"""The sizes of an encoder, read from the metadata of an mmproj file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.models.encoders.layers import Shape
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.plan import Activation

MOST_WIDTH = 1 << 14  # of the layers


@dataclass(frozen=True, slots=True)
class Sizes:
    shape: Shape
    eps: float
    activation: Activation
    patch: int  # pixels per side of a patch; 0 for sound
    side: int  # patches per side of a cell
    image: int  # pixels per side of a picture of the usual size; 0 for sound


def read_sizes(keys: Keys, kind: Literal["vision", "audio"], side: int = 1, turned: bool = False) -> Sizes:
    """Read the sizes. `keys` are those with the prefix "clip."; `side` is the default of a cell's side.

    If heads are `turned`, each half of a head consists of pairs.
    """
    width = keys.integer(f"{kind}.embedding_length", 1, MOST_WIDTH)
    layers = keys.integer(f"{kind}.block_count", 0, 512)
    # files of encoders without layers have no heads
    heads = keys.integer(f"{kind}.attention.head_count", min(1, layers), 256) or 1
    kv_heads = keys.integer(f"{kind}.attention.head_count_kv", 1, 256, heads)
    head_dim = keys.integer(f"{kind}.attention.key_length", 2, 1024, max(2, width // heads))
    if heads % kv_heads or head_dim % (4 if turned else 2):
        problem = f"{heads} heads of {head_dim} values with {kv_heads} key-value heads are not supported"
        raise ModelError(f"clip.{kind}.attention.head_count: {problem}")
    used = keys.integer(f"{kind}.expert_used_count", 0, 64, 0)
    shape = Shape(f"{kind[0]}.blk", width, heads, kv_heads, layers, head_dim, used)
    eps = keys.real(f"{kind}.attention.layer_norm_epsilon", 0.0, 1.0, 1e-6)
    activation: Activation = "gelu_quick"
    if keys.flag("use_gelu", False):
        activation = "gelu"
    elif keys.flag("use_silu", False):
        activation = "silu"
    if kind == "audio":
        return Sizes(shape, eps, "gelu_erf", 0, 1, 0)
    for key in ("spatial_merge_size", "projector.scale_factor"):
        side = keys.integer(f"vision.{key}", 1, 16, side)
    patch = keys.integer("vision.patch_size", 1, 256)
    return Sizes(shape, eps, activation, patch, side, keys.integer("vision.image_size", 1, 1 << 14, 1 << 10))


def length(keys: Keys, key: str, most: int) -> int:
    """Return the length of a list with at most `most` values, and 1 for anything else."""
    listed = keys.metadata.get(keys.prefix + key)
    count = len(listed) if listed is not None and hasattr(listed, "__len__") and not isinstance(listed, str) else 1
    return count if 1 <= count <= most else 1
