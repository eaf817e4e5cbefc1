"""The recipes of Command R, Command A and North."""

from __future__ import annotations

from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Recipe, by_name
from localllm.convert.recipes.shared import leading, named_kinds, slides_of


def _cohere_kinds(config: HfConfig) -> list[str]:
    """Return the attention kind of each layer if config.json only gives periods. The period restarts after the dense
    layers."""
    dense = config.integer("first_k_dense_replace") or 0
    first, period = config.integer("prefix_dense_sliding_window_pattern") or 1, config.integer("sliding_window_pattern")
    rest = config.layers - dense
    starts = [(i + 1) % first != 0 for i in range(dense)]
    return named_kinds([*starts, *((i + 1) % (period or 4) != 0 for i in range(rest))])


def _cohere_widths(config: HfConfig) -> list[str]:
    dense, layers = config.integer("first_k_dense_replace") or 0, config.layers
    return ["dense" if layer < dense else "sparse" for layer in range(layers)]


def _cohere_gating(config: HfConfig) -> int:
    """Return the GGUF number of the router's scoring function."""
    return config.choice("expert_selection_fn", of={"sigmoid": 2, "softmax": 3}, default="softmax")


def _rms_eps(config: HfConfig) -> float | None:
    """Return the epsilon of the RMS norms, or None if the model uses layer norms."""
    return config.real("rms_norm_eps")


def _layer_eps(config: HfConfig) -> float | None:
    return config.real("layer_norm_eps")


def _average(config: HfConfig) -> str | None:
    strategy = config.get("shared_expert_combination_strategy") or "average"
    if not config.integer("num_shared_experts") or strategy == "average":
        return None
    return f"shared_expert_combination_strategy is {strategy}; the GGUF architecture requires average"


def _turned_as_told(config: HfConfig) -> str | None:
    """Require sliding-window attention in some layer, since without it GGUF applies rope in every layer. Require rope
    in dense layers."""
    slides, dense = slides_of(config), leading(config)
    if config.values.get("sliding_window", 0) is None or not any(slides):
        return "no layer has a window; the GGUF architecture rotates all layers then, transformers none"
    if all(slides[:dense]) or (config.integer("prefix_dense_sliding_window_pattern") or 1) == 1:
        return None
    return "prefix_dense_sliding_window_pattern is not 1; the GGUF architecture rotates all dense layers"


ROWS = (
    Recipe("cohere2", ("Cohere2ForCausalLM",), like="command-r"),
    Recipe("command-r", ("CohereForCausalLM",)),
    Recipe(
        "cohere2moe", ("Cohere2MoeForCausalLM",), like="dots1",
        keys={
            "attention.layer_norm_epsilon": lambda config: _layer_eps(config) if _rms_eps(config) is None else None,
            "attention.layer_norm_rms_epsilon": _rms_eps, "leading_dense_block_count": leading,
            "feed_forward_length": by_name("prefix_dense_intermediate_size", "intermediate_size"),
            "expert_feed_forward_length": "intermediate_size", "expert_gating_func": _cohere_gating,
            "expert_shared_count": lambda config: config.integer("num_shared_experts") or None,
        },
        fixed={"attention_bias": False}, checks=(_average, _turned_as_told),
        defaults={
            "layer_norm_eps": 1e-5, "head_dim": 128, "logit_scale": 0.0625, "norm_topk_prob": True,
            "sliding_window": 4096, "num_experts": 8, "num_experts_per_tok": 2, "layer_types": _cohere_kinds,
            "mlp_layer_types": _cohere_widths,
        },
    ),
)  # fmt: skip
