"""Qwen 1 to 3.5."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from localllm.models.architecture import Architecture, Attention, Output
from localllm.models.config import Config
from localllm.models.properties import Properties, Recurrent
from localllm.models.reading import Keys, read_general
from localllm.models.routing import SCALED_SOFTMAX
from localllm.plan import Value

_FEW = 32  # columns of a matrix of zeros; any small number works


def _read_1(keys: Keys, row: Properties, head: int) -> Config:
    """Read Qwen 1, whose `feed_forward_length` counts gate and up together."""
    config = read_general(keys, row, head)
    return replace(config, ffn_width=tuple([width // 2 for width in config.ffn_width]))


def _read_2vl(keys: Keys, row: Properties, head: int) -> Config:
    """Read Qwen 2 VL, whose GGUFs may store 0 as the epsilon of the norms."""
    eps = keys.real("attention.layer_norm_rms_epsilon", 0.0, 1.0) or 1e-6
    return read_general(keys.having(attention__layer_norm_rms_epsilon=eps), row, head)


class GatedAttention(Attention):
    """attn_q also contains the output gate of each head, after its query."""

    def gated(self, x: Value, mixed: Value, layer: int) -> Value:
        return self.recorder.glu(self.half(x, layer, 1), mixed, "sigmoid")

    def projection(self, name: str, x: Value, size: int, layer: int) -> Value:
        return self.half(x, layer, 0) if name.endswith("_q") else super().projection(name, x, size, layer)

    def half(self, x: Value, layer: int, which: int) -> Value:
        """Return the queries (0) or the output gate (1)."""
        builder, config, name = self.builder, self.config, f"blk.{layer}.attn_q"
        size = config.head_dim[layer]
        of, part = 2 * size * config.heads[layer], (2 * size, which * size, (which + 1) * size)
        weight = builder.tensors.matrix(f"{name}.weight", of, config.width).rows_of_each(*part)
        bias = builder.tensors.optional(f"{name}.bias", of)
        return builder.recorder.linear(x, weight, bias and bias.rows_of_each(*part), builder.scale(name))


class LastTokens(Output):
    """The output matrix covers the last token ids of the vocabulary; the others are never generated."""

    def rows(self, name: str) -> int:
        vocabulary = self.config.vocabulary
        return min(vocabulary, self.tensors.height(f"{name}.weight") or vocabulary)

    def logits(self, x: Value, name: str) -> Value:
        logits, recorder, tensors = super().logits(x, name), self.recorder, self.tensors
        count, few = self.config.vocabulary - logits.width, min(_FEW, x.width)
        if not count:
            return logits
        nothing = tensors.constant_rows(f"zeros({few})", [0.0] * few, count)
        bias = tensors.numbers(f"-inf({count})", [-math.inf] * count)
        return recorder.concat(recorder.linear(recorder.slice(x, 0, few), nothing, bias), logits)


_gated = partial(
    Architecture, rope_style="neox", attention=GatedAttention, ffn_scales=True, qk_norm=True,
    ffn_norm="post_attention_norm", recurrent=Recurrent("delta_net", "interval"),
)  # fmt: skip
ROWS = (
    Architecture("qwen", "neox", read=_read_1),
    Architecture("qwen2vl", "neox", read=_read_2vl, ignored=("output.bias",), axes="sections"),
    _gated("qwen35", axes="interleaved"),
    _gated("qwen35moe", routing=SCALED_SOFTMAX, axes="interleaved"),
    _gated("qwen3next", ignored=("attn_qkv.scale", "attn_gate.scale", "ssm_out.scale"), routing=SCALED_SOFTMAX),
    # the language model of Qwen3-TTS, which generates speech codes from text
    Architecture("qwen3tts", "neox", output=LastTokens, qk_norm=True),
)  # fmt: skip
