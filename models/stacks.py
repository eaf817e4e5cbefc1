"""Layers that run several times.

Those of HRM-Text (arXiv:2506.21734) are two stacks that run in turn over all rows, and each pass refines what it gave.
A pass reads the sum of what the two gave last. The high stack begins with the embeddings, the low one with one learned
row for all positions. Those of Nanbeige 4.2 run one after the other, and then all again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localllm.models.config import LoopConfig, StackConfig
from localllm.models.errors import ModelError
from localllm.models.layers import LayerRecorder
from localllm.plan import Value

SCALED = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output")


@dataclass(frozen=True, slots=True)
class StackRecorder(LayerRecorder):
    """Records one layer: T rows to T rows; those of a pass begin with a sum, and end with a norm without weights."""

    given: dict[bool, Value] = field(default_factory=dict)  # what the low (False) and the high (True) stack gave last

    def begin(self, x: Value) -> Value:
        start = self.builder.tensors.row("hrm.z_l_init", x.width)
        self.given[True] = x
        self.given[False] = self.builder.recorder.embed(start, positions=True)  # all positions are beyond its end
        return x

    def layer(self, x: Value, layer: int) -> Value:
        builder, stacks = self.builder, self.builder.config.stacks
        assert isinstance(stacks, StackConfig)
        self.check_scales(layer, stacks.block(layer))
        if layer % stacks.layers == 0:
            x = builder.recorder.add(self.given[True], self.given[False])
        x = super(StackRecorder, self).layer(x, layer)
        if (layer + 1) % stacks.layers == 0 and layer + 1 < builder.config.layers:  # the output has a norm of its own
            x = self.given[stacks.high(layer)] = builder.norm("", x)
        return x

    def check_scales(self, layer: int, block: int) -> None:
        """Every pass needs scales of its own if the file has any: it numbers them by layer, as llama.cpp reads them."""
        for name in SCALED:
            own = f"blk.{layer}.{name}.scale"
            if f"blk.{block}.{name}.scale" in self.builder.tensors and own not in self.builder.tensors:
                raise ModelError(f"{own}: the file does not hold this scale; scales count all passes of a block")


class LoopRecorder(LayerRecorder):
    """Records one layer: T rows to T rows; those of a pass may end with the output's norm."""

    def layer(self, x: Value, layer: int) -> Value:
        config = self.builder.config
        x = super().layer(x, layer)
        assert isinstance(config.stacks, LoopConfig)
        if config.stacks.normed and (layer + 1) % config.stacks.layers == 0 and layer + 1 < config.layers:
            x = self.builder.norm(self.builder.row.output_norm, x)
        return x


def stored_name(stacks: StackConfig | LoopConfig, name: str) -> str:
    """The file's name of a tensor of a layer: that of its block. Scales of stacks are numbered by layer."""
    if not name.startswith("blk.") or (name.endswith(".scale") and isinstance(stacks, StackConfig)):
        return name
    layer, of_layer = name.removeprefix("blk.").split(".", 1)
    return f"blk.{stacks.block(int(layer))}.{of_layer}"
