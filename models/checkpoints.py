"""The layers of Kimi K3: each block reads a mix of the residual stream and saved earlier hidden states (checkpoints).

Every n-th layer saves its input as a checkpoint and restarts the residual stream from its attention output. The input
of a block is the mean of all checkpoints and the stream, weighted by scores (`plan.Blend`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localllm.models.layers import LayerRecorder
from localllm.plan import Value


@dataclass(frozen=True, slots=True)
class CheckpointRecorder(LayerRecorder):
    """Records one layer, from residual stream to residual stream."""

    # all checkpoints so far, concatenated; empty before the first
    kept: list[Value] = field(default_factory=list)

    def end(self, x: Value) -> Value:
        return self.blend(x, "output_res_score")

    def layer(self, x: Value, layer: int) -> Value:
        builder, recorder, name = self.builder, self.builder.recorder, f"blk.{layer}."
        read, starts = self.blend(x, name + "attn_res_score"), layer % builder.config.checkpoint_interval == 0
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
        builder = self.builder
        weight = builder.tensors.vector(f"{name}.weight", builder.config.width)
        return builder.recorder.blend(self.kept[0], x, weight, builder.config.eps)
