"""Families with one small change to the mixture of experts each."""

from __future__ import annotations

from dataclasses import replace

from localllm.models.architecture import Architecture, FeedForward, LayerRecorder
from localllm.models.config import Config, ExpertConfig
from localllm.models.errors import ModelError
from localllm.models.properties import Properties, Sliding
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_FACTOR
from localllm.models.reading.config import read_multipliers, read_softcap
from localllm.models.routing import SCALED_SIGMOID, SOFTMAX, ExpertGating
from localllm.plan import Stack, Value


def _cohere2moe(keys: Keys, row: Properties, head: int) -> Config:
    """Read a model: RMS norms if the GGUF has an epsilon for them; the leading dense layers use RoPE too."""
    if keys.real("attention.layer_norm_rms_epsilon", 0.0, 1.0, default=0.0) > 0.0:
        row = replace(row, norm="rms")
    config = read_general(keys, row, head)
    if not any(config.windows):
        return config
    lead = keys.integer("leading_dense_block_count", 0, config.layers, default=0)
    return replace(config, rotated=(True,) * lead + config.rotated[lead:])


class CohereFeedForward(FeedForward):
    sum_scale = 0.5


COHERE2MOE = Architecture(  # North
    "cohere2moe", "interleaved", read=_cohere2moe, feed_forward=CohereFeedForward, ffn_scales=True, norm="layer",
    ffn_norm="attn_norm", parallel=True, multipliers="multiplied", sliding=Sliding(4, first=True, only_rope=True),
    routing=SCALED_SIGMOID,
)  # fmt: skip


class ArcticFeedForward(FeedForward):
    """A dense feed-forward runs in parallel with the experts, which have their own norm of the layer's input."""

    parallel = ""

    def expert_input(self, name: str, x: Value, before: Value) -> Value:
        return self.builder.norm(name + "ffn_norm_exps", before)


ARCTIC = Architecture(
    "arctic", "interleaved", feed_forward=ArcticFeedForward, ignored=("attn_output.bias",), routing=SOFTMAX,
)  # fmt: skip


class SmallThinkerFeedForward(FeedForward):
    """The router reads the layer's input without a norm."""

    def router_input(self, x: Value, before: Value) -> Value:
        return before


SMALLTHINKER = Architecture(
    "smallthinker", "neox", feed_forward=SmallThinkerFeedForward, sliding=Sliding(4, first=True, only_rope=True),
    routing=ExpertGating("softmax", True, from_file="gating", activation="relu"),
)  # fmt: skip


def _grovemoe(keys: Keys, row: Properties, head: int) -> Config:
    """Read a model; `own` is the number of experts that share an adjugate expert, and the scale of the adjugates."""
    config = read_general(keys, row, head)
    if config.experts is None:
        return config
    count = config.experts.count
    group = keys.integer("experts_per_group", 1, count)
    if count % group:
        raise ModelError(f"{keys.prefix}experts_per_group: expected a divisor of expert_count {count}, found {group}")
    return replace(config, own=(group, keys.real("expert_group_scale", 0.0, MAX_FACTOR)))


class GroveFeedForward(FeedForward):
    """Each group of experts shares a small adjugate expert (Grove MoE, arXiv:2508.07785), which reads the same input.
    It is added once for each selected expert of its group, with that expert's routing weight.
    """

    def added(self, layer: int, y: Value, x: Value, router: Value, experts: ExpertConfig) -> Value:
        recorder, tensors, name = self.recorder, self.tensors, f"blk.{layer}.ffn_"
        inner, (group, scale) = tensors.height(f"{name}up_chexps.weight"), self.builder.own(tuple)
        sizes = {"gate": (inner, x.width), "up": (inner, x.width), "down": (x.width, inner)}
        gate, up, down = (
            Stack(tensors.shared_stack(f"{name}{part}_chexps.weight", experts.count, group, *size), shared=group)
            for part, size in sizes.items()
        )
        own = recorder.experts(
            x, router, gate, up, down, experts.used, experts.gating, experts.normalize, scale, experts.activation
        )
        return recorder.add(y, own)


GROVEMOE = Architecture(
    "grovemoe", "neox", read=_grovemoe, feed_forward=GroveFeedForward, qk_norm=True, routing=SOFTMAX
)


def _grok(keys: Keys, row: Properties, head: int) -> Config:
    config = read_general(keys, row, head)
    scale = keys.real("attention.output_scale", 0.0, MAX_FACTOR, default=0.0)
    embedding, residual, logits = read_multipliers(keys, row.multipliers, 78.38367176906169, logit=0.5773502691896257)
    return replace(
        config,
        attention_scale=(scale,) * config.layers if scale else config.attention_scale,
        attention_softcap=read_softcap(keys, "attn_logit_softcapping", 30.0),
        embedding_scale=embedding,
        residual_scale=residual,
        logit_scale=logits,
    )


class GrokFeedForward(FeedForward):
    parallel = ""
    sum_scale = 0.5**0.5


class GrokLayers(LayerRecorder):
    def post_norm(self, name: str, y: Value) -> Value:
        old = f"{name}.weight" in self.tensors
        return self.builder.norm(name if old else name.replace("layer_output_norm", "post_ffw_norm"), y)


GROK = Architecture(  # Grok 1 and 2
    "grok", "neox", "gelu", read=_grok, layers=GrokLayers, feed_forward=GrokFeedForward, post_norms=True,
    attention_post_norm="attn_output_norm", ffn_post_norm="layer_output_norm", logit_softcap=0.0,
    multipliers="multiplied", routing=ExpertGating("softmax", True, activation="gelu"),
)  # fmt: skip


ROWS = (ARCTIC, COHERE2MOE, GROK, GROVEMOE, SMALLTHINKER)
