"""Layers that run several times.

HRM-Text (arXiv:2506.21734) alternates two stacks over all tokens; each pass refines the last output of its stack. A
pass reads the sum of the last outputs of both stacks. Initially, the high stack's output is the token embeddings, and
the low stack's output is one learned vector for all positions. Nanbeige 4.2 repeats all layers in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from localllm.models.architecture import Architecture, LayerRecorder
from localllm.models.config import Config
from localllm.models.errors import ModelError
from localllm.models.properties import Properties
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_LAYERS
from localllm.plan import Value

SCALED = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """Two alternating stacks of layers: `low` passes of the low stack, then one pass of the high stack, repeatedly.

    Each pass has its own KV cache, so layers are counted over all passes. The GGUF contains the blocks of the low
    stack, numbered from 0, then the blocks of the high stack.
    """

    layers: int  # layers per stack
    low: int  # passes of the low stack before each pass of the high stack

    def high(self, layer: int) -> bool:
        """Return whether the layer belongs to a pass of the high stack."""
        return layer // self.layers % (self.low + 1) == self.low

    def block(self, layer: int) -> int:
        """Return the block number of the layer's tensors."""
        return layer % self.layers + (self.layers if self.high(layer) else 0)


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """All layers run several times, each time with their own KV cache; layers are counted over all passes."""

    layers: int  # number of layers in the GGUF
    normed: bool  # the output norm is also applied between passes


def _read_stacks(keys: Keys, row: Properties, head: int) -> Config:
    config = read_general(keys, row, head)
    own, high, low = (keys.integer(f"hrm.{key}", 1, MAX_LAYERS) for key in ("layers_per_stack", "h_cycles", "l_cycles"))
    if own * high * (low + 1) != config.layers:
        raise ModelError(
            f"{keys.prefix}block_count: expected hrm.layers_per_stack {own} * hrm.h_cycles {high} * (hrm.l_cycles "
            f"{low} + 1) = {own * high * (low + 1)} layers of all passes, found {config.layers}"
        )
    return replace(config, own=StackConfig(own, low))


def _read_loops(keys: Keys, row: Properties, head: int) -> Config:
    blocks = keys.integer("block_count", 1, MAX_LAYERS)
    passes = keys.integer("num_loops", 1, MAX_LAYERS // blocks, default=1)
    config = read_general(keys.having(block_count=blocks * passes), row, head)
    normed = passes > 1 and not keys.flag("skip_loop_final_norm", False)
    return replace(config, own=LoopConfig(config.layers // passes, normed))


def _of_block(name: str, block: Callable[[int], int]) -> str:
    """Return the name of a layer's tensor with the number of its block."""
    if not name.startswith("blk."):
        return name
    layer, of_layer = name.removeprefix("blk.").split(".", 1)
    return f"blk.{block(int(layer))}.{of_layer}"


@dataclass(frozen=True, slots=True)
class StackRecorder(LayerRecorder):
    """Records one layer; a pass of a stack begins with a sum and ends with a norm without weights."""

    given: dict[bool, Value] = field(default_factory=dict)  # last output of the low (False) and the high (True) stack

    @staticmethod
    def stored(config: Config, name: str) -> str:
        own = config.own
        assert isinstance(own, StackConfig)
        return name if name.endswith(".scale") else _of_block(name, own.block)  # scales are numbered by layer

    def begin(self, x: Value) -> Value:
        start = self.tensors.row("hrm.z_l_init", x.width)
        self.given[True] = x
        # positions past the table's end read its last row
        self.given[False] = self.recorder.embed(start, positions=True)
        return x

    def layer(self, x: Value, layer: int) -> Value:
        builder, stacks = self.builder, self.builder.own(StackConfig)
        self.check_scales(layer, stacks.block(layer))
        if layer % stacks.layers == 0:
            x = builder.recorder.add(self.given[True], self.given[False])
        x = LayerRecorder.layer(self, x, layer)
        # the last pass is followed by the output norm instead
        if (layer + 1) % stacks.layers == 0 and layer + 1 < builder.config.layers:
            x = self.given[stacks.high(layer)] = builder.norm("", x)
        return x

    def check_scales(self, layer: int, block: int) -> None:
        """Raise ModelError if only some passes of a block have scales; GGUFs number scales by
        layer, as in llama.cpp."""
        for name in SCALED:
            own = f"blk.{layer}.{name}.scale"
            if f"blk.{block}.{name}.scale" in self.tensors and own not in self.tensors:
                raise ModelError(f"{own}: this scale is missing; scales count all passes of a block")


class LoopRecorder(LayerRecorder):
    """Records one layer; a pass may end with the output norm."""

    @staticmethod
    def stored(config: Config, name: str) -> str:
        own = config.own
        assert isinstance(own, LoopConfig)
        return _of_block(name, lambda layer: layer % own.layers)

    def layer(self, x: Value, layer: int) -> Value:
        own, x = self.builder.own(LoopConfig), super().layer(x, layer)
        last = (layer + 1) % own.layers == 0 and layer + 1 < self.config.layers
        return self.builder.norm(self.builder.row.output_norm, x) if own.normed and last else x


ROWS = (
    Architecture(  # HRM-Text, DFM Mimir
        "hrm_text", "neox", read=_read_stacks, layers=StackRecorder, ignored=("attn_gate.scale",), norm_weights=False,
        gated="sigmoid", multipliers="divided",
    ),
    Architecture("nanbeige", "interleaved", read=_read_loops, layers=LoopRecorder, ffn_scales=True),
)  # fmt: skip
