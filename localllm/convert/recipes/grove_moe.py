"""The recipe of GroveMoE (arXiv:2508.07785): Qwen 3's experts, plus small adjugate experts, each shared by a group of
experts.

transformers does not support it. Values that config.json lacks are constants of the reference implementation.
"""

from __future__ import annotations

from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Keys, Raw, Recipe
from localllm.convert.recipes.shared import NORMED_SPARSE

_GROUP, _SCALE, _WIDTH = 2, 0.05, 128  # experts per group, scale and width of the shared expert

_KEYS: Keys = {
    "expert_chunk_feed_forward_length": lambda config: config.integer("head_dim") or _WIDTH,  # the reference's default
    "experts_per_group": _GROUP,
    "expert_group_scale": lambda config: _SCALE,
}


def _read(raw: Raw, config: HfConfig) -> Raw:
    return {name: parts for name, parts in raw.items() if not name.endswith(".expert_bias")}


ROWS = (
    Recipe(
        "grovemoe", ("GroveMoeForCausalLM", "modeling_grove_moe.GroveMoeForCausalLM"), keys=_KEYS, raw=_read,
        fixed={**NORMED_SPARSE, "attention_bias": False},
    ),
)  # fmt: skip
