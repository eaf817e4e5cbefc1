"""Kimi K3: each block reads a mix of the residual stream and saved earlier hidden states (checkpoints).

Every n-th layer saves its input as a checkpoint and restarts the residual stream from its attention output. The input
of a block is the mean of all checkpoints and the stream, weighted by scores (`plan.Blend`). The activation SiTU caps
gate and up differently; a plan has one cap, so up is divided by the ratio of the caps and the product multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from localllm.models.architecture import Architecture, FeedForward, LayerRecorder
from localllm.models.config import Config, ExpertConfig
from localllm.models.properties import QKV_EXTRAS, Properties, Recurrent
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_FACTOR, MAX_LAYERS
from localllm.models.routing import FILE_SIGMOID
from localllm.plan import Stack, Value


@dataclass(frozen=True, slots=True)
class KimiConfig:
    interval: int  # interval of layers at which the layer input is saved for later layers; 0: never
    ratio: float  # cap of up divided by cap of gate


def _read(keys: Keys, row: Properties, head: int) -> Config:
    gate, up = (keys.real(f"activation.{name}", 1e-3, MAX_FACTOR) for name in ("situ_beta", "situ_linear_beta"))
    config = read_general(keys.having(swiglu_clamp_exp=gate, swiglu_clamp_shexp=gate), row, head)
    own = KimiConfig(keys.integer("attn_res.block_size", 0, MAX_LAYERS), up / gate)
    experts = config.experts and replace(config.experts, scale=config.experts.scale * own.ratio)
    return replace(config, experts=experts, own=own)


@dataclass(frozen=True, slots=True)
class CheckpointRecorder(LayerRecorder):
    """Records one layer, from residual stream to residual stream."""

    # all checkpoints so far, concatenated; empty before the first
    kept: list[Value] = field(default_factory=list)

    def end(self, x: Value) -> Value:
        return self.blend(x, "output_res_score")

    def layer(self, x: Value, layer: int) -> Value:
        if not self.builder.own(KimiConfig).interval:
            return LayerRecorder.layer(self, x, layer)
        builder, recorder, name = self.builder, self.recorder, f"blk.{layer}."
        read, starts = self.blend(x, name + "attn_res_score"), layer % builder.own(KimiConfig).interval == 0
        if starts:
            self.kept[:] = [recorder.concat(self.kept[0], x) if self.kept else x]
        (mixer,) = self.mixers(layer)
        mixed = mixer.mixed(builder.norm(name + "attn_norm", read), layer)
        if self.selects(layer):
            mixed, x, self.kept[0] = (recorder.select_rows(value) for value in (mixed, x, self.kept[0]))
        y = mixer.output(mixed, layer)
        x = y if starts else recorder.add(x, y)
        read = self.blend(x, name + "ffn_res_score")
        return recorder.add(x, self.feed_forward(builder.norm(name + "ffn_norm", read), layer, x, x))

    def blend(self, x: Value, name: str) -> Value:
        if not self.kept:
            return x
        weight = self.tensors.vector(f"{name}.weight", self.config.width)
        return self.recorder.blend(self.kept[0], x, weight, self.config.eps)


class SituFeedForward(FeedForward):
    """Divides up by the ratio of the caps, and multiplies the product by it, as the scale of the experts does."""

    def gated(self, gate: Value, up: Value, layer: int) -> Value:
        recorder, ratio = self.recorder, self.builder.own(KimiConfig).ratio
        if ratio == 1.0:
            return super().gated(gate, up, layer)
        return recorder.scale(super().gated(gate, recorder.scale(up, 1.0 / ratio), layer), ratio)

    def gate_and_up(self, name: str, width: int, experts: ExpertConfig) -> tuple[Stack, Stack]:
        gate, up = super().gate_and_up(name, width, experts)
        ratio = self.builder.own(KimiConfig).ratio
        if ratio == 1.0:
            return gate, up
        assert up.scale is None, "scaled only for this unit"
        scales = self.tensors.numbers(f"{1 / ratio:.9g}({experts.count})", [1 / ratio] * experts.count)
        return gate, replace(up, scale=scales)


ROWS = (
    Architecture(
        "kimi-k3", None, read=_read, layers=CheckpointRecorder, feed_forward=SituFeedForward, gated="sigmoid",
        cache="latent", limits="situ", ignored=(*QKV_EXTRAS, "attn_output.scale"),
        recurrent=Recurrent("kda", "without_heads", bounded="negative"), routing=FILE_SIGMOID,
    ),
)  # fmt: skip
