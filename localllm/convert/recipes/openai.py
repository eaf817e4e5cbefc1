"""The recipes of GPT-2 and gpt-oss."""

from __future__ import annotations

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.changes import in_turn, of_all, turned
from localllm.convert.recipe import Change, From, Layer, Recipe, taken
from localllm.convert.recipes.shared import NOT_ROTATED


def _every_second(first: int) -> Change:
    """Return a change that keeps rows first, first + 2, ..."""
    return lambda parts, config: t.strided(parts[0], first, parts[0].shape[-2], 2)


def _every_second_value(first: int) -> Change:
    return lambda parts, config: t.picked_columns(parts[0], np.arange(first, parts[0].shape[-1], 2))


_packed = of_all(lambda parts: t.mxfp4(*parts))
_EXPERTS = "mlp.experts."
_BLOCKS = {x: tuple(f"{_EXPERTS}{x}_proj_{part}" for part in ("blocks", "scales")) for x in ("gate_up", "down")}
_GPT_OSS: Layer = {
    **{
        f"ffn_{x}_exps.weight": (
            From(_BLOCKS["gate_up"], in_turn(_packed, _every_second(first))),
            taken(f"{_EXPERTS}gate_up_proj", in_turn(turned, _every_second(first))),
        )
        for first, x in enumerate(("gate", "up"))
    },
    "ffn_down_exps.weight": (From(_BLOCKS["down"], _packed), taken(f"{_EXPERTS}down_proj", turned)),
    "ffn_gate_exps.bias": taken(f"{_EXPERTS}gate_up_proj_bias", _every_second_value(0)),
    "ffn_up_exps.bias": taken(f"{_EXPERTS}gate_up_proj_bias", _every_second_value(1)),
}
TURNED = {f"{key}.weight": turned for key in ("attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}

ROWS = (
    Recipe(
        "gpt2", ("GPT2LMHeadModel",), changes=TURNED,
        keys={
            "attention.head_count_kv": "n_head", **NOT_ROTATED,
            "feed_forward_length": lambda config: config.integer("n_inner") or 4 * config.needed("n_embd"),
        },
        fixed={
            "activation_function": ("gelu_new", "gelu", "gelu_pytorch_tanh"), "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
    ),
    Recipe(
        "gpt-oss", ("GptOssForCausalLM",), _GPT_OSS, keys={"expert_feed_forward_length": "intermediate_size"},
        fixed={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    ),
)  # fmt: skip
