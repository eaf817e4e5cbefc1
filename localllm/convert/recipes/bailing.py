"""The recipes of Ling 1 and 2.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.convert import tensor as t
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Keys, Recipe, Tensors
from localllm.convert.recipes.shared import head_width, neighbours, one_after_other
from localllm.convert.tensor import LazyTensor

_CHUNK = 4096  # rows of the output matrix read at a time


def _unit_columns(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return the output matrix of a model with `norm_head`. As in the reference implementation, each column is divided
    by its norm."""
    tensor = parts[0]
    if not config.flag("norm_head"):
        return tensor

    @cache
    def lengths() -> NDArray[np.float32]:
        total = np.zeros(tensor.shape[-1], np.float64)
        for start in range(0, tensor.rows, _CHUNK):
            rows = quant.dequantize(tensor.read(start, min(start + _CHUNK, tensor.rows)), tensor.format)
            total += np.square(rows, dtype=np.float64).sum(axis=0)
        return (np.sqrt(total) + 1e-7).astype(np.float32)

    return t.computed(tensor, lambda rows: rows / lengths())


def _centred(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return Sarvam's router biases minus their mean, which the reference implementation subtracts when it loads the
    model."""
    return t.computed(parts[0], lambda row: row - row.mean(dtype=np.float32))


def _shared(config: HfConfig) -> int | None:
    return config.integer("num_shared_experts") or None


def _shared_width(config: HfConfig) -> int:
    """Return the width of one shared expert, which llama.cpp multiplies by the number of shared experts."""
    return config.integer("moe_shared_expert_intermediate_size") or config.needed("moe_intermediate_size")


def _gating(config: HfConfig) -> int:
    """Return the GGUF number of the router's scoring function."""
    names = ("score_function", "moe_router_activation", "scoring_func")
    return config.choice(*names, of={"softmax": 1, "sigmoid": 2}, default="softmax")


_LING1 = {
    **neighbours("attention.query_key_value", one_after_other),
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
_LING2_ORDER = "ffn_down_shexp attn_qkv attn_q_norm attn_k_norm"
_OUTPUT = {"output": _unit_columns}
_LING2_KEYS: Keys = {
    "expert_shared_count": _shared,
    "expert_shared_feed_forward_length": _shared_width,
    "expert_gating_func": _gating,
}
_LING_FIXED = {"use_rmsnorm": True, "use_bias": False, "multi_gate": False}


ROWS = (
    Recipe(
        "bailingmoe", ("BailingMoeForCausalLM",), _LING1, changes=_OUTPUT, order="ffn_down_shexp attn_q attn_k attn_v",
        keys={"expert_shared_count": _shared, "expert_weights_scale": 1.0},
        fixed={**_LING_FIXED, "score_function": "softmax", "norm_softmax": False, "first_k_dense_replace": 0},
    ),
    Recipe(
        "bailingmoe2", ("BailingMoeV2ForCausalLM",), changes=_OUTPUT, keys=_LING2_KEYS, order=_LING2_ORDER,
        fixed={**_LING_FIXED, "use_qk_norm": True}, defaults={"partial_rotary_factor": 0.5},
    ),
    Recipe(
        "bailingmoe2", ("SarvamMoEForCausalLM", "modeling_sarvam_moe.SarvamMoEForCausalLM"),
        changes={**_OUTPUT, "exp_probs_b": _centred}, order=_LING2_ORDER,
        keys={**_LING2_KEYS, "rope.dimension_count": head_width}, fixed={**_LING_FIXED, "use_qk_norm": True},
    ),
)  # fmt: skip
