"""The plan itself: operations in order, the values they make, and the cache layers.

Properties of a whole plan are computed from its operations: its weights, what a row reads, who uses a value.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from localllm.plan.attention import Attention
from localllm.plan.batch import BLOCK
from localllm.plan.fused import flattened
from localllm.plan.matrix_scan import WkvLayer
from localllm.plan.operation import Operation, Read
from localllm.plan.operations import Embed, Send
from localllm.plan.recurrence import RowLayer, ScanLayer, StateLayer
from localllm.plan.values import Value
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """The cache of an attention layer, or of its indexer, per token."""

    kv_heads: int
    head_dim: int  # width of a key
    value_dim: int  # 0: an indexer's keys only
    window: int = 0  # positions that a row sees; 0: all
    every: int = 1  # one cache row per `every` positions (a pool), at the pool's last position
    selected: int = 0  # maximum number of positions that a row reads; 0: all visible ones
    whole: bool = False  # selected positions come as whole cache blocks, except the last block
    prefix: bool = False  # values are the first numbers of the keys
    pooled: bool = False  # holds rows of pools, or is read together with a layer that does

    @property
    def gathered(self) -> bool:
        """Whether each row reads its own list of positions or pools, instead of all visible ones."""
        return self.pooled or self.selected > 0


def rows_of_block(every: int) -> int:
    """Return the number of rows of a cache block with one row per `every` positions, at least 1."""
    return max(1, BLOCK // every)


Store = CacheLayer | RowLayer | StateLayer | ScanLayer | WkvLayer


@dataclass(frozen=True, slots=True)
class Plan:
    """Operations in order; `logits` is the value (L, vocabulary) that a step returns.

    `rewrites.split` makes one plan per device from a whole plan; only one of them makes the logits. A plan that begins
    with a Receive reads values that another plan made.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    layers: tuple[Store, ...]
    logits: Value
    starts: tuple[int, ...] = ()  # first operation of each layer, and of the output after the last layer
    # file tensors of the weights, and tensors whose numbers are stored in operations
    tensors: frozenset[str] = frozenset()
    hidden: Value | None = None  # rows that next-token heads read
    encodes: bool = False  # stage 0 runs on a sequence's encoder text, stage 1 on the rows after it

    @property
    def window(self) -> int:
        """The largest window of a layer; 0 if no layer has one."""
        return max((layer.window for layer in self.layers), default=0)

    @property
    def causal(self) -> bool:
        """Whether no row reads a later one, so that a sequence may be divided into several batches."""
        return all(op.causal for op in flattened(self.operations) if isinstance(op, Attention))

    @property
    def attention_layers(self) -> tuple[CacheLayer, ...]:
        """The layers that hold keys and values."""
        return tuple([layer for layer in self.layers if isinstance(layer, CacheLayer)])

    def attention_layer(self, number: int) -> CacheLayer:
        """Return the cache layer that an attention operation names."""
        layer = self.layers[number]
        assert isinstance(layer, CacheLayer)
        return layer

    @property
    def matrices(self) -> dict[str, Weight]:
        """Every matrix by name, in order of first use."""
        return {weight.name: weight for op in self.operations for weight in op.matrices}

    @property
    def weights(self) -> dict[str, Weight]:
        """Every matrix and vector by name, in order of first use; backends hold these in memory."""
        return {weight.name: weight for op in self.operations for weight in (*op.matrices, *op.vectors)}

    @property
    def lookups(self) -> tuple[Read, ...]:
        """The tables that stay in the file, and the part of each that a row reads."""
        return tuple([read for op in self.operations for read in op.lookups])

    @property
    def reads(self) -> tuple[Read, ...]:
        """The parts of weights that a row reads, operation by operation; with an encoder, a row after the text."""
        operations = self.operations[self.stages[-1].start :] if self.encodes else self.operations
        return tuple([read for op in operations for read in op.reads])

    @property
    def uses(self) -> Counter[int]:
        """How often each value is read, by index; the caller reads the logits once."""
        uses = Counter(value.index for op in self.operations for value in op.inputs)
        uses[self.logits.index] += 1
        return uses

    @property
    def stages(self) -> tuple[range, ...]:
        """The operation numbers of each stage; a stage ends with a Send or with the plan."""
        ends = [number + 1 for number, op in enumerate(self.operations) if isinstance(op, Send)]
        if not ends or ends[-1] < len(self.operations):
            ends.append(len(self.operations))
        return tuple([range(start, end) for start, end in pairwise([0, *ends])])

    @property
    def input_vocabulary(self) -> int:
        """The number of tokens that the plan can embed; 2^31 if it embeds none."""
        return min(
            (op.table.shape[0] for op in self.operations if isinstance(op, Embed) and not op.positions), default=1 << 31
        )
