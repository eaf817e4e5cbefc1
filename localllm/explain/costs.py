"""What the operations of a plan read and multiply in a pass, from the plan alone; a run adds the time.

Bytes are those that must come from memory: weights once per pass, and the cache once for all rows of a sequence.
Activations stay in the processor's caches and are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from localllm.backends.base import Clocked, Executable, state_read
from localllm.explain.record import Step
from localllm.plan import (
    BLOCK,
    Append,
    Attention,
    CacheLayer,
    Embed,
    EmbedNgrams,
    Experts,
    Operation,
    Plan,
    SelectPositions,
    Weight,
    flattened,
)

_LAYER = re.compile(r"^(?:blk|enc|dec)\.\d+\.")
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one operation takes in a pass."""

    kind: str  # role of its matrix, or its name
    batch: bool  # whether it works on all rows, not only on those that become logits
    weights: tuple[tuple[int, int, int], ...]  # (bytes, used, of): a row reads `used` of `of` equal shares
    per_row: int  # bytes of an embedding or a recurrent state
    per_position: int  # bytes of the cache that it reads
    window: int  # positions that a row sees; 0: all
    flops: int  # per row
    flops_per_position: int
    each: bool = False  # every row reads positions of its own, `window` at most

    def rows(self, step: Step) -> int:
        return len(step.tokens) if self.batch else step.logit_rows

    def bytes(self, step: Step) -> int:
        """Return the bytes that it reads. With experts this is an upper bound: rows may choose the same ones."""
        rows = self.rows(step)
        if not rows:
            return 0
        seen = step.first + len(step.tokens)
        if self.each:
            seen = rows * min(seen, self.window)
        elif self.window:
            seen = min(seen, self.window + rows - 1)
        shares = sum(size * min(used * rows, of) // of for size, used, of in self.weights)
        return shares + rows * self.per_row + seen * self.per_position

    def operations(self, step: Step) -> int:
        """Return the multiplications and additions."""
        rows, end = self.rows(step), step.first + len(step.tokens)
        seen = 0
        if self.flops_per_position:
            positions = range(end - rows + 1, end + 1)
            seen = sum(min(n, self.window) for n in positions) if self.window else sum(positions)
        return rows * self.flops + seen * self.flops_per_position


def costs_of(executable: Executable, plan: Plan) -> tuple[Cost, ...]:
    """Return the cost of every operation that the executable of a plan runs, in order.

    An operation with several kernel calls has its cost at the last one; the others have none, so that the costs match
    the clocks of the calls.
    """
    cache = executable.block_bytes
    if not isinstance(executable, Clocked):
        return tuple([_cost(op, plan, lambda weight: weight.bytes, cache) for op in plan.operations])
    operations, found = executable.operations, []
    for number, op in enumerate(operations):
        whole = _cost(op, plan, executable.stored, cache)
        last = number + 1 == len(operations) or operations[number + 1] is not op
        found.append(whole if last else Cost(whole.kind, whole.batch, (), 0, 0, 0, 0, 0))
    return tuple(_named_together(found, executable.barriers))


def _named_together(costs: Sequence[Cost], barriers: Sequence[bool]) -> list[Cost]:
    """Return the costs with one kind for all calls between two barriers.

    Between barriers one thread may do the work of an operation while another is at the next, so that only the time of
    all of them is known.
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
    """Return the role of an operation's matrix in any layer, or the operation's name."""
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
    embeds = isinstance(op, Embed | EmbedNgrams)
    weights = tuple([(stored(r.weight), r.used, r.of) for r in op.reads if r.weight.name in matrices and not embeds])
    per_row = per_position = window = per_pair = 0
    each = False
    for part in flattened([op]):
        if isinstance(part, Attention):
            each = part.selection is not None
            window = plan.attention_layer(part.layer).selected if each else part.window
            per_pair += 2 * (part.q.width + part.out.width)
        if isinstance(part, SelectPositions):
            per_pair += part.flops_per_position
        for number in part.state if not isinstance(part, Append) else ():
            layer = plan.layers[number]
            if isinstance(layer, CacheLayer):
                per_position += cache[number] // BLOCK
            else:
                per_row += state_read(layer)
    if isinstance(op, Embed | EmbedNgrams):
        per_row += op.reads[0].share(stored(op.table))
    batch = not values or values[0].rows == "batch"
    return Cost(kind_of(op), batch, weights, per_row, per_position, window, op.flops, per_pair, each)
