"""Find the places in a model where factors can be folded: matrices that read a value, and the tensors that produce it.

The places are found in the plan of a forward pass, so all architectures are covered. The producers are the weights of a
norm, the rows of the value matrix before attention, and the rows of the up matrix of a gated feed-forward, also in
experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localllm.plan import (
    F32,
    Append,
    Attention,
    Embed,
    EmbedNgrams,
    Experts,
    Glu,
    Linear,
    Norm,
    Operation,
    Plan,
    SelectRows,
    Weight,
)

LINEAR_IN_UP = ("silu", "gelu", "sigmoid", "relu", "softplus", "identity")  # gated units that are proportional to `up`


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows start..stop of a tensor in the file, or values of a vector. For a stack of experts, these rows of every
    expert."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FoldGroup:
    """`readers` all multiply one value. Dividing `makers` by factors divides this value by the same factors.

    If attention is in between, `heads_per_kv` heads read each value head of `head_dim` rows.
    """

    readers: tuple[str, ...]
    makers: tuple[TensorRows, ...]
    experts: int = 0  # 0: not a stack of experts
    heads_per_kv: int = 1
    head_dim: int = 0

    def spread(self, scale: F32) -> F32:
        """Convert factors of the makers (..., made) to factors of the readers' columns (..., columns)."""
        if self.heads_per_kv == 1:
            return scale
        heads = scale.reshape(-1, 1, self.head_dim)
        return np.broadcast_to(heads, (len(heads), self.heads_per_kv, self.head_dim)).reshape(-1)

    def gather(self, mean_squares: F32) -> F32:
        """Convert mean squares of the readers' columns to mean squares of the makers' values."""
        if self.heads_per_kv == 1:
            return mean_squares
        heads: F32 = mean_squares.reshape(-1, self.heads_per_kv, self.head_dim)
        means: F32 = heads.mean(axis=1)
        return means.reshape(-1)


def fold_groups(plan: Plan) -> list[FoldGroup]:
    """Return every place in a plan where factors can be folded exactly."""
    made = {value.index: op for op in plan.operations for value in op.outputs}
    readers: dict[int, list[Operation]] = {}
    uses: dict[str, set[int]] = {}  # tensor -> the values it multiplies; -1 for an embedding table
    for op in plan.operations:
        for value in op.inputs:
            readers.setdefault(value.index, []).append(op)
        for name, at in _multiplied(op):
            uses.setdefault(name, set()).add(at)
    found = []
    for index, ops in readers.items():
        read = _readers(index, ops)
        maker = made.get(index)
        if not read or maker is None or any(len(uses[name]) > 1 for name in read):
            continue
        if isinstance(maker, SelectRows):
            maker = made.get(maker.x.index)
        if isinstance(maker, Norm) and maker.groups == 1:
            vectors = [w for w in (maker.weight, maker.bias) if w is not None]
            if any(w.tensor not in plan.tensors for w in vectors):  # a norm without weights in the file
                continue
            found.append(FoldGroup(read, tuple(_rows(w, maker.out.width) for w in vectors)))
        elif isinstance(maker, Glu) and maker.activation in LINEAR_IN_UP and maker.gate.width == maker.up.width:
            found += _after(read, made.get(maker.up.index), readers[maker.up.index])
        elif isinstance(maker, Attention):
            append = next(op for op in plan.operations if isinstance(op, Append) and op.layer == maker.layer)
            layer, v = plan.attention_layer(maker.layer), append.v
            assert v is not None, "attention reads values"
            more = {"heads_per_kv": maker.heads // layer.kv_heads, "head_dim": layer.value_dim}
            found += _after(read, made.get(v.index), readers[v.index], **more)
    for op in plan.operations:
        if isinstance(op, Experts) and op.activation in LINEAR_IN_UP:
            makers = [_rows(w, op.up.weight.shape[1]) for w in (op.up.weight, op.up.bias) if w is not None]
            count = op.down.weight.shape[0] // op.down.shared
            found.append(FoldGroup((op.down.weight.tensor,), tuple(makers), count))
    return found


def _after(
    read: tuple[str, ...], maker: Operation | None, beside: list[Operation], heads_per_kv: int = 1, head_dim: int = 0
) -> list[FoldGroup]:
    """Return a group whose value is proportional to the output of a matrix, if no other operation reads that output."""
    if not isinstance(maker, Linear) or maker.weight.group or len(beside) > 1:
        return []
    makers = [_rows(w, maker.out.width) for w in (maker.weight, maker.bias) if w is not None]
    return [FoldGroup(read, tuple(makers), 0, heads_per_kv, head_dim)]


def _multiplied(op: Operation) -> list[tuple[str, int]]:
    """Return the tensors that an operation multiplies by, each with the index of the value, or -1 for a lookup
    table."""
    lookups = [(op.table.tensor, -1)] if isinstance(op, Embed | EmbedNgrams) else []
    return [*lookups, *((weight.tensor, x.index) for x, weight in op.products)]


def _readers(index: int, ops: list[Operation]) -> tuple[str, ...]:
    """Return the tensors that multiply a value, or () if anything else also reads the value."""
    names: dict[str, None] = {}
    for op in ops:
        own = [name for name, at in _multiplied(op) if at == index]
        if not own or (isinstance(op, Experts) and op.router.index == index):
            return ()
        names |= dict.fromkeys(own)
    return tuple(names)


def _rows(weight: Weight, made: int) -> TensorRows:
    """Return the rows or values of a weight that produce `made` values, in every expert if it has experts."""
    start = weight.row if weight.group else weight.first  # the matrices of a stack may hold gate and up rows
    return TensorRows(weight.tensor, start, start + made)
