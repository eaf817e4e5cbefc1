"""Layers that run several times.

HRM-Text (arXiv:2506.21734) alternates two stacks over all tokens; each pass refines the last output of its stack. A
pass reads the sum of the last outputs of both stacks. Initially, the high stack's output is the token embeddings, and
the low stack's output is one learned vector for all positions. Nanbeige 4.2 repeats all layers in order.
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
    """Records one layer; a pass of a stack begins with a sum and ends with a norm without weights."""

    given: dict[bool, Value] = field(default_factory=dict)  # last output of the low (False) and the high (True) stack

    def begin(self, x: Value) -> Value:
        start = self.builder.tensors.row("hrm.z_l_init", x.width)
        self.given[True] = x
        # positions past the table's end read its last row
        self.given[False] = self.builder.recorder.embed(start, positions=True)
        return x

    def layer(self, x: Value, layer: int) -> Value:
        builder, stacks = self.builder, self.builder.config.stacks
        assert isinstance(stacks, StackConfig)
        self.check_scales(layer, stacks.block(layer))
        if layer % stacks.layers == 0:
            x = builder.recorder.add(self.given[True], self.given[False])
        x = super(StackRecorder, self).layer(x, layer)
        # the last pass is followed by the output norm instead
        if (layer + 1) % stacks.layers == 0 and layer + 1 < builder.config.layers:
            x = self.given[stacks.high(layer)] = builder.norm("", x)
        return x

    def check_scales(self, layer: int, block: int) -> None:
        """Raise ModelError if only some passes of a block have scales; GGUFs number scales by
        layer, as in llama.cpp."""
        for name in SCALED:
            own = f"blk.{layer}.{name}.scale"
            if f"blk.{block}.{name}.scale" in self.builder.tensors and own not in self.builder.tensors:
                raise ModelError(f"{own}: the file does not hold this scale; scales count all passes of a block")


class LoopRecorder(LayerRecorder):
    """Records one layer; a pass may end with the output norm."""

    def layer(self, x: Value, layer: int) -> Value:
        config = self.builder.config
        x = super().layer(x, layer)
        assert isinstance(config.stacks, LoopConfig)
        if config.stacks.normed and (layer + 1) % config.stacks.layers == 0 and layer + 1 < config.layers:
            x = self.builder.norm(self.builder.row.output_norm, x)
        return x


def stored_name(stacks: StackConfig | LoopConfig, name: str) -> str:
    """Return the name of a tensor in the GGUF: layers map to blocks, except that scales of stacks are numbered by
    layer.
    """
    if not name.startswith("blk.") or (name.endswith(".scale") and isinstance(stacks, StackConfig)):
        return name
    layer, of_layer = name.removeprefix("blk.").split(".", 1)
    return f"blk.{stacks.block(int(layer))}.{of_layer}"
