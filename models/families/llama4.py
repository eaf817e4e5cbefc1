"""Llama 4: attention in chunks of the context, and layers without RoPE whose queries have a temperature."""

from __future__ import annotations

from dataclasses import replace

from localllm.models.architecture import Architecture, FeedForward
from localllm.models.attention import Attention, Ropes
from localllm.models.config import Config
from localllm.models.errors import ModelError
from localllm.models.properties import Properties, Sliding
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_EXPERTS
from localllm.models.routing import ExpertGating
from localllm.plan import Rope

GROWTH, LENGTH = 0.1, 8192  # of the query temperature


def _read(keys: Keys, row: Properties, head: int) -> Config:
    """Read a model; those with 128 experts have no norms of queries and keys."""
    config = read_general(keys, row, head)
    if any(config.windows) and config.head_dim[0] % 2:
        raise ModelError(f"{keys.prefix}attention.key_length: expected an even number, found {config.head_dim[0]}")
    rotated = config.rotated if any(config.windows) else (True,) * config.layers
    return replace(config, rotated=rotated, unit_qk_norm=keys.integer("expert_count", 0, MAX_EXPERTS, 0) != 128)


class ChunkedAttention(Attention):
    chunked = True

    def ropes(self, layer: int) -> Ropes:
        """Return the rotations; layers without RoPE get a rotation by angle 0, which applies the temperature."""
        config, size = self.config, self.config.head_dim[0]
        if config.rotated[layer]:
            return super().ropes(layer)
        angles = (0.0,) * (size // 2)
        rope = Rope("interleaved", size, angles, temperature=GROWTH, temperature_length=LENGTH, temperature_start=1)
        return Ropes(rope, None)


class WeightedInput(FeedForward):
    weighted_input = True


ROWS = (
    Architecture(  # text part only
        "llama4", "interleaved", read=_read, attention=ChunkedAttention, feed_forward=WeightedInput,
        attention_scale=True, norms_rotated=True, no_rope_every=4, sliding=Sliding(4, window=8192),
        routing=ExpertGating("sigmoid_of_chosen", False, from_file=True),
    ),
)  # fmt: skip
