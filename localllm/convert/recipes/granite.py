"""The recipes of Granite 3 and 4. The Granite models with Mamba layers are in mamba.py."""

from __future__ import annotations

import numpy as np

from localllm.convert.changes import PERMUTED, halves
from localllm.convert.hf_config import HfConfig, is_number
from localllm.convert.recipe import Layer, Recipe
from localllm.convert.recipes.shared import named_kinds

GRANITE_MOE: Layer = {
    "ffn_gate_inp": "block_sparse_moe.router",
    **halves("block_sparse_moe.input_linear.weight", "_exps.weight"),
}
GRANITE_SHARED: Layer = {**GRANITE_MOE, **halves("shared_mlp.input_linear", "_shexp")}


_GRANITE_SWA: Layer = {
    **GRANITE_MOE,
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}


def _layer_bases(config: HfConfig) -> list[float]:
    """Return each layer's rope base, or 0 for layers without rope."""
    if config.get("layer_rope_theta") is None:
        base = config.inner("rope_parameters", "rope_scaling").real("rope_theta") or config.real("rope_theta")
        return [base or 10000.0] * config.layers
    return [float(base) for base in config.per_layer("layer_rope_theta", "{} numbers from 0 up", is_number)]


def _granite_base(config: HfConfig) -> float | None:
    bases = {base for base in _layer_bases(config) if base}
    if len(bases) > 1:
        found = ", ".join(f"{base:g}" for base in sorted(bases))
        raise config.error("layer_rope_theta", found, "0 or one number for all layers, as GGUF files have it")
    return max(bases, default=None)


def _granite_kinds(config: HfConfig) -> list[str]:
    return named_kinds([layer % 4 != 0 for layer in range(config.layers)])


ROWS = (
    Recipe("granite", ("GraniteForCausalLM",), changes=PERMUTED, rope_tensors=True),
    Recipe(
        "granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), GRANITE_SHARED, changes=PERMUTED,
        rope_tensors=True,
    ),
    Recipe(
        "granite_swa", ("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"), _GRANITE_SWA, changes=PERMUTED,
        rope_tensors=True,
        keys={
            "rope.freq_base": _granite_base,
            "attention.rope_pattern": lambda config: np.array([base > 0 for base in _layer_bases(config)]),
        },
        defaults={"sliding_window": 128, "layer_types": _granite_kinds},
    ),
)  # fmt: skip
