"""Granite Speech: conformer layers that attend within blocks of frames, a branch by symbols, and windowed QFormers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localllm.models.encoders.conformer_blocks import attended, first_stage, layer_runs, second_stage
from localllm.models.encoders.keys import length, read_sizes
from localllm.models.encoders.network import Network, table
from localllm.models.encoders.qformer import EPS, attended_to_each_other, attended_to_rows, cross_runs, stored
from localllm.models.encoders.relative import coefficients_of_table, rates_of_span, stack_of, turn, waves
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Plan, Value
from localllm.plan.runs import Encoding, Layout, Part, Run

MOST = 8192  # frames of the layers: 164 seconds
TOGETHER = 64  # windows of the QFormers that run together; each has its own cache blocks


class GraniteSpeechEncoder:
    """The encoder of a mel spectrogram with two frames per column."""

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        self.sizes, self._tensors = read_sizes(keys, "audio"), tensors
        shape = self.sizes.shape
        self._bins = keys.integer("audio.num_mel_bins", 1, 1024)
        self._block = keys.integer("audio.chunk_size", 1, 1024)
        self._furthest = keys.integer("audio.max_pos_emb", self._block, 1 << 14)
        self._span = keys.integer("audio.projector.window_size", 1, 1024)
        self._queries = self._span // keys.integer("audio.projector.downsample_rate", 1, self._span)
        self._heads = keys.integer("audio.projector.head_count", 1, 256)
        if shape.head_dim * shape.heads != shape.width or not shape.layers:
            raise ModelError(f"clip.audio.attention.head_count: {shape.heads} heads do not divide {shape.width} values")
        self._features: tuple[int, ...] = ()
        if keys.holds("audio.feature_layer"):
            count = length(keys, "audio.feature_layer", 16)
            self._features = keys.integers("audio.feature_layer", count, 0, shape.layers)
        self._taps, self._rates = tensors.width("a.blk.0.conv_dw.weight") or 1, rates_of_span(self._block)
        network = self._network()
        network.end(network.linear(network.recorder.receive(self._bins, "frames"), "a.input_projection", shape.width))
        self.parts = {"frames": Part(network.plan(), MOST), "layers": Part(self._layers(), MOST, self._block)}
        self._record_symbols()
        self._record_projector()

    def _network(self) -> Network:
        return Network(self._tensors, self.sizes.eps, "silu", "layer")

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _layers(self) -> Plan:
        network, width = self._network(), self.sizes.shape.width
        self._layer = -1
        for number in range(self.sizes.shape.layers):
            x, own = network.recorder.receive_all({"rows": width, "waves": 2 * self._block})
            name = f"a.blk.{number}."
            first_stage(network, x, own, name, self._attended)
            network.end(second_stage(network, name, width))
        return network.plan()

    def _attended(self, network: Network, x: Value, own: Value, name: str) -> Value:
        recorder, tensors, shape = network.recorder, network.tensors, self.sizes.shape
        heads, width, span = shape.heads, shape.width, self._block
        q, k, v = (network.linear(x, f"{name}attn_{of}", width) for of in "qkv")
        listed = table(tensors, f"{name}attn_rel_pos_emb", 2 * self._furthest + 1, shape.head_dim).astype(np.float64)
        matrix = coefficients_of_table(listed[self._furthest - span + 1 : self._furthest + span])
        stack = stack_of(f"{name}attn_rel_pos_emb as waves", [matrix] * heads)
        terms = recorder.rotate(recorder.head_linear(q, stack), 2 * span, turn(self._rates))
        y, self._layer = attended(network, shape, q, terms, k, v, own, self._layer)
        return network.linear(y, name + "attn_out", width)

    def _record_symbols(self) -> None:
        """Record the branch in the middle: the softmax of the scores of symbols, and a product of it.

        This is attention: the scores are queries, the keys are the rows of an identity matrix, and the values are the
        columns of the product's matrix. Heads share the scores, and each has a part of the values.
        """
        tensors, shape, network = self._tensors, self.sizes.shape, self._network()
        symbols, heads = tensors.height("a.enc_ctc_out.weight") or 1, shape.heads
        if symbols > 4096:
            raise ModelError(f"a.enc_ctc_out.weight: expected at most 4096 rows, found {symbols}")
        even = symbols + symbols % 2
        keys, values = network.recorder.receive_all({"keys": heads * even, "values": shape.width})
        layer = network.recorder.append(keys, values, heads)
        network.end()
        x = network.recorder.receive(shape.width, "rows")
        scores = network.linear(x, "a.enc_ctc_out", symbols)
        if even > symbols:  # heads are even
            scores = network.recorder.concat(scores, network.recorder.slice(scores, 0, 1))
        scores = network.recorder.mix(scores, 1, tensors.ones(heads))
        y = network.recorder.attention(scores, layer, heads, 1.0, causal=False)
        own = network.folded("a.enc_ctc_out_mid.bias", shape.width)
        network.end(network.recorder.add(x, network.recorder.scale_columns(y, tensors.ones(shape.width), bias=own)))
        self.parts["symbols"] = Part(network.plan(), MOST)
        self._identity = np.tile(np.eye(symbols, even, dtype=np.float32), (1, heads))
        self._of_symbols = np.ascontiguousarray(table(tensors, "a.enc_ctc_out_mid.weight", shape.width, symbols).T)

    def _record_projector(self) -> None:
        tensors, width, most = self._tensors, self.sizes.shape.width, TOGETHER
        columns = width * (1 + len(set(self._features)))
        self._blocks = 0
        while any(f"a.proj_blk.{self._blocks}.{of}.weight" in tensors for of in ("self_attn_q", "ffn_norm")):
            number, name = self._blocks, f"a.proj_blk.{self._blocks}."
            network = self._network()
            x = network.recorder.receive(width, "queries")
            x = x if number else network.norm(x, "a.proj_norm", "layer", EPS)
            network.end(attended_to_each_other(network, x, name, self._heads))
            self.parts[f"queries {number}"] = Part(network.plan(), most * self._queries, self._queries)
            network = self._network()
            layer = stored(network, network.recorder.receive(columns, "rows"), name, width, self._heads)
            network.end()
            x = network.recorder.receive(width, "queries")
            network.end(attended_to_rows(network, x, name, layer, self._heads, "gelu"))
            self.parts[f"windows {number}"] = Part(network.plan(), most * self._span, self._span)
            self._blocks += 1
        if not self._blocks:
            raise ModelError("a.proj_blk.0.self_attn_q.weight: this tensor is missing")
        network = self._network()
        y = network.linear(network.recorder.receive(width, "queries"), "a.proj_linear")
        network.end(y)
        self.width, self.parts["head"] = y.width, Part(network.plan(), most * self._queries)
        self._query = table(tensors, "a.proj_query", self._queries, width)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def encode(self, inputs: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs of a mel spectrogram (bins, frames)."""
        mel, layers = np.asarray(inputs[0], np.float32), self.sizes.shape.layers
        if mel.ndim != 2 or len(mel) != self._bins or not 1 <= mel.shape[1] <= MOST:
            raise ModelError(f"sound: {mel.shape} is not ({self._bins}, 1 to {MOST}), the shape of a spectrogram")
        count = mel.shape[1]
        whole, last = Layout((count,)), count % self._block
        blocks = Layout((self._block,) * (count // self._block) + ((last,) if last else ()))
        own = waves(np.arange(count) % self._block, self._rates)
        (x,) = yield Run("frames", (np.ascontiguousarray(mel.T),), (whole,))
        found = {0: x}
        for layer in range(layers):
            x = found[layer + 1] = yield from layer_runs("layers", layer, x, own, (blocks, whole), self._taps)
            if layer + 1 == layers // 2:
                x = yield from cross_runs("symbols", (self._identity, self._of_symbols), (x,))
        rows = np.concatenate([*[found[layer] for layer in sorted(set(self._features))], x], axis=1)
        rows = np.pad(rows, ((0, -count % self._span), (0, 0)))
        windows = rows.reshape(-1, self._span, rows.shape[1])
        embeddings = []
        for start in range(0, len(windows), TOGETHER):
            embeddings.append((yield from self._projected(windows[start : start + TOGETHER])))
        return np.concatenate(embeddings)

    def _projected(self, windows: F32) -> Encoding:
        """Yield the runs of the QFormers over windows (windows, frames, values)."""
        count, rows = len(windows), windows.reshape(-1, windows.shape[2])
        queries = np.tile(self._query, (count, 1))
        for number in range(self._blocks):
            (queries,) = yield Run(f"queries {number}", (queries,), (Layout((self._queries,) * count),))
            queries = yield from cross_runs(f"windows {number}", (rows,), (queries,), count)
        (y,) = yield Run("head", (queries,), (Layout((len(queries),)),))
        return y
