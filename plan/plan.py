"""The plan: operations in order, their values, and the cache layers.

Properties of a whole plan are derived from its operations: its weights, the weights read per token, the readers of a
value.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from localllm.plan.attention import Attention, Rotate
from localllm.plan.batch import BLOCK
from localllm.plan.fused import flattened
from localllm.plan.operation import Operation, Read
from localllm.plan.operations import Embed, Send
from localllm.plan.recurrence import RowLayer, ScanLayer, StateLayer
from localllm.plan.values import Value
from localllm.plan.weights import Weight
from localllm.plan.wkv import WkvLayer


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """The KV cache of an attention layer, or the key cache of its indexer, per token."""

    kv_heads: int
    head_dim: int  # key width
    value_dim: int  # value width; 0: an indexer's keys only
    window: int = 0  # window size; 0: full attention
    every: int = 1  # one cache entry per `every` positions (a pool), at the pool's last position
    selected: int = 0  # maximum number of positions that a token reads; 0: all visible positions
    whole: bool = False  # positions are selected as whole cache blocks, except the last block
    prefix: bool = False  # values are the first elements of the keys
    pooled: bool = False  # contains entries of pools, or is read together with a layer that does

    @property
    def gathered(self) -> bool:
        """Whether each token reads a separate list of positions or pools instead of all visible positions."""
        return self.pooled or self.selected > 0


def rows_of_block(every: int) -> int:
    """Return the number of entries in a cache block with one entry per `every` positions, at least 1."""
    return max(1, BLOCK // every)


Store = CacheLayer | RowLayer | StateLayer | ScanLayer | WkvLayer


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The values of a multi-token-prediction head, which is a stage of its model's plan; heads are the last stages.

    The stage receives `hidden` states and evaluates the tokens after them. `following` is the input of the next draft.
    """

    hidden: Value  # the hidden states that it receives (T, width): the model's, or the previous head's
    logits: Value  # of the token after next (L, vocabulary)
    following: Value  # the head's hidden states (L, width), or (T, width) if the next head receives them
    vocabulary: int = 0  # the model's number of tokens, if the logits are for some of them
    # It reads the model's cache layers and adds none, so that it evaluates only the newest token, at a fixed position.
    shares_cache: bool = False
    tokens: NDArray[np.int32] | None = field(default=None, compare=False)  # the token of each logit; None: all in order

    def spread(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits of a row for the model's tokens (vocabulary,), -inf for tokens without logits."""
        if self.tokens is None:
            return logits
        result = np.full(self.vocabulary, -np.inf, np.float32)
        result[self.tokens] = logits
        return result


@dataclass(frozen=True, slots=True)
class Plan:
    """Operations in order; `logits` is the value (L, vocabulary) that a step returns.

    `rewrites.split` divides a whole plan into one plan per device; only one of them computes the logits. A plan that
    begins with a Receive reads values of another plan.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    layers: tuple[Store, ...]
    logits: Value
    starts: tuple[int, ...] = ()  # index of the first operation of each layer, and of the output after the last layer
    # names of the weights' tensors, and of tensors whose values are constants in operations
    tensors: frozenset[str] = frozenset()
    hidden: Value | None = None  # hidden states for multi-token-prediction heads
    normed: Value | None = None  # hidden states after the output norm, one row per row of logits
    encodes: bool = False  # encoder-decoder: stage 0 runs on encoder tokens, stage 1 on decoder tokens
    drafts: tuple[DraftHead, ...] = ()  # the multi-token-prediction heads, each a stage after the model's
    media: int = 0  # width of the embeddings of media tokens, whose ids are negative; 0: takes none

    @property
    def window(self) -> int:
        """The largest sliding window of a layer; 0 without sliding-window layers."""
        return max((layer.window for layer in self.layers), default=0)

    @property
    def causal(self) -> bool:
        """Whether attention is causal, so that a sequence may be divided into several batches."""
        return all(op.causal for op in flattened(self.operations) if isinstance(op, Attention))

    @property
    def spans(self) -> bool:
        """Whether the tokens of a span see each other, so that a span is never divided into several batches."""
        return any(op.spans for op in flattened(self.operations) if isinstance(op, Attention))

    @property
    def axes(self) -> int:
        """The number of positions per token that rotations with several axes read; 0 without such rotations."""
        ropes = [op.rope for op in flattened(self.operations) if isinstance(op, Rotate)]
        return max((1 + max(rope.axes) for rope in ropes if rope.axes), default=0)

    @property
    def attention_layers(self) -> tuple[CacheLayer, ...]:
        """The layers with a KV cache."""
        return tuple([layer for layer in self.layers if isinstance(layer, CacheLayer)])

    def attention_layer(self, number: int) -> CacheLayer:
        """Return the cache layer with this index, as used by attention operations."""
        layer = self.layers[number]
        assert isinstance(layer, CacheLayer)
        return layer

    @property
    def matrices(self) -> dict[str, Weight]:
        """Every matrix by name, in order of first use."""
        return {weight.name: weight for op in self.operations for weight in op.matrices}

    @property
    def weights(self) -> dict[str, Weight]:
        """Every matrix and vector by name, in order of first use; backends keep them in memory."""
        return {weight.name: weight for op in self.operations for weight in (*op.matrices, *op.vectors)}

    @property
    def lookups(self) -> tuple[Read, ...]:
        """The tables that stay on disk, and the part of each that is read per token."""
        return tuple([read for op in self.operations for read in op.lookups])

    @property
    def reads(self) -> tuple[Read, ...]:
        """The parts of weights read per token, operation by operation; for an encoder-decoder
        model, per decoder token. Multi-token-prediction heads do not count."""
        operations = self.operations[self.stages[-1].start :] if self.encodes else self.operations
        operations = operations[: self.stages[0].stop] if self.drafts else operations
        return tuple([read for op in operations for read in op.reads])

    @property
    def uses(self) -> Counter[int]:
        """The number of reads of each value, by index; the caller reads the logits once."""
        uses = Counter(value.index for op in self.operations for value in op.inputs)
        uses[self.logits.index] += 1
        return uses

    @property
    def stages(self) -> tuple[range, ...]:
        """The operation indices of each stage; a stage ends with a Send or with the plan."""
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
