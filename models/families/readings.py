"""Families whose models differ from their rows only in what their files say, or in a number of layers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Literal

from localllm.models.architecture import Architecture, FeedForward
from localllm.models.config import Config
from localllm.models.properties import Properties, Recurrent, Sliding
from localllm.models.reading import Keys, read_general
from localllm.models.reading.attention import read_alibi
from localllm.models.reading.config import read_blocks, read_multipliers
from localllm.models.routing import ExpertGating


def _baichuan(keys: Keys, row: Properties, head: int) -> Config:
    """7B (32 layers) is rotated, 13B (40 layers) has ALiBi."""
    config = read_general(keys, row, head)
    alibi = read_alibi(keys, 8.0) if config.layers == 40 else 0.0
    return replace(config, alibi=alibi, rotated=(config.layers == 32,) * config.layers)


def _exaone4(keys: Keys, row: Properties, head: int) -> Config:
    """Only the model with 64 layers has sliding windows."""
    blocks, heads = read_blocks(keys, head)
    return read_general(keys, row if blocks - heads == 64 else replace(row, sliding=None), head)


def _gptneox(keys: Keys, row: Properties, head: int) -> Config:
    return replace(read_general(keys, row, head), parallel=keys.flag("use_parallel_residual", True))


def _granite(keys: Keys, row: Properties, head: int) -> Config:
    """Granite 4 disables rope by a flag of its scaling."""
    config = read_general(keys, row, head)
    return config if keys.flag("rope.scaling.finetuned", True) else replace(config, rotated=(False,) * config.layers)


def _granite_swa(keys: Keys, row: Properties, head: int) -> Config:
    config = read_general(keys, row, head)
    return replace(config, rotated=keys.flags("attention.rope_pattern", config.layers, True))


class _FusedSharedExpert(FeedForward):
    """The shared expert's up matrix contains gate and up."""

    def form(self, layer: int, suffix: str, inner: int) -> Literal["gated", "fused", "plain"]:
        return "fused" if suffix == self.parallel else super().form(layer, suffix, inner)


def _jais(keys: Keys, row: Properties, head: int) -> Config:
    """Scores are divided by the head width instead of its square root."""
    config = read_general(keys, row, head)
    return replace(config, attention_scale=tuple([1.0 / size for size in config.head_dim]))


def _minicpm(keys: Keys, row: Properties, head: int) -> Config:
    config = read_general(keys, row, head)
    defaults = 12.0, 1.4 / math.sqrt(config.layers), 256 / config.width
    embedding, residual, logits = read_multipliers(keys, row.multipliers, *defaults)
    return replace(config, embedding_scale=embedding, residual_scale=residual, logit_scale=logits)


def _minicpm3(keys: Keys, row: Properties, head: int) -> Config:
    """The GGUF's multipliers are ignored."""
    config = read_general(keys, row, head)
    residual, logits = 1.4 / math.sqrt(config.layers), 256 / config.width
    return replace(config, embedding_scale=12.0, residual_scale=residual, logit_scale=logits)


_granites = partial(
    Architecture, rope_style="interleaved", multipliers="divided", attention_scale=True,
    routing=ExpertGating("softmax", True),
)  # fmt: skip
ROWS = (
    Architecture("baichuan", "interleaved", read=_baichuan, ignored=("attn_output.bias",)),
    Architecture(
        "exaone4", "neox", read=_exaone4, qk_norm=True, attention_norm="", ffn_norm="", post_norms=True,
        sliding=Sliding(4, window=4096, only_rope=True),
    ),
    Architecture("gptneox", "neox", "gelu", read=_gptneox, norm="layer", ffn="plain"),  # Pythia, GPT-NeoX 20B
    _granites("granite", read=_granite),
    _granites("granite_swa", read=_granite_swa, feed_forward=_FusedSharedExpert, sliding=Sliding(0)),
    _granites("granitehybrid", read=_granite, recurrent=Recurrent("mamba2", "without_heads")),  # Granite 4.0 H
    Architecture("jais", None, read=_jais, norm="layer", alibi=0.0),
    _granites("minicpm", read=_minicpm),  # MiniCPM 1 and 2
    Architecture("minicpm3", "neox", read=_minicpm3, cache="latent"),
)  # fmt: skip
