"""MiMo-Audio: causal layers, codes of a residual quantizer, and layers over groups of the codes' embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localllm.models import derived
from localllm.models.encoders.convolutions import windows
from localllm.models.encoders.keys import length, read_sizes
from localllm.models.encoders.layers import Layers, Shape, Style, by_position
from localllm.models.encoders.network import Network, flat
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Plan
from localllm.plan.runs import Encoding, Layout, Part, Run

MOST = 4096  # frames of the layers: 82 seconds
SKIP = 2  # the result of this layer is added to the last result
TOGETHER = 64  # groups that run together; each has its own cache blocks
WHOLE, NEAR = -1, 0  # modes of a layer


class MimoAudioEncoder:
    """The encoder of a mel spectrogram. Here llama.cpp adds the rows of layer 2 before its feed-forward."""

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        self.sizes, self._tensors = read_sizes(keys, "audio"), tensors
        shape = self.sizes.shape
        self._bins = keys.integer("audio.num_mel_bins", 1, 1024)
        if shape.head_dim * shape.heads != shape.width or shape.layers <= SKIP:
            raise ModelError(
                f"clip.audio.block_count: {shape.layers} layers of {shape.heads} heads; expected 3 or more"
            )
        modes = keys.integers("audio.wa_pattern_mode", shape.layers, WHOLE, NEAR)
        near = keys.integer("audio.window_size", 1, 1 << 14)
        self._group = keys.integer("audio.local_group_size", 1, 64)
        network = self._network()
        x = network.kernel(network.recorder.receive(3 * self._bins, "windows"), "a.conv1d.1", shape.width)
        network.end(network.activate(x))
        self.parts = {"first": Part(network.plan(), 2 * MOST)}
        reaches = tuple([0 if mode == WHOLE else near for mode in modes])
        turn = by_position(10000.0)(shape.head_dim)
        self.parts["layers"] = Part(self._layers(Style(turn=turn, sees="earlier", reaches=reaches)), MOST)
        network = self._network()
        x = network.kernel(network.recorder.receive(2 * shape.width, "pairs"), "a.downsample.conv", shape.width)
        network.end(network.norm(network.activate(x), "a.downsample.norm"))
        self.parts["halve"] = Part(network.plan(), MOST // 2)
        self._record_codes(keys)
        own = replace(shape, prefix="mm.a.local_blk", layers=keys.integer("audio.local_block_count", 1, 64))
        self.parts["local"] = Part(self._local(own), TOGETHER * self._group, self._group)
        network = self._network()
        x = network.recorder.receive(self._group * shape.width, "groups")
        y = network.mlp(x, "mm.a.mlp.1", "mm.a.mlp.2")
        network.end(y)
        self.parts["head"], self.width = Part(network.plan(), TOGETHER), y.width

    def _network(self) -> Network:
        return Network(self._tensors, self.sizes.eps, "gelu_erf", "layer")

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _layers(self, style: Style) -> Plan:
        network, shape = self._network(), self.sizes.shape
        x = network.kernel(network.recorder.receive(3 * shape.width, "windows"), "a.conv1d.2", shape.width)
        x, layers = network.activate(x), Layers(network, shape, style)
        kept = x
        for number in range(shape.layers):
            if number:
                network.end()
            x = layers.layer(x, number)
            kept = x if number == SKIP else kept
        network.end(network.norm(network.recorder.add(x, kept), "a.post_ln"))
        return network.plan()

    def _record_codes(self, keys: Keys) -> None:
        """Record a stage per quantizer: what the last code leaves of the rows, and the scores of the next code.

        Between stages, NumPy takes the code with the highest score, and its rows of two tables.
        """
        width, tensors, count = self.sizes.shape.width, self._tensors, length(keys, "audio.rvq.codebook_size", 64)
        sizes = keys.integers("audio.rvq.codebook_size", count, 1, 1 << 14)
        network = self._network()
        self._tables: list[tuple[F32, F32]] = []
        for number, size in enumerate(sizes):
            books = []
            for name in ("a.rvq.codebook.weight", "mm.a.code_embd.weight"):
                most = tensors.height(name)
                if size > most:
                    raise ModelError(f"{name}: {most} rows per quantizer, and clip.audio.rvq.codebook_size is {size}")
                rows = flat(tensors, name, (count * most, width))
                books.append(rows.part(number * most, number * most + size))
            book, embeddings = (derived.values(each) for each in books)
            if not (np.isfinite(book).all() and np.isfinite(embeddings).all()):
                raise ModelError(f"a.rvq.codebook.weight: quantizer {number} contains NaN or infinity")
            self._tables.append((book, embeddings))
            rest, taken = network.recorder.receive_all({"rows": width, "taken": width})
            rest = network.recorder.add(rest, network.recorder.scale(taken, -1.0))
            norms = tensors.numbers(
                f"norms of codebook {number}", (-(book.astype(np.float64) ** 2).sum(axis=1)).tolist()
            )
            network.end(rest, network.recorder.linear(rest, books[0], norms, 2.0))
        self.parts["codes"] = Part(network.plan(), MOST // 2)
        network = self._network()
        x = network.recorder.receive(count * width, "embeddings")
        network.end(network.recorder.mix(x, count, tensors.ones(count)))
        self.parts["sum"] = Part(network.plan(), MOST // 2)

    def _local(self, shape: Shape) -> Plan:
        network = Network(self._tensors, self.sizes.eps, "silu", "rms")
        x = network.recorder.receive(shape.width, "embeddings")
        layers = Layers(network, shape, Style(turn=by_position(640000.0)(shape.head_dim)))
        for number in range(shape.layers):
            if number:
                network.end()
            x = layers.layer(x, number)
        network.end(network.norm(x, "mm.a.local_norm"))
        return network.plan()

    # -- runs ----------------------------------------------------------------------------------------------------------

    def encode(self, inputs: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs of a mel spectrogram (bins, frames)."""
        mel, group = np.asarray(inputs[0], np.float32), self._group
        if mel.ndim != 2 or len(mel) != self._bins or not 4 <= mel.shape[1] <= 2 * MOST:
            raise ModelError(f"sound: {mel.shape} is not ({self._bins}, 4 to {2 * MOST}), the shape of a spectrogram")
        x = windows(np.ascontiguousarray(mel.T), 3, 1)
        (x,) = yield Run("first", (x,), (Layout((len(x),)),))
        x = windows(x, 3, 2)
        (x,) = yield Run("layers", (x,), (Layout((len(x),)),))
        pairs = x[: len(x) // 2 * 2].reshape(len(x) // 2, 2, -1).transpose(0, 2, 1).reshape(len(x) // 2, -1)
        layout = Layout((len(pairs),))
        (x,) = yield Run("halve", (np.ascontiguousarray(pairs),), (layout,))
        taken, found = np.zeros_like(x), []
        for number, (book, embeddings) in enumerate(self._tables):
            x, scores = yield Run("codes", (x, taken), (layout,), stage=number)
            codes = scores.argmax(axis=1)
            taken = book[codes]
            found.append(embeddings[codes])
        (x,) = yield Run("sum", (np.concatenate(found, axis=1),), (layout,))
        x, tokens = np.pad(x, ((0, -len(x) % group), (0, 0))), []
        for start in range(0, len(x), TOGETHER * group):
            own = x[start : start + TOGETHER * group]
            (y,) = yield Run("local", (own,), (Layout((group,) * (len(own) // group)),))
            (y,) = yield Run("head", (y.reshape(len(y) // group, -1),), (Layout((len(y) // group,)),))
            tokens.append(y)
        return np.concatenate(tokens)
