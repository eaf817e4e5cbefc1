"""The sound encoder of Gemma 4: convolutions, then conformer layers with attention to the last twelve frames."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from localllm.models import derived
from localllm.models.encoders.conformer_blocks import gated, half_feed_forward
from localllm.models.encoders.convolutions import CONVOLVED, convolved
from localllm.models.encoders.keys import read_sizes
from localllm.models.encoders.network import Network, constant, table
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Plan, Value
from localllm.plan.runs import Encoding, Layout, Part, Run

MOST = 4096  # frames of the spectrogram: 30 seconds are 3000
WINDOW = 12  # frames that a frame attends to: itself and those before
PERIOD = 16  # at least the window
CAP = 50.0  # of scores
EPS = 1e-6  # of all norms; the key is ignored, as in llama.cpp


class ConformerEncoder:
    """The encoder of a mel spectrogram.

    A score has a term that depends on the query and the distance, q[i] . p[i - j]. It becomes part of the ordinary
    product. A key gets PERIOD more values: value j modulo PERIOD is one, the others are zero. A query gets the terms
    of the distances in the same places. Within the window, no two keys share a place.
    """

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        self.sizes, self._tensors = read_sizes(keys, "audio"), tensors
        self._bins = keys.integer("audio.num_mel_bins", 1, 1024)
        self.parts: dict[str, Part] = {}
        channels, bins = 1, self._bins
        for number in (0, 1):
            channels, bins = self._record(number, 9 * channels), -(-bins // 2)
        self._inputs = channels * bins
        self.parts["layers"] = Part(self._layers(), MOST // 4)

    def _network(self) -> Network:
        return Network(self._tensors, EPS, "silu", "rms")

    def _record(self, number: int, columns: int) -> int:
        network, name = self._network(), f"a.conv1d.{number}"
        channels = max(1, self._tensors.values(f"{name}.weight") // columns)
        x = network.kernel(network.recorder.receive(columns, "squares"), name, channels, bias=False)
        x = network.recorder.layer_norm(x, self._tensors.vector(f"{name}.norm.weight", channels), None, EPS)
        network.end(network.activate(x, "relu"))
        self.parts[f"conv {number}"] = Part(network.plan(), CONVOLVED)
        return channels

    # -- layers --------------------------------------------------------------------------------------------------------

    def _layers(self) -> Plan:
        network, shape = self._network(), self.sizes.shape
        inputs = {"frames": self._inputs, "turns": PERIOD * WINDOW, "places": PERIOD * shape.heads}
        x, turns, places = network.recorder.receive_all(inputs)
        x, self._layer = network.linear(x, "a.input_projection", shape.width), -1
        for number in range(shape.layers):
            if number:
                network.end()
            name = f"a.blk.{number}."
            x = half_feed_forward(network, x, name, "", post_norm=True)
            x = network.recorder.add(x, self._attended(network, x, name, turns, places))
            x = network.recorder.add(x, self._convolved(network, x, name))
            x = half_feed_forward(network, x, name, "_1", post_norm=True)
            x = network.norm(x, name + "ln2")
        x = network.unit(network.linear(x, "a.pre_encode.out"))
        y = network.linear(x, "mm.a.input_projection")
        network.end(y)
        self.width = y.width
        return network.plan()

    def _attended(self, network: Network, x: Value, name: str, turns: Value, places: Value) -> Value:
        recorder, shape = network.recorder, self.sizes.shape
        y = network.norm(x, name + "attn_pre_norm")
        q, k, v = (network.linear(y, f"{name}attn_{of}", shape.width) for of in "qkv")
        q = recorder.mul(q, self._query_scale(name))
        k = recorder.scale(k, math.log(1 + math.e) / math.log(2))
        terms = recorder.linear(q, constant(f"{name}distances", self._distances(name)))  # (T, WINDOW * heads)
        placed = recorder.mix(terms, WINDOW, turns)  # (T, PERIOD * heads)
        order = np.arange(PERIOD * shape.heads).reshape(PERIOD, shape.heads).T.reshape(-1)
        by_head = recorder.linear(placed, constant("a.by_head", np.eye(len(order), dtype=np.float32)[order]))
        q, k = recorder.concat(q, by_head, shape.heads), recorder.concat(k, places, shape.heads)
        if self._layer < 0:
            self._layer = recorder.append(k, v, shape.heads)
        else:
            recorder.append_again(k, v, self._layer)
        y = recorder.attention(q, self._layer, shape.heads, 1.0, WINDOW, CAP)
        return network.norm(network.linear(y, name + "attn_out", shape.width), name + "attn_post_norm")

    def _query_scale(self, name: str) -> derived.Derived:
        shape = self.sizes.shape
        own = table(self._tensors, f"{name}per_dim_scale.weight", 1, shape.head_dim)[0].astype(np.float64)
        factors = np.tile(own / math.sqrt(shape.head_dim) / math.log(2), shape.heads)
        return derived.vector(f"{name}query_scale", factors.tolist())

    def _distances(self, name: str) -> F32:
        """Return the matrix (WINDOW * heads, width) that gives the terms of a query, by distance and head."""
        shape, found = self.sizes.shape, np.zeros((WINDOW, self.sizes.shape.heads, self.sizes.shape.width), np.float32)
        half = shape.width // 2
        rate = np.exp(-np.arange(half) * math.log(10000.0) / max(half - 1, 1))
        angle = np.arange(WINDOW)[:, None] * rate
        weight = table(self._tensors, f"{name}attn_k_rel.weight", shape.width, shape.width).astype(np.float64)
        keys = np.concatenate([np.sin(angle), np.cos(angle)], axis=1) @ weight.T  # (WINDOW, width)
        for head in range(shape.heads):
            own = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            found[:, head, own] = keys[:, own]
        return found.reshape(-1, shape.width)

    def _convolved(self, network: Network, x: Value, name: str) -> Value:
        """Return the convolution block. The file has the names of its two norms the wrong way round."""
        recorder, width = network.recorder, self.sizes.shape.width
        y = gated(network, network.norm(x, name + "conv_norm"), name, width)
        taps = self._tensors.width(f"{name}conv_dw.weight") or 1
        y = recorder.convolve(y, self._tensors.matrix(f"{name}conv_dw.weight", width, taps))
        return network.linear(network.activate(network.norm(y, name + "norm_conv")), name + "conv_pw2", width)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def encode(self, inputs: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs of a mel spectrogram (bins, frames)."""
        mel, shape = np.asarray(inputs[0], np.float32), self.sizes.shape
        if mel.ndim != 2 or len(mel) != self._bins or not 1 <= mel.shape[1] <= MOST:
            raise ModelError(f"sound: {mel.shape} is not ({self._bins}, 1 to {MOST}), the shape of a spectrogram")
        picture = np.ascontiguousarray(mel.T)[:, :, None]
        for number in (0, 1):
            picture = yield from convolved(f"conv {number}", picture)
        frames = picture.reshape(len(picture), -1)
        at = np.arange(len(frames))
        place = np.eye(PERIOD, dtype=np.float32)[at % PERIOD]  # (T, PERIOD)
        distance = (at[:, None] - np.arange(PERIOD)) % PERIOD  # of the key in each place
        turns = (distance[:, :, None] == np.arange(WINDOW)).astype(np.float32)
        received = frames, turns.reshape(len(at), -1), np.tile(place, (1, shape.heads))
        (y,) = yield Run("layers", received, (Layout((len(at),)),))
        return y


class UnifiedEncoder:
    """Gemma 4's projector of sound without an encoder: frames of samples (samples, frames) become tokens."""

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        network, name = Network(tensors, EPS, "silu", "rms"), "mm.a.input_projection"
        self._samples = max(1, tensors.width(f"{name}.weight"))
        y = network.linear(network.unit(network.recorder.receive(self._samples, "frames")), name)
        network.end(y)
        self.width, self.parts = y.width, {"head": Part(network.plan(), MOST)}

    def encode(self, inputs: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the only run."""
        frames = np.ascontiguousarray(np.asarray(inputs[0], np.float32).T)
        if frames.ndim != 2 or frames.shape[1] != self._samples or not 1 <= len(frames) <= MOST:
            raise ModelError(f"sound: {inputs[0].shape} is not ({self._samples}, 1 to {MOST}), the shape of frames")
        (y,) = yield Run("head", (frames,), (Layout((len(frames),)),))
        return y
