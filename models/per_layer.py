"""Per-layer embeddings (Gemma 3n and 4): a second embedding table with one slice per layer, which gates a branch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from localllm.models.builder import Builder
from localllm.plan import Rows, Value


@dataclass(frozen=True, slots=True)
class PerLayer:
    """The concatenated slices of all layers, (T, layers * slice width), for all tokens or the selected ones."""

    builder: Builder
    inputs: dict[Rows, Value] = field(default_factory=dict)

    def begin(self, x: Value) -> None:
        """Record the slices: the token's embedding in the second table plus a projection of its embedding x."""
        builder = self.builder
        config, recorder, tensors = builder.config, builder.recorder, builder.tensors
        wide = config.layers * config.per_layer_width
        rows = recorder.embed(tensors.matrix("per_layer_token_embd.weight", config.vocabulary, wide))
        rows = recorder.scale(rows, math.sqrt(config.per_layer_width))
        projection = tensors.matrix("per_layer_model_proj.weight", wide, config.width)
        projected = recorder.linear(x, projection, None, 1.0 / math.sqrt(config.width))
        norm = tensors.vector("per_layer_proj_norm.weight", config.per_layer_width)
        projected = recorder.rms_norm(projected, norm, config.eps, config.layers)
        self.inputs["batch"] = recorder.scale(recorder.add(projected, rows), math.sqrt(0.5))

    def branch(self, x: Value, layer: int) -> Value:
        """Return the branch's contribution to a layer's hidden states x."""
        builder, name, width = self.builder, f"blk.{layer}.", self.builder.config.per_layer_width
        if x.rows not in self.inputs:
            self.inputs[x.rows] = builder.recorder.select_rows(self.inputs["batch"])
        own = builder.recorder.slice(self.inputs[x.rows], layer * width, (layer + 1) * width)
        gate = builder.linear(name + "inp_gate", x, width, x.width)
        activation = builder.row.activation
        assert activation != "xielu", "gates nothing"
        hidden = builder.recorder.glu(gate, own, activation)
        return builder.norm(name + "post_norm", builder.linear(name + "proj", hidden, x.width, width))
