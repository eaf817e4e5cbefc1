"""The layers of Gemma 3n: AltUp (arXiv:2301.13310) keeps four residual streams; a layer computes one.

A layer predicts all streams from its input, computes the active stream from its prediction, and corrects all streams by
the prediction error. A low-rank product (LAuReL, arXiv:2411.07501) is added in parallel with attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from localllm.models.layers import LayerRecorder
from localllm.plan import Value

EPS = 1e-5  # minimum mean square of a stream, as in transformers


@dataclass(frozen=True, slots=True)
class AltUpRecorder(LayerRecorder):
    """Records a layer on hidden states (T, streams * width), and the conversion from one stream to all and back."""

    def begin(self, x: Value) -> Value:
        """Return all streams: the first is x, the others are projections of x rescaled to the magnitude of x."""
        builder = self.builder
        recorder, tensors, streams = builder.recorder, builder.tensors, builder.config.streams
        others = tensors.flat("altup_proj.weight", streams - 1, x.width, x.width)
        made = recorder.match(recorder.linear(x, others), x, EPS, streams - 1)
        first = recorder.mix(x, 1, tensors.numbers("first stream", [1.0] + [0.0] * (streams - 1)))
        rest = [float(i == j + 1) for i in range(streams) for j in range(streams - 1)]
        return recorder.mix(made, streams - 1, tensors.numbers("other streams", rest), first)

    def end(self, streams: Value) -> Value:
        """Return the mean of the streams, after projecting all but the first and rescaling them to the first one's
        magnitude.
        """
        builder = self.builder
        recorder, width, count = builder.recorder, builder.config.width, builder.config.streams
        matrices = builder.tensors.flat("altup_unembd_proj.weight", count - 1, width, width)
        first = total = self.stream(streams, 0)
        for number in range(1, count):
            matrix = matrices.part((number - 1) * width, number * width)
            made = recorder.linear(self.stream(streams, number), matrix)
            total = recorder.add(total, recorder.match(made, first, EPS))
        return recorder.scale(total, 1.0 / count)

    def layer(self, x: Value, layer: int) -> Value:
        builder, name = self.builder, f"blk.{layer}."
        config, recorder, tensors, count = builder.config, builder.recorder, builder.tensors, builder.config.streams
        predicts = tensors.matrix(name + "altup_predict_coef.weight", count * count, count)
        modes = self.modes(self.stream(x, config.active_stream), name)
        predicted = recorder.mix(x, count, recorder.linear(modes, predicts), x)
        active = self.stream(predicted, config.active_stream)
        normed = builder.norm(name + "attn_norm", active)
        low = self.low_rank(normed, name)
        mixed = self.attention.mixed(normed, layer)
        if self.selects(layer):
            mixed, low, active, predicted = (recorder.select_rows(value) for value in (mixed, low, active, predicted))
        y = builder.norm(name + "post_attention_norm", self.attention.output(mixed, layer))
        y = recorder.scale(recorder.add(recorder.add(active, y), low), math.sqrt(0.5))
        z = self.feed_forward(builder.norm(name + "ffn_norm", y), layer, y, y)
        y = recorder.add(y, builder.norm(name + "post_ffw_norm", z))
        corrects = tensors.matrix(name + "altup_correct_coef.weight", count, count)
        shares = recorder.linear(self.modes(y, name), corrects, tensors.ones(count))
        off = recorder.add(y, recorder.scale(active, -1.0))
        corrected = recorder.mix(off, 1, shares, predicted)
        scale = tensors.vector(name + "altup_correct_scale.weight", config.width)
        own = recorder.mul(self.stream(corrected, config.active_stream), scale)
        assert self.per_layer is not None
        others = tensors.numbers("all but the first stream", [0.0] + [1.0] * (count - 1))
        return recorder.mix(self.per_layer.branch(own, layer), 1, others, corrected)

    def stream(self, x: Value, number: int) -> Value:
        width = self.builder.config.width
        return self.builder.recorder.slice(x, number * width, (number + 1) * width)

    def modes(self, x: Value, name: str) -> Value:
        """Return values (T, streams) in -1..1, from which the prediction and correction coefficients are computed."""
        builder, config = self.builder, self.builder.config
        router = builder.tensors.matrix(name + "altup_router.weight", config.streams, config.width)
        normed = builder.norm(name + "altup_router_norm", x)
        return builder.recorder.softcap(builder.recorder.linear(normed, router, None, 1.0 / config.width), 1.0)

    def low_rank(self, x: Value, name: str) -> Value:
        """Return x plus the normed product of x with two low-rank matrices."""
        builder, rank = self.builder, self.builder.tensors.height(name + "laurel_l.weight")
        y = builder.linear(name + "laurel_l", x, rank, x.width)
        y = builder.linear(name + "laurel_r", y, x.width, rank)
        return builder.recorder.add(builder.norm(name + "laurel_post_norm", y), x)
