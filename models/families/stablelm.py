"""StableLM. The layers of StableLM 2 12B are parallel: its GGUFs have no norm before the feed-forward, which reads what
attention reads.
"""

from __future__ import annotations

from dataclasses import replace

from localllm.models.architecture import Architecture, LayerRecorder
from localllm.plan import Value


class StableLmLayers(LayerRecorder):
    def layer(self, x: Value, layer: int) -> Value:
        own, row = self.builder, self.builder.row
        names = (f"blk.{n}.{row.ffn_norm}.{part}" for n in range(own.config.layers) for part in ("weight", "bias"))
        if any(name in own.tensors for name in names):
            return super().layer(x, layer)
        own = replace(own, config=replace(own.config, parallel=True), row=replace(row, ffn_norm=row.attention_norm))
        return LayerRecorder.layer(replace(self, builder=own), x, layer)


ROWS = (Architecture("stablelm", "neox", layers=StableLmLayers, norm="layer"),)
