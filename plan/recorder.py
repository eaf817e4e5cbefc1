"""The recorder builds a plan, one operation per call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from localllm.plan.attention import Append, Attention, IndexerTopK, Rotate
from localllm.plan.batch import BLOCK
from localllm.plan.connections import HyperConnection, hyper_connection_width
from localllm.plan.experts import Experts, Gating, Stack
from localllm.plan.media import EmbedMedia, Splice
from localllm.plan.ngrams import EmbedNgrams
from localllm.plan.operation import Operation
from localllm.plan.operations import (
    Activate,
    Activation,
    Add,
    Blend,
    Clamp,
    Concat,
    Embed,
    GaussianTopK,
    Glu,
    GluActivation,
    HeadLinear,
    Linear,
    Match,
    Mix,
    Mul,
    Norm,
    Receive,
    Scale,
    SelectRows,
    Send,
    Slice,
    Softcap,
    Xielu,
)  # fmt: skip
from localllm.plan.plan import CacheLayer, Plan, Store
from localllm.plan.pooling import Pool
from localllm.plan.recurrence import Convolve, LinearAttention, RowLayer, SelectiveScan
from localllm.plan.values import Rope, Rows, Value
from localllm.plan.weights import Tensor, Weight
from localllm.plan.wkv import Wkv


class Recorder:
    """Builds a plan. A method that returns a value appends the operation that computes it.

    A tensor argument means the whole tensor; a `Weight` may be a part of it.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._values: list[Value] = []
        self._layers: list[Store] = []
        self._starts: list[int] = []
        self._read: set[int] = set()  # cache layers that an attention reads
        self._encodes = False
        self._media = 0  # width of the media embeddings

    def begin_layer(self) -> None:
        """Begin the next layer, or the output after the last layer."""
        self._starts.append(len(self._operations))

    def _value(self, width: int, rows: Rows, name: str) -> Value:
        value = Value(len(self._values), width, rows, name)
        self._values.append(value)
        return value

    def embed(self, table: Tensor, positions: bool = False) -> Value:
        out = self._value(table.shape[1], "batch", "positions" if positions else "embedding")
        self._operations.append(Embed(out, Weight.of(table), positions))
        return out

    def embed_ngrams(
        self, table: Tensor, multipliers: Sequence[int], sizes: Sequence[int], firsts: Sequence[int], end: int
    ) -> Value:
        assert len(sizes) == len(firsts), f"{table.name}: {len(sizes)} heads, and {len(firsts)} first rows"
        assert len(sizes) % (len(multipliers) - 1) == 0, (
            f"{table.name}: {len(sizes)} heads of {len(multipliers)} tokens"
        )
        out = self._value(len(sizes) * table.shape[1], "batch", table.name)
        self._operations.append(
            EmbedNgrams(out, Weight.of(table), tuple(multipliers), tuple(sizes), tuple(firsts), end)
        )
        return out

    def embed_media(self, width: int) -> Value:
        """Return the embeddings of media tokens (T, width), which `splice` reads."""
        assert not self._media, "the plan has its media embeddings already"
        out = self._value(width, "batch", "media")
        self._operations.append(EmbedMedia(out))
        self._media = width
        return out

    def splice(self, x: Value, media: Value, start: int = 0, add: bool = False) -> Value:
        """Return x with the rows of media tokens replaced, or increased if `add`, by columns of their embeddings."""
        assert x.rows == media.rows, f"{x.name}: rows of another kind than the media's"
        assert 0 <= start <= media.width - x.width, f"{x.name}: no columns {start}..{start + x.width} of {media.width}"
        out = self._value(x.width, x.rows, x.name + ".spliced")
        self._operations.append(Splice(out, x, media, start, add))
        return out

    def receive(self, width: int, name: str) -> Value:
        """Return a value (T, width) from another plan or stage, passed to `Executable.run`. Must be the first operation
        of its stage.
        """
        return self.receive_all({name: width})[0]

    def receive_all(self, widths: Mapping[str, int]) -> tuple[Value, ...]:
        """Return several values (T, width) as `receive` does, by name and width."""
        began = bool(self._operations) and not isinstance(self._operations[-1], Send)
        assert not began, f"{', '.join(widths)}: received after the stage began"
        values = tuple([self._value(width, "batch", name) for name, width in widths.items()])
        self._operations.append(Receive(values))
        return values

    def rms_norm(self, x: Value, weight: Tensor, eps: float, groups: int = 1) -> Value:
        out = self._value(x.width, x.rows, weight.name)
        self._operations.append(Norm(out, x, Weight.of(weight), None, eps, groups, "rms"))
        return out

    def layer_norm(self, x: Value, weight: Tensor, bias: Tensor | None, eps: float, groups: int = 1) -> Value:
        out = self._value(x.width, x.rows, weight.name)
        self._operations.append(Norm(out, x, Weight.of(weight), _given(bias), eps, groups, "layer"))
        return out

    def scale_columns(self, x: Value, weight: Tensor, groups: int = 1, bias: Tensor | None = None) -> Value:
        """Return x times per-column weights, plus a bias: a norm of kind "none"."""
        out = self._value(x.width, x.rows, weight.name)
        self._operations.append(Norm(out, x, Weight.of(weight), _given(bias), 0.0, groups, "none"))
        return out

    def linear(self, x: Value, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Value:
        out = self._value(weight.shape[0], x.rows, weight.name)
        self._operations.append(Linear(out, x, Weight.of(weight), _given(bias), scale))
        return out

    def head_linear(self, x: Value, weight: Tensor) -> Value:
        heads, rows, columns = weight.shape
        assert x.width == heads * columns, f"{weight.name}: {heads} heads of {columns} for rows of {x.width}"
        assert columns % 2 == 0, f"{weight.name}: {columns} columns, not an even number"
        out = self._value(heads * rows, x.rows, weight.name)
        self._operations.append(HeadLinear(out, x, Weight.of(weight)))
        return out

    def rotate(self, x: Value, head_dim: int, rope: Rope) -> Value:
        out = self._value(x.width, x.rows, x.name + ".rope")
        self._operations.append(Rotate(out, x, head_dim, rope))
        return out

    def append_again(self, k: Value, v: Value, layer: int) -> None:
        """Append keys and values to a cache layer that earlier layers no longer read, in place of theirs."""
        stored = self._layers[layer]
        assert isinstance(stored, CacheLayer)
        widths = stored.kv_heads * stored.head_dim, stored.kv_heads * stored.value_dim
        assert (k.width, v.width) == widths, f"{k.name}: {k.width} and {v.width} numbers, not {widths}"
        self._operations.append(Append(layer, k, v))

    def append(self, k: Value, v: Value, kv_heads: int, every: int = 1, prefix: bool = False) -> int:
        """Append keys and values to a new cache layer, and return its index.

        With `every` above 1, only tokens at positions every - 1, 2 every - 1, ... are stored. With `prefix`, v is the
        first elements of k.
        """
        layer, widths = len(self._layers), (k.width // kv_heads, v.width // kv_heads)
        self._layers.append(CacheLayer(kv_heads, *widths, every=every, prefix=prefix))
        self._operations.append(Append(layer, k, v))
        return layer

    def append_index(self, k: Value, every: int = 1) -> int:
        """Append an indexer's keys to a new cache layer, and return its index. Otherwise like `append`."""
        assert every in (1, 2, 4), "backends read such keys 16 at a time"
        layer = len(self._layers)
        self._layers.append(CacheLayer(1, k.width, 0, every=every))
        self._operations.append(Append(layer, k, None))
        return layer

    def indexer_top_k(
        self, q: Value, weights: Value | None, layer: int, heads: int, count: int, block: int = 1, local: int = 0,
        pooled: bool = False,
    ) -> Value:  # fmt: skip
        assert weights is None or weights.width == heads, f"{q.name}: {heads} heads with {weights.width} weights"
        stored, groups = self._layers[layer], heads if weights is None else 1
        assert isinstance(stored, CacheLayer)
        assert stored.every == 1 or (pooled and stored.every == block), "keys of different pools"
        assert not (pooled and local), f"{q.name}: pools are selected only by scores, not {local} by their place"
        most = count * block + (block - 1 if pooled else 0)
        out = self._value(groups * (1 + most), q.rows, f"selection.{layer}")
        self._operations.append(IndexerTopK(out, q, weights, layer, heads, count, block, local, pooled))
        return out

    def _chooser(self, selection: Value) -> IndexerTopK:
        """Return the operation that computes a selection."""
        return next(op for op in self._operations if isinstance(op, IndexerTopK) and op.out == selection)

    def _read_pools(self, layer: int, pools: int, window: int, selection: Value | None) -> None:
        """Mark cache layers: a token reads a sliding window of `layer`, and all or the selected pools of `pools`."""
        near, far = self._layers[layer], self._layers[pools]
        assert isinstance(near, CacheLayer)
        assert isinstance(far, CacheLayer)
        assert window > 0, "rows that read pools need a window"
        assert replace(far, every=1) == near, "layers differ"
        most = 0
        if selection is not None:
            chooser = self._chooser(selection)
            assert chooser.pooled, "the selection is among pools"
            assert chooser.block == far.every, "the selection is among different pools"
            most = chooser.count * chooser.block
        self._layers[layer] = replace(near, window=window, pooled=True)
        self._layers[pools] = replace(far, pooled=True, selected=most)

    def attention(
        self, q: Value, layer: int, heads: int, scale: float, window: int = 0, softcap: float = 0.0,
        sinks: Tensor | None = None, slopes: Tensor | None = None,
        chunked: bool = False, causal: bool = True, distances: Tensor | None = None, after: bool = False,
        selection: Value | None = None, slices: int = 1, pools: int | None = None, spans: bool = False,
    ) -> Value:  # fmt: skip
        """Return the attention output; `selection` has `slices` slices: one, or one per KV head."""
        stored = self._layers[layer]
        assert isinstance(stored, CacheLayer)
        if selection is not None:
            assert causal, "rows that read a selection are causal"
            assert slopes is None, "rows that read a selection have no slopes"
            assert distances is None, "rows that read a selection have no distance biases"
            assert not after, "rows that read a selection have no encoder"
            assert slices in (1, stored.kv_heads), f"{slices} slices for {stored.kv_heads} key-value heads"
            assert selection.rows == q.rows
        both_ways = not causal or after
        if spans:
            assert not both_ways, "spans are of causal attention"
            assert selection is None, "rows that read a selection have no spans"
            assert pools is None, "rows that read pools have no spans"
            assert slopes is None, "spans have no slopes"
            assert distances is None, "spans have no distance biases"
            assert not chunked, "spans have no chunks"
        if pools is not None:
            self._read_pools(layer, pools, window, selection)
            assert not both_ways, "rows that read pools are causal"
            assert slopes is None, "rows that read pools have no slopes"
            assert distances is None, "rows that read pools have no distance biases"
            assert not chunked, "rows that read pools need a window"
        elif selection is not None:
            assert not window, "rows that read a selection have no window"
            chooser = self._chooser(selection)
            most, whole = selection.width // slices - 1, chooser.block % BLOCK == 0 and not chooser.pooled
            self._layers[layer] = stored = replace(stored, selected=most, whole=whole)
        elif causal:  # non-causal layers keep all blocks: a token also attends to later positions in the batch
            widest = 0 if 0 in (window, stored.window) else max(window, stored.window)
            self._layers[layer] = replace(stored, window=widest if layer in self._read else window)
            self._read.add(layer)
        assert pools is not None or (selection is None) == (not stored.selected), "read only by selections, or never"
        assert not both_ways or (q.rows == "batch" and not chunked), "bidirectional rows must be the whole batch"
        out = self._value(heads * stored.value_dim, q.rows, f"attention.{layer}")
        assert slopes is None or distances is None, "only one distance penalty is supported"
        own, far = (_given(sinks), _given(slopes)), _given(distances)
        operation = Attention(
            out, q, layer, heads, scale, window, softcap, *own, chunked, causal, far, after, selection, slices, pools,
            spans,
        )  # fmt: skip
        self._operations.append(operation)
        return out

    def _store(self, store: Store) -> int:
        self._layers.append(store)
        return len(self._layers) - 1

    def convolve(self, x: Value, weight: Tensor, bias: Tensor | None = None) -> Value:
        out = self._value(x.width, x.rows, weight.name)
        layer = self._store(RowLayer(x.width, weight.shape[1]))
        self._operations.append(Convolve(out, x, layer, Weight.of(weight), _given(bias)))
        return out

    def linear_attention(
        self, q: Value, k: Value, v: Value, step: Value | None, strength: Value | None, rate: Tensor, key_heads: int,
        delta: bool = False, tiled: bool = False, skip: Tensor | None = None,
    ) -> Value:  # fmt: skip
        out, layer = self._value(v.width, v.rows, v.name + ".attended"), len(self._layers)
        operation = LinearAttention(
            out, q, k, v, step, strength, Weight.of(rate), layer, key_heads, delta, tiled, _given(skip)
        )
        self._store(operation.store)
        self._operations.append(operation)
        return out

    def selective_scan(self, x: Value, dt: Value, b: Value, c: Value, a: Tensor, d: Tensor) -> Value:
        out, layer = self._value(x.width, x.rows, x.name + ".scanned"), len(self._layers)
        operation = SelectiveScan(out, x, dt, b, c, layer, Weight.of(a), Weight.of(d))
        self._store(operation.store)
        self._operations.append(operation)
        return out

    def wkv(
        self, q: Value, k: Value, v: Value, decay: Value, heads: int, before: bool = False,
        probe: Value | None = None, erase: Value | None = None,
    ) -> Value:  # fmt: skip
        assert q.width == k.width == decay.width, f"{k.name}: {k.width} numbers, not {q.width} and {decay.width}"
        assert (probe is None) == (erase is None), f"{k.name}: what is probed is erased"
        out, layer = self._value(v.width, v.rows, v.name + ".scanned"), len(self._layers)
        operation = Wkv(out, q, k, v, decay, layer, heads, before, probe, erase)
        self._store(operation.store)
        self._operations.append(operation)
        return out

    def pool(self, x: Value, scores: Value, bias: Tensor, parts: int = 1) -> Value:
        assert x.width == scores.width == bias.shape[1], f"{x.name}: {scores.width} scores for {x.width} columns"
        assert parts in (1, 2), f"{x.name}: {parts} pools"
        assert x.width % parts == 0, f"{x.name}: {x.width} columns of {parts} pools"
        out, layer = self._value(x.width // parts, x.rows, x.name + ".pooled"), len(self._layers)
        operation = Pool(out, x, scores, layer, Weight.of(bias))
        self._store(operation.store)
        self._operations.append(operation)
        return out

    def glu(self, gate: Value, up: Value, activation: GluActivation, limit: float = 0.0) -> Value:
        out = self._value(up.width, up.rows, gate.name + ".glu")
        self._operations.append(Glu(out, gate, up, activation, limit))
        return out

    def experts(
        self, x: Value, router: Value, gate: Stack, up: Stack, down: Stack, used: int, gating: Gating, normalize: bool,
        scale: float, activation: GluActivation, choice_bias: Tensor | None = None, limit: float = 0.0,
        weighted_input: bool = False, groups: int = 1, groups_used: int = 1, choices: Value | None = None,
    ) -> Value:  # fmt: skip
        assert choices is None or choices.width == used, f"{router.name}: {used} choices"
        out = self._value(down.weight.shape[1], x.rows, down.weight.name)
        operation = Experts(
            out, x, router, gate, up, down, used, gating, normalize, scale, activation, _given(choice_bias), limit,
            weighted_input, groups, groups_used, choices,
        )  # fmt: skip
        self._operations.append(operation)
        return out

    def activate(self, x: Value, activation: Activation | Literal["exp", "signed_root"]) -> Value:
        out = self._value(x.width, x.rows, f"{x.name}.{activation}")
        self._operations.append(Activate(out, x, activation))
        return out

    def xielu(self, x: Value, positive: float, negative: float, beta: float, eps: float) -> Value:
        out = self._value(x.width, x.rows, x.name + ".xielu")
        self._operations.append(Xielu(out, x, positive, negative, beta, eps))
        return out

    def clamp(self, x: Value, bound: float, low: float | None = None) -> Value:
        """Return x limited to low..bound, by default to -bound..bound."""
        out = self._value(x.width, x.rows, x.name + ".clamped")
        self._operations.append(Clamp(out, x, -bound if low is None else low, bound))
        return out

    def softcap(self, x: Value, cap: float) -> Value:
        out = self._value(x.width, x.rows, x.name + ".capped")
        self._operations.append(Softcap(out, x, cap))
        return out

    def add(self, a: Value, b: Value) -> Value:
        out = self._value(a.width, a.rows, a.name + ".sum")
        self._operations.append(Add(out, a, b))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        out = self._value(x.width, x.rows, x.name + ".scaled")
        self._operations.append(Scale(out, x, factor))
        return out

    def slice(self, x: Value, start: int, stop: int, groups: int = 1) -> Value:
        """Return columns start..stop of each of `groups` equal slices of x; x itself if that is all columns."""
        width = x.width // groups
        assert x.width == groups * width, f"{x.name}: {x.width} columns are not {groups} slices"
        assert 0 <= start < stop <= width, f"{x.name}: no columns {start}..{stop} of {width}"
        if stop - start == width:
            return x
        out = self._value(groups * (stop - start), x.rows, f"{x.name}[{start}:{stop}]")
        self._operations.append(Slice(out, x, groups, start, stop))
        return out

    def concat(self, a: Value, b: Value, groups: int = 1) -> Value:
        """Return the `groups` equal slices of a, each followed by the corresponding slice of b."""
        assert a.width % groups == b.width % groups == 0, f"{a.name}, {b.name}: not {groups} equal slices"
        out = self._value(a.width + b.width, a.rows, f"{a.name}, {b.name}")
        self._operations.append(Concat(out, a, b, groups))
        return out

    def mul(self, x: Value, weight: Tensor) -> Value:
        out = self._value(x.width, x.rows, x.name + ".weighed")
        self._operations.append(Mul(out, x, Weight.of(weight)))
        return out

    def mix(self, x: Value, slices: int, coefficients: Value | Tensor, base: Value | None = None) -> Value:
        own = coefficients if isinstance(coefficients, Value) else Weight.of(coefficients)
        count = (own.width if isinstance(own, Value) else own.shape[0]) // slices
        out = self._value(x.width // slices * count, x.rows, x.name + ".mixed")
        assert base is None or base.width == out.width, f"{x.name}: {out.width} numbers on a base of {base.width}"
        self._operations.append(Mix(out, x, slices, own, base))
        return out

    def blend(self, x: Value, last: Value, weight: Tensor, eps: float) -> Value:
        assert x.width % last.width == 0, f"{x.name}: not slices of {last.width}"
        out = self._value(last.width, last.rows, weight.name)
        self._operations.append(Blend(out, x, last, Weight.of(weight), eps))
        return out

    def hyper_connection(
        self, x: Value, streams: int, scale: Tensor, bias: Tensor, eps: float, magnitude: float = 1.0,
        written_eps: float = 0.0, iterations: int = 0,
    ) -> Value:  # fmt: skip
        out = self._value(x.width, x.rows, bias.name)
        operation = HyperConnection(
            out, x, streams, Weight.of(scale), Weight.of(bias), eps, magnitude, written_eps, iterations
        )  # fmt: skip
        assert x.width == hyper_connection_width(streams, operation.parts), f"{x.name}: not {operation.parts} parts"
        assert operation.parts < 3 or iterations > 0, f"{x.name}: mixing needs an iteration"
        self._operations.append(operation)
        return out

    def match(self, x: Value, like: Value, eps: float, groups: int = 1) -> Value:
        out = self._value(x.width, x.rows, x.name + ".matched")
        self._operations.append(Match(out, x, like, eps, groups))
        return out

    def gaussian_top_k(self, x: Value, deviations: float) -> Value:
        out = self._value(x.width, x.rows, x.name + ".excess")
        self._operations.append(GaussianTopK(out, x, deviations))
        return out

    def select_rows(self, x: Value) -> Value:
        out = self._value(x.width, "logits", "selected")
        self._operations.append(SelectRows(out, x))
        return out

    def end_stage(self, *sent: Value) -> None:
        """End the operations of a stage; the following operations run on other tokens, or later.

        The values `sent` are the results of the stage.
        """
        self._operations.append(Send(sent))

    def end_encoder(self) -> None:
        """End the encoder's operations; the following operations run on decoder tokens."""
        self.end_stage()
        self._encodes = True

    def finish_stages(self, tensors: Collection[str] = ()) -> Plan:
        """Return the plan, whose last stage has ended. It has no logits; its stages send their results."""
        assert isinstance(self._operations[-1], Send), "the last stage has not ended"
        nothing = self._value(1, "logits", "nothing")
        return self.finish(nothing, tensors)

    def finish(
        self, logits: Value, tensors: Collection[str] = (), hidden: Value | None = None, normed: Value | None = None
    ) -> Plan:
        """Return the plan that ends in `logits`; `tensors` names the tensors that were read from the GGUF.

        `hidden` is the hidden states for multi-token-prediction heads, and `normed` those after the output norm.
        """
        operations, layers = tuple(self._operations), tuple(self._layers)
        made = tuple(self._values), layers, logits, tuple(self._starts), frozenset(tensors), hidden
        return Plan(operations, *made, normed, encodes=self._encodes, media=self._media)


def _given(tensor: Tensor | None) -> Weight | None:
    return None if tensor is None else Weight.of(tensor)
