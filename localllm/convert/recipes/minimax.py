"""The recipe of MiniMax M2."""

from __future__ import annotations

from localllm.convert import sources as of
from localllm.convert.recipe import Recipe

ROWS = (
    Recipe(
        "minimax-m2", ("MiniMaxM2ForCausalLM",), of.MINIMAX,
        keys={"expert_feed_forward_length": "intermediate_size", "expert_gating_func": 2},
    ),
)  # fmt: skip
