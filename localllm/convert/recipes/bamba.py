"""The recipe of Bamba, whose layers are the same as in a hybrid Granite 4 model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Recipe
from localllm.convert.recipes.gated_delta import kv_heads
from localllm.convert.recipes.mamba import MAMBA2_KEYS, mamba2, product, steps_unbounded
from localllm.convert.recipes.shared import queries_and_keys


def _neighbours(count: int) -> NDArray[np.int64]:
    """Return the order that places i and i + count/2 next to each other."""
    return np.arange(count).reshape(2, -1).T.reshape(-1)


def _attends(config: HfConfig) -> NDArray[np.bool_]:
    """Return which layers have attention."""
    layers, found = config.layers, config.get("attn_layer_indices") or []
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n < layers for n in found):
        raise config.error("attn_layer_indices", found, f"layers below {layers}")
    return np.isin(np.arange(layers), found)


_BAMBA = {**queries_and_keys(_neighbours), **mamba2(product("mamba_expand", "hidden_size", "mamba_n_groups"))}


ROWS = (
    Recipe(
        "granitehybrid", ("BambaForCausalLM",), {"ffn_norm": "pre_ff_layernorm"}, changes=_BAMBA,
        keys={"attention.head_count_kv": kv_heads(_attends), "rope.scaling.finetuned": True, **MAMBA2_KEYS},
        checks=(steps_unbounded,), defaults={"partial_rotary_factor": 0.5, "mamba_d_conv": 4, "mamba_n_groups": 1},
    ),
)  # fmt: skip
