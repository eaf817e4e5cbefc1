"""The recipe of MiniMax M2."""

from __future__ import annotations

from localllm.convert.recipe import Recipe

ROWS = (
    Recipe(
        "minimax-m2", ("MiniMaxM2ForCausalLM",),
        keys={"expert_feed_forward_length": "intermediate_size", "expert_gating_func": 2},
    ),
)  # fmt: skip
