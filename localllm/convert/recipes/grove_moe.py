"""The recipe of GroveMoE (arXiv:2508.07785): Qwen 3's experts, plus small adjugate experts, each shared by a group of
experts.

transformers does not support it. Values that config.json lacks are constants of the reference implementation.
"""

from __future__ import annotations

from localllm.convert import sources as of
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Key, Layer, Recipe, must_be, stacked, taken

_GROUP, _SCALE, _WIDTH = 2, 0.05, 128  # experts per group, scale and width of the shared expert

_LAYER: Layer = {
    **of.NORMS,
    **of.QKV,
    **of.OUT,
    **of.HEAD_NORMS,
    **of.ROUTED,
    **{
        f"ffn_{x}_chexps.weight": taken(f"mlp.chunk_experts.{{}}.{x}_proj.weight", stacked)
        for x in ("gate", "up", "down")
    },
}
_KEYS: dict[str, Key] = {
    "expert_chunk_feed_forward_length": lambda config: config.integer("head_dim") or _WIDTH,  # the reference's default
    "experts_per_group": _GROUP,
    "expert_group_scale": lambda config: _SCALE,
}


def _unread(name: str, config: HfConfig) -> bool:
    return name.endswith(".expert_bias")


ROWS = (
    Recipe(
        "grovemoe", ("GroveMoeForCausalLM", "modeling_grove_moe.GroveMoeForCausalLM"), _LAYER, keys=_KEYS,
        unread=_unread,
        checks=(
            must_be("norm_topk_prob", True), must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", []),
            must_be("attention_bias", False),
        ),
    ),
)  # fmt: skip
