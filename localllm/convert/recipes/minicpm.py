"""The recipes of MiniCPM and MiniCPM 3.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

import math

from localllm.convert.changes import PERMUTED
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.recipe import Recipe, by_name


def _key_width(config: HfConfig) -> int:
    return config.needed("qk_nope_head_dim") + config.needed("qk_rope_head_dim")


def ratio(name: str) -> Reader[float]:
    """Return a reader for a factor that config.json or the defaults must give."""

    def value(config: HfConfig) -> float:
        found = config.real(name)
        if not found:
            raise config.error(name, found, "a number other than 0")
        return found

    return value


ROWS = (
    Recipe(
        "minicpm3", ("MiniCPM3ForCausalLM",), rope_tensors=True,
        keys={
            "attention.head_count_kv": "num_attention_heads", "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank", "attention.key_length": _key_width,
            "attention.value_length": "v_head_dim", "rope.dimension_count": "qk_rope_head_dim",
        },
        fixed={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}, head_dim=by_name("qk_rope_head_dim"),
    ),
    Recipe(
        "minicpm", ("MiniCPMForCausalLM",), changes=PERMUTED, rope_tensors=True,
        keys={
            "embedding_scale": ratio("scale_emb"),
            "residual_scale": lambda config: (
                ratio("scale_depth")(config) / math.sqrt(config.layers)
            ),
            "logit_scale": lambda config: config.width / ratio("dim_model_base")(config),
        },
        fixed={"num_experts": 0}, defaults={"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1},
    ),
)  # fmt: skip
