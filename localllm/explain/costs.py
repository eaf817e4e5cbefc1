"""Compute the bytes and operations of a plan's operations in one forward pass, from the plan alone. The
recorder measures the time.

Bytes are memory traffic: the weights once per forward pass, and the KV cache once for all tokens of a sequence.
Activations stay in the processor's caches and are not counted. Lookups in the file before a forward pass are not
counted either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from localllm.backends.base import Clocked, Executable, state_read
from localllm.explain.record import StepRecord
from localllm.plan import (
    Append,
    Attention,
    CacheLayer,
    Embed,
    EmbedNgrams,
    Experts,
    IndexerTopK,
    Operation,
    Plan,
    Weight,
    flattened,
    rows_of_block,
)

_LAYER = re.compile(r"^(?:blk|enc|dec)\.\d+\.")
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class CacheRead:
    """Reads of one layer of the KV cache by an operation."""

    bytes: int  # bytes per position; if an entry compresses several positions, the share of one
    flops: int  # operations per position
    window: int  # positions visible to a token (sliding window or top-k); 0: all
    each: bool = False  # whether every token reads different positions

    def total_bytes(self, rows: int, seen: int) -> int:
        """Return the bytes read for `rows` tokens, if the last token attends to `seen` positions."""
        if self.each:
            return rows * self.bytes * (min(seen, self.window) if self.window else seen)
        return self.bytes * (min(seen, self.window + rows - 1) if self.window else seen)

    def operations(self, rows: int, seen: int) -> int:
        positions = range(seen - rows + 1, seen + 1)
        return self.flops * (sum(min(n, self.window) for n in positions) if self.window else sum(positions))


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one operation in a forward pass."""

    kind: str  # the role of its weights, or the name of the operation
    batch: bool  # whether it runs on all tokens, not only on tokens with logits
    weights: tuple[tuple[int, int, int], ...]  # (bytes, used, of): a token reads `used` of `of` equal parts (experts)
    per_row: int  # bytes of an embedding or recurrent state per token
    cache: tuple[CacheRead, ...]
    flops: int  # operations per token

    def rows(self, step: StepRecord) -> int:
        return len(step.tokens) if self.batch else step.logit_rows

    def bytes(self, step: StepRecord) -> int:
        """Return the bytes read. With experts this is an upper bound, since tokens may share experts."""
        rows = self.rows(step)
        if not rows:
            return 0
        cached = sum(read.total_bytes(rows, step.first + len(step.tokens)) for read in self.cache)
        shares = sum(size * min(used * rows, of) // of for size, used, of in self.weights)
        return shares + rows * self.per_row + cached

    def operations(self, step: StepRecord) -> int:
        """Return the number of multiplications and additions."""
        rows, end = self.rows(step), step.first + len(step.tokens)
        return rows * self.flops + sum(read.operations(rows, end) for read in self.cache if read.flops)


def costs_of(executable: Executable, plan: Plan) -> tuple[Cost, ...]:
    """Return the cost of every operation that a plan's executable runs, in order.

    If an operation has several kernel calls, the last call carries the cost and the others zero, so that the costs
    align with the timings of the calls.
    """
    cache = executable.block_bytes
    if not isinstance(executable, Clocked):
        return tuple([_cost(op, plan, lambda weight: weight.bytes, cache) for op in plan.operations])
    operations, found = executable.operations, []
    for number, op in enumerate(operations):
        whole = _cost(op, plan, executable.stored, cache)
        last = number + 1 == len(operations) or operations[number + 1] is not op
        found.append(whole if last else Cost(whole.kind, whole.batch, (), 0, (), 0))
    return tuple(_named_together(found, executable.barriers))


def _named_together(costs: Sequence[Cost], barriers: Sequence[bool]) -> list[Cost]:
    """Merge the kinds of all calls between two barriers.

    Between barriers, one thread may run an operation while another thread already runs the next. Only the total time of
    these calls is known.
    """
    found: list[Cost] = []
    since: list[Cost] = []
    for cost, barrier in zip(costs, barriers, strict=True):
        since.append(cost)
        if barrier or len(found) + len(since) == len(costs):
            kind = ", ".join(dict.fromkeys(each.kind for each in since))
            found += [replace(each, kind=kind) for each in since]
            since = []
    return found


def kind_of(op: Operation) -> str:
    """Return the role of an operation's weights, without the layer, or the name of the operation."""
    parts = flattened([op])
    if any(isinstance(part, Embed | EmbedNgrams) for part in parts):
        return "embedding"
    if any(isinstance(part, Experts) for part in parts):
        return "experts"
    for weight in op.matrices:
        role = _LAYER.sub("", weight.tensor).removesuffix(".weight")
        return "output" if role == "token_embd" else role
    return _WORDS.sub(" ", type(parts[-1]).__name__).lower()


def _cost(op: Operation, plan: Plan, stored: Callable[[Weight], int], cache: Sequence[int]) -> Cost:
    values = op.outputs or op.inputs
    matrices = {weight.name for weight in op.matrices}
    embeds = isinstance(op, Embed)
    weights = tuple([(stored(r.weight), r.used, r.of) for r in op.reads if r.weight.name in matrices and not embeds])
    per_row, reads = 0, []
    for part in flattened([op]):
        for number in part.state if not isinstance(part, Append) else ():
            layer = plan.layers[number]
            if isinstance(layer, CacheLayer):
                reads.append(_cache_read(part, number, layer, cache[number]))
            else:
                per_row += state_read(layer)
    if isinstance(op, Embed):
        per_row += op.reads[0].share(stored(op.table))
    batch = not values or values[0].rows == "batch"
    return Cost(kind_of(op), batch, weights, per_row, tuple(reads), op.flops)


def _cache_read(op: Operation, number: int, layer: CacheLayer, block_bytes: int) -> CacheRead:
    """Return the reads of a KV cache layer by attention or an indexer."""
    size = block_bytes // rows_of_block(layer.every) // layer.every
    if isinstance(op, Attention):
        window = layer.selected or (op.window if number == op.layer else 0)
        return CacheRead(size, 2 * (op.q.width + op.out.width) // layer.every, window, layer.gathered)
    flops = op.flops_per_position if isinstance(op, IndexerTopK) else 0
    return CacheRead(size, flops // layer.every, 0)
