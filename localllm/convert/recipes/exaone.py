"""The recipes of EXAONE 3 and 4.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from typing import Any

from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Recipe, integer


def _kinds_of_letters(config: HfConfig) -> dict[str, Any]:
    """Return layer_types from EXAONE's format, a string of letters: L is sliding-window attention, G is full
    attention."""
    letters, layers = config.get("sliding_window_pattern"), config.layers
    if not isinstance(letters, str) or config.get("layer_types") is not None:
        return {}
    if not letters or set(letters) - {"L", "G"}:
        raise config.error("sliding_window_pattern", letters, "a number, or the letters L and G")
    kinds = {"L": "sliding_attention", "G": "full_attention"}
    return {"layer_types": [kinds[letters[layer % len(letters)]] for layer in range(layers)]}


def slides_at_64_layers(config: HfConfig) -> str | None:
    """Require sliding-window attention in models with 64 layers, and in no others."""
    slides = config.integer("sliding_window") is not None and "sliding_attention" in (config.get("layer_types") or ())
    if slides == (config.layers == 64):
        return None
    return "the GGUF architecture has windows in models of 64 layers and no others; layer_types differs"


ROWS = (
    Recipe(
        "exaone4", ("Exaone4ForCausalLM", "Exaone4_5_ForConditionalGeneration"), rope_tensors=True,
        checks=(slides_at_64_layers,),
    ),
    Recipe(
        "exaone-moe", ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"), words=_kinds_of_letters,
        defaults={"first_k_dense_replace": integer("first_last_k_dense_replace")},
    ),
    Recipe(
        "exaone", ("ExaoneForCausalLM",), rope_tensors=True,
        defaults={"layer_norm_epsilon": 1e-5, "hidden_act": lambda config: config.get("activation_function")},
    ),
)  # fmt: skip
