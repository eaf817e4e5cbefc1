"""The recipes of EXAONE 3 and 4.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from typing import Any

from localllm.convert import sources as of
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Layer, Recipe, by_name, slides_at_64_layers, taken
from localllm.convert.recipes.shared import LN, WTE


def _kinds_of_letters(config: HfConfig) -> dict[str, Any]:
    """Return layer_types from EXAONE's format, a string of letters: L is sliding-window attention, G is full
    attention."""
    letters, layers = config.get("sliding_window_pattern"), config.needed("num_hidden_layers")
    if not isinstance(letters, str) or config.get("layer_types") is not None:
        return {}
    if not letters or set(letters) - {"L", "G"}:
        raise config.error("sliding_window_pattern", letters, "a number, or the letters L and G")
    kinds = {"L": "sliding_attention", "G": "full_attention"}
    return {"layer_types": [kinds[letters[layer % len(letters)]] for layer in range(layers)]}


_EXAONE: Layer = {
    **LN,
    **{f"attn_{x}": taken(f"attn.attention.{x}_proj") for x in "qkv"},
    "attn_output": taken("attn.attention.out_proj"),
    **{f"ffn_{x}": taken(f"mlp.{name}") for x, name in (("gate", "c_fc_0"), ("up", "c_fc_1"), ("down", "c_proj"))},
}


ROWS = (
    Recipe("exaone4", ("Exaone4ForCausalLM",), of.EXAONE4, rope_tensors=True, checks=(slides_at_64_layers,)),
    Recipe(
        "exaone-moe", ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        {**of.QWEN, **of.HEAD_NORMS, **of.CORRECTED}, keys={"expert_gating_func": 2}, words=_kinds_of_letters,
        defaults={"first_k_dense_replace": lambda config: config.integer("first_last_k_dense_replace")},
    ),
    Recipe(
        "exaone", ("ExaoneForCausalLM",), _EXAONE, eps="layer_norm_epsilon", top=WTE, rope_tensors=True,
        defaults={
            "num_hidden_layers": by_name("num_layers"), "layer_norm_epsilon": 1e-5,
            "hidden_act": lambda config: config.get("activation_function"),
        },
    ),
)  # fmt: skip
