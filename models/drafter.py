"""GGUFs that draft for a model and are none: its multi-token-prediction heads, or an architecture such as EAGLE-3.

Such a file is recorded into the plan of the model, whose weights it shares: embeddings and output are held once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from localllm.models.architecture import Architecture
from localllm.models.config import MediaInput
from localllm.models.draft_architecture import Drafter, Target
from localllm.models.errors import ModelError
from localllm.models.families import DRAFTERS
from localllm.models.lookup import architecture_of, read_config
from localllm.models.next_token import has_head, record_with_heads
from localllm.plan import Plan, Tensor

_HEAD = re.compile(r"blk\.(\d+)\.nextn\.")
_LAYER = re.compile(r"blk\.(\d+)\.")


def is_drafter(drafter: Drafter) -> bool:
    """Return whether a GGUF drafts for another model and is not a model itself."""
    return str(drafter.metadata.get("general.architecture")) in DRAFTERS or is_heads(drafter)


def is_heads(drafter: Drafter) -> bool:
    """Return whether a GGUF contains multi-token-prediction heads and no other layers."""
    names = drafter.tensors
    return any(_HEAD.match(name) for name in names) and not any(name.startswith("blk.0.") for name in names)


def record_with_drafter(
    metadata: Mapping[str, Any], architecture: Architecture, tensors: Mapping[str, Tensor], drafter: Drafter,
    context: int | None = None, most: int = 1, media: MediaInput | None = None,
) -> Plan:  # fmt: skip
    """Record a model and, as further stages, a drafter: at most `most` of its heads, as in `record_with_heads`.

    Raises ModelError if the drafter does not fit the model.
    """
    own = DRAFTERS.get(str(drafter.metadata.get("general.architecture")))
    if own is not None:
        target = Target(read_config(metadata, architecture.name), architecture, tensors, context, media)
        return own.record(target, drafter)
    layers = check_fit(metadata, architecture, drafter)
    both = {name: tensor for name, tensor in tensors.items() if not _later(name, layers)}
    both |= {name: tensor for name, tensor in drafter.tensors.items() if _later(name, layers)}
    return record_with_heads(metadata, architecture, both, context, most, drafter.metadata, media)


def check_fit(metadata: Mapping[str, Any], architecture: Architecture, drafter: Drafter) -> int:
    """Return the number of layers of the model. Raise ModelError if the heads are not made for such a model."""
    found = architecture_of(drafter.metadata)
    if found.name != architecture.name:
        raise ModelError(f"general.architecture: expected {architecture.name}, as in the model, found {found.name}")
    ours, theirs = read_config(metadata, architecture.name), read_config(drafter.metadata, architecture.name)
    for key, expected, given in (
        ("embedding_length", ours.width, theirs.width),
        ("block_count", ours.layers, theirs.layers),
        ("vocab_size", ours.vocabulary, theirs.vocabulary),
    ):
        if given != expected:
            what = " layers before the heads" if key == "block_count" else ""
            raise ModelError(f"{architecture.name}.{key}: expected {expected}{what}, as in the model, found {given}")
    if not architecture.heads_verified:
        raise ModelError(f"general.architecture: prediction heads of {architecture.name} models are not supported yet")
    if not has_head(theirs, architecture, drafter.tensors):
        if not theirs.nextn_layers:
            raise ModelError(f"{architecture.name}.nextn_predict_layers: expected 1 or more heads, found 0")
        raise ModelError(f"blk.{theirs.layers}.nextn.eh_proj.weight: this tensor is missing")
    return ours.layers


def _later(name: str, layers: int) -> bool:
    """Whether a tensor belongs to a layer after the model's layers."""
    found = _LAYER.match(name)
    return found is not None and int(found[1]) >= layers
