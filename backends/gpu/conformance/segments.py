"""Cuts a plan into segments: small plans that launch the model's own kernels on rows that the host sends.

Each operation is a segment, together with operations that share its cache layer or read its selection. A kernel that
writes rows in the form that the next product reads is also checked together with that product. Segments that differ
only in names are checked once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from localllm.backends.gpu import formats
from localllm.backends.gpu.conformance.samples import Sample
from localllm.backends.gpu.emit import REWRITES
from localllm.backends.gpu.lowering import read_as
from localllm.plan import (
    Append,
    Attention,
    CacheLayer,
    Convolve,
    Embed,
    EmbedMedia,
    EmbedNgrams,
    Experts,
    HeadLinear,
    HyperConnection,
    IndexerTopK,
    Linear,
    LinearAttention,
    Mix,
    Norm,
    Operation,
    Plan,
    Pool,
    Receive,
    Rotate,
    SelectiveScan,
    Send,
    Splice,
    Stack,
    Store,
    Value,
    Weight,
    Wkv,
    flattened,
)
from localllm.plan.fused import Heads
from localllm.plan.rewrites.fusion import fuse

_MATRICES = {(Linear, "weight"), (HeadLinear, "weight"), (Stack, "weight"), (Embed, "table")}
NEAR = 40  # replaces a longer sliding window, which would take long to fill
SOON = 48  # replaces a larger number of selected positions

# (operation, field) -> key of samples.INPUTS. All other inputs have rows of several magnitudes.
_INPUTS: dict[tuple[type[Operation], str], str] = {
    (Rotate, "x"): "unit", (Append, "k"): "unit", (Append, "v"): "unit", (Attention, "q"): "unit",
    (IndexerTopK, "q"): "integers", (IndexerTopK, "weights"): "integers",
    (LinearAttention, "q"): "small", (LinearAttention, "k"): "small", (LinearAttention, "v"): "unit",
    (LinearAttention, "step"): "step", (LinearAttention, "strength"): "share",
    (SelectiveScan, "x"): "unit", (SelectiveScan, "dt"): "step", (SelectiveScan, "b"): "unit",
    (SelectiveScan, "c"): "unit",
    (Wkv, "q"): "unit", (Wkv, "k"): "small", (Wkv, "v"): "unit", (Wkv, "decay"): "decay",
    (Wkv, "probe"): "tiny", (Wkv, "erase"): "small",
    (Pool, "x"): "unit", (Pool, "scores"): "unit",
    (Experts, "router"): "ranks", (Experts, "choices"): "numbers",
    (Mix, "coefficients"): "unit", (HyperConnection, "x"): "unit",
}  # fmt: skip
_VECTORS: dict[tuple[type[Any], str], str] = {
    (LinearAttention, "rate"): "rate", (SelectiveScan, "a"): "rate", (Attention, "slopes"): "slope",
    (Linear, "bias"): "periodic", (Norm, "weight"): "gain", (Convolve, "weight"): "mean",
    (Mix, "coefficients"): "mean", (Stack, "scale"): "gain", (HyperConnection, "scale"): "gain",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Segment:
    """Some operations as a plan that begins with a Receive. `kinds` says how the rows of received values are generated.

    `stored` means that the cache types matter. `rounds` means that a kernel rounds rows to int8 and the reference does
    not. `changed` says how the segment differs from the model's operations.
    """

    plan: Plan
    received: tuple[Value, ...]
    sent: tuple[Value, ...]
    kinds: tuple[str, ...]
    stored: bool
    rounds: bool
    changed: str = ""

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations between Receive and Send, excluding both."""
        return self.plan.operations[1 : None if self.makes_logits else -1]

    @property
    def makes_logits(self) -> bool:
        return not isinstance(self.plan.operations[-1], Send)

    @property
    def title(self) -> str:
        names = " + ".join(dict.fromkeys(map(_title, self.operations)))
        return f"{names}, {self.changed}" if self.changed else names


def segments(plan: Plan, keep: Collection[Value] = ()) -> list[Segment]:
    """Return the distinct segments of a plan."""
    fused = fuse(plan, REWRITES, keep)
    blocks, floats = read_as(fused, keep)
    found: dict[object, Segment] = {}
    clusters = list(_clusters(fused.operations))
    both_ways = next((own for own in clusters if any(isinstance(op, Attention) and not op.causal for op in own)), [])
    for cluster in clusters:
        if any(isinstance(op, Attention) and op.after for op in cluster):  # the plan also has non-causal rows
            cluster = [*both_ways, *cluster]
        made = [value for op in cluster for value in op.outputs]
        sent = [] if made == [fused.logits] else made
        variants = [_segment(fused, cluster, sent)]
        if readers := _products(fused, made, blocks):
            visible = [value for value in made if value.index in floats or value.index not in blocks]
            ends = [value for op in readers for value in op.outputs]
            variants.append(_segment(fused, [*cluster, *readers], [*visible, *ends], {v.index for v in made}))
        for variant in variants:
            for own in (variant, *_sooner(variant)):
                found.setdefault((own.plan.operations, own.plan.layers), own)
    return list(found.values())


def _clusters(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Yield groups of operations that must be checked together, because they share a cache layer or a selection."""
    leader = list(range(len(operations)))

    def lead(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    of_layer: dict[int, int] = {}
    made: dict[int, int] = {}
    for number, op in enumerate(operations):
        before = [of_layer[layer] for layer in op.state if layer in of_layer]
        if isinstance(op, Attention) and op.selection is not None:
            before.append(made[op.selection.index])
        if isinstance(op, Attention) and op.pools is not None:
            before.append(of_layer[op.pools])
        for other in before:
            leader[lead(number)] = lead(other)
        of_layer |= dict.fromkeys(op.state, number)
        made |= {value.index: number for value in op.outputs}
    clusters: dict[int, list[Operation]] = {}
    for number, op in enumerate(operations):
        if not isinstance(op, Receive | Send | EmbedMedia | EmbedNgrams):
            clusters.setdefault(lead(number), []).append(op)
    for cluster in clusters.values():
        # Keep only one of the layers that read another layer's cache: all of them launch the same kernels.
        alike = {_shape_of(op): op for op in reversed(cluster) if isinstance(op, Attention)}
        yield [op for op in cluster if not isinstance(op, Attention) or alike[_shape_of(op)] == op]


def _shape_of(op: Attention) -> Attention:
    """Return the attention operation without its input and output values."""
    q, out = (replace(value, index=0, name="") for value in (op.q, op.out))
    selection = op.selection and replace(op.selection, index=0, name="")
    plain = [None if weight is None else replace(weight, tensor="") for weight in (op.sinks, op.slopes, op.distances)]
    return replace(op, q=q, out=out, selection=selection, sinks=plain[0], slopes=plain[1], distances=plain[2])


def _products(plan: Plan, made: Sequence[Value], blocks: set[int]) -> list[Operation]:
    """Return one operation for each value in `made` that multiplies the value as activation blocks."""
    found: list[Operation] = []
    for value in made:
        if value.index in blocks:
            found += [op for op in plan.operations if any(x == value for x, _ in op.products)][:1]
    return found


class _Renamer:
    """Gives values, layers and weights of a segment names that depend only on their order."""

    def __init__(self, plan: Plan, known: Collection[int] | None) -> None:
        self._plan, self._known = plan, known  # the values passed between operations; None means all
        self.values: dict[tuple[int, int], Value] = {}
        self.layers: dict[int, int] = {}
        self.stores: list[Store] = []
        self._weights: dict[str, Weight] = {}
        self.kinds: dict[int, str] = {}  # kinds of generated rows, by the index of the new value
        self.made: set[int] = set()  # new values
        self._number, self._operation = 0, Operation()

    def operation(self, op: Operation) -> Operation:
        self._number, self._operation = self._number + 1, op
        own: Operation = self._renamed(op, type(op), "")
        self.made |= {value.index for value in own.outputs}
        return own

    def _renamed(self, item: Any, owner: type[Any], field: str) -> Any:
        if isinstance(item, Value):
            return self._value(item, owner, field)
        if isinstance(item, Weight):
            return self._weight(item, owner, field)
        if isinstance(item, tuple):
            return tuple([self._renamed(each, owner, field) for each in item])
        if isinstance(item, int) and not isinstance(item, bool) and field in ("layer", "pools"):
            return self._layer(item)
        if isinstance(item, Operation | Heads | Stack):
            own: Any = item
            return replace(own, **{f.name: self._renamed(getattr(own, f.name), type(own), f.name) for f in fields(own)})
        return item

    def _value(self, value: Value, owner: type[Any], field: str) -> Value:
        """Return the new value. A value that one operation passes to another keeps its name."""
        shared = self._known is None or value.index in self._known
        key = value.index, 0 if shared else self._number
        if key not in self.values:
            number = len(self.values)
            self.values[key] = Value(number, value.width, value.rows, f"v{number}")
            self.kinds[number] = _INPUTS.get((owner, field), "")
            if isinstance(self._operation, Attention) and field == "q":
                self.kinds[number] = f"unit {_sharpness(self._operation, value)}"
        return self.values[key]

    def _weight(self, weight: Weight, owner: type[Any], field: str) -> Weight:
        if weight.name not in self._weights:
            matrix = (owner, field) in _MATRICES
            kind = "" if matrix else _VECTORS.get((owner, field), "bias")
            sample = Sample(f"w{len(self._weights)}", weight.format if matrix else "F32", weight.shape, kind)
            self._weights[weight.name] = Weight.of(sample)
        return self._weights[weight.name]

    def _layer(self, layer: int) -> int:
        if layer not in self.layers:
            self.layers[layer] = len(self.stores)
            self.stores.append(self._plan.layers[layer])
        return self.layers[layer]


def _segment(
    plan: Plan, operations: Sequence[Operation], sent: Sequence[Value], known: Collection[int] | None = None
) -> Segment:
    """Return the given operations as a segment. `known` lists the values passed between them; None means all."""
    names = _Renamer(plan, known)
    own = [names.operation(op) for op in operations]
    read = dict.fromkeys(value for op in own for value in op.inputs)
    received = tuple([value for value in read if value.index not in names.made])
    by_old = {old: value for (old, _), value in names.values.items() if value.index in names.made}
    ends = tuple([by_old[value.index] for value in sent])
    values = tuple(names.values.values())
    logits = by_old[plan.logits.index] if not sent else Value(len(values), 1, "logits", "none")
    made = Plan(
        (Receive(received), *own, *([Send(ends)] if sent else [])), (*values, *([logits] if sent else [])),
        tuple(names.stores), logits, media=plan.media if any(isinstance(op, Splice) for op in own) else 0,
    )  # fmt: skip
    flat = flattened(own)
    products = [weight.format for op in flat for x, weight in op.products if x.index in names.made]
    hidden = [op.down.weight.format for op in flat if isinstance(op, Experts)]
    return Segment(
        made, received, ends, tuple([names.kinds[value.index] for value in received]),
        any(isinstance(store, CacheLayer) for store in names.stores),
        any(name in formats.QUANTIZED for name in (*products, *hidden)),
    )  # fmt: skip


def _sharpness(op: Attention, q: Value) -> float:
    """Return the power of two by which queries are multiplied, so that scores are about 1."""
    size = op.scale * (q.width / op.heads) ** 0.5
    return float(2.0 ** round(-math.log2(size))) if size > 0 else 1.0


def _sooner(own: Segment) -> Iterator[Segment]:
    """Yield the segment with a shorter window or selection, if the check is too short to fill the original."""
    layers, operations, values = list(own.plan.layers), list(own.plan.operations), list(own.plan.values)
    changes = []
    for number, op in enumerate(operations):
        if isinstance(op, IndexerTopK) and op.most > SOON:
            count = max(1, SOON // op.block)
            less = replace(op, count=count)
            out = replace(op.out, width=op.groups * (1 + less.most))
            operations[number] = replace(less, out=out)
            values[out.index] = out
            changes.append(f"{less.most} positions in place of {op.most}")
        elif isinstance(op, Attention):
            if op.selection is not None and values[op.selection.index] != op.selection:
                op = replace(op, selection=values[op.selection.index])
                layer = layers[op.layer if op.pools is None else op.pools]
                assert isinstance(layer, CacheLayer)
                assert op.selection is not None
                selected = op.selection.width // op.slices - 1
                layers[op.layer if op.pools is None else op.pools] = replace(layer, selected=selected)
            if op.window > NEAR:
                changes.append(f"a window of {NEAR} in place of {op.window}")
                op = replace(op, window=NEAR)
                layer = layers[op.layer]
                assert isinstance(layer, CacheLayer)
                layers[op.layer] = replace(layer, window=min(layer.window, NEAR))
            operations[number] = op
    if changes:
        plan = replace(own.plan, operations=tuple(operations), layers=tuple(layers), values=tuple(values))
        yield replace(own, plan=plan, changed="; ".join(dict.fromkeys(changes)))


def _title(op: Operation) -> str:
    """Return a description of an operation: its name, and the formats and shapes of its matrices."""
    parts = [" ".join(_words(type(op).__name__))]
    shapes = dict.fromkeys(f"{w.format} {' x '.join(map(str, w.shape))}" for w in op.matrices)
    kind = getattr(op, "kind", None) or getattr(op, "activation", None)
    if isinstance(op, Norm | HyperConnection) or kind:
        parts.append(str(kind or ""))
    if isinstance(op, Attention):
        layer = f"{op.heads} heads of {op.q.width // op.heads}"
        parts.append(layer + f", window {op.window}" * bool(op.window))
    return " ".join([*filter(None, parts), *([", ".join(shapes)] if shapes else [])])


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall("[A-Z][a-z]*", name)]
