"""Sound encoders of NVIDIA's NeMo: convolutions that shorten time eightfold, and conformer layers (lfm2a, parakeet)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localllm.models.encoders.conformer_blocks import attended, first_stage, layer_runs, second_stage
from localllm.models.encoders.convolutions import CONVOLVED, convolved, depthwise, depthwise_rows, depthwise_runs
from localllm.models.encoders.heads import mlp
from localllm.models.encoders.keys import read_sizes
from localllm.models.encoders.network import Network
from localllm.models.encoders.relative import coefficients_of_waves, rates_of_width, turn, waves
from localllm.models.encoders.vision_row import Head
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Plan, Value
from localllm.plan.runs import Encoding, Layout, Part, Run

MOST = 2048  # frames of the layers: 164 seconds


@dataclass(frozen=True, slots=True)
class NemoRow:
    """What the file does not say about a projector type."""

    head: Head
    eps: float = 0.0  # of all norms; 0: as the key says


LFM2A = NemoRow(mlp("mm.a.mlp.1", "mm.a.mlp.3", "gelu_erf", norm="mm.a.mlp.0", eps=1e-5), eps=1e-5)
PARAKEET = NemoRow(mlp("mm.a.mlp.1", "mm.a.mlp.2", "relu2", norm="mm.a.norm_pre", eps=1e-6, norms="rms"))


class NemoEncoder:
    """The encoder of a mel spectrogram. Each score has a term for the distance of the frames (arXiv:1901.02860)."""

    def __init__(self, row: NemoRow, keys: Keys, tensors: Tensors) -> None:
        self.row, self.sizes, self._tensors = row, read_sizes(keys, "audio"), tensors
        self._bins, self._taps = keys.integer("audio.num_mel_bins", 1, 1024), 1
        if keys.integer("audio.subsampling_factor", 1, 64, 8) != 8:
            raise ModelError("clip.audio.subsampling_factor: expected 8, the factor of the three convolutions")
        shape = self.sizes.shape
        if shape.head_dim * shape.heads != shape.width or shape.width % 2:
            raise ModelError(f"clip.audio.attention.head_count: {shape.heads} heads do not divide {shape.width} values")
        self._rates = rates_of_width(shape.width)
        self.parts: dict[str, Part] = {}
        self._shorten()
        if shape.layers:
            self._taps = tensors.width("a.blk.0.conv_dw.weight") or 1
            self.parts["layers"] = Part(self._layers(), MOST)
        network = self._network()
        y = row.head(network, network.recorder.receive(shape.width, "frames"))
        network.end(y)
        self.width, self.parts["head"] = y.width, Part(network.plan(), MOST)

    def _network(self) -> Network:
        return Network(self._tensors, self.row.eps or self.sizes.eps, "silu", "layer")

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _shorten(self) -> None:
        """Record three convolutions that halve time and frequency, the last two of them depthwise with a product."""
        network = self._network()
        self._channels = max(1, self._tensors.values("a.conv1d.0.weight") // 9)
        x = network.kernel(network.recorder.receive(9, "squares"), "a.conv1d.0", self._channels)
        network.end(network.activate(x, "relu"))
        self.parts["conv 0"] = Part(network.plan(), CONVOLVED)
        channels = self._channels
        for number in (2, 5):
            network = self._network()
            x = depthwise(network, network.recorder.receive(9 * channels, "squares"), f"a.conv1d.{number}", channels)
            name, rows = f"a.conv1d.{number + 1}", depthwise_rows(9 * channels)
            channels = max(1, self._tensors.values(f"{name}.weight") // channels)
            network.end(network.activate(network.kernel(x, name, channels), "relu"))
            self.parts[f"conv {number}"] = Part(network.plan(), rows)
        bins = self._bins
        for _ in range(3):
            bins = -(-bins // 2)
        network = self._network()
        network.end(
            network.linear(
                network.recorder.receive(channels * bins, "frames"), "a.pre_encode.out", self.sizes.shape.width
            )
        )
        self.parts["frames"] = Part(network.plan(), MOST)

    def _layers(self) -> Plan:
        network, width = self._network(), self.sizes.shape.width
        self._layer = -1
        for number in range(self.sizes.shape.layers):
            x, own = network.recorder.receive_all({"rows": width, "waves": width})
            name = f"a.blk.{number}."
            first_stage(network, x, own, name, self._attended)
            network.end(second_stage(network, name, width))
        return network.plan()

    def _attended(self, network: Network, x: Value, own: Value, name: str) -> Value:
        recorder, tensors, shape = network.recorder, network.tensors, self.sizes.shape
        heads, width = shape.heads, shape.width
        q, k, v = (network.linear(x, f"{name}attn_{of}", width) for of in "qkv")
        near, far = (
            recorder.scale_columns(q, tensors.ones(width), bias=network.folded(f"{name}pos_bias_{of}", width))
            for of in "uv"
        )
        stack = coefficients_of_waves(tensors.matrix(f"{name}linear_pos.weight", width, width), heads)
        terms = recorder.rotate(recorder.head_linear(far, stack), width, turn(self._rates))
        y, self._layer = attended(network, shape, near, terms, k, v, own, self._layer)
        return network.linear(y, name + "attn_out", width)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def encode(self, inputs: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs of a mel spectrogram (bins, frames)."""
        mel = np.asarray(inputs[0], np.float32)
        if mel.ndim != 2 or len(mel) != self._bins or not 1 <= mel.shape[1] <= 8 * MOST:
            raise ModelError(f"sound: {mel.shape} is not ({self._bins}, 1 to {8 * MOST}), the shape of a spectrogram")
        picture = yield from convolved("conv 0", np.ascontiguousarray(mel.T)[:, :, None])
        for number in (2, 5):
            picture = yield from depthwise_runs(f"conv {number}", picture, 3, 2)
        x = np.ascontiguousarray(picture.transpose(0, 2, 1)).reshape(len(picture), -1)
        layout = Layout((len(x),))
        (x,) = yield Run("frames", (x,), (layout,))
        own = waves(np.arange(len(x)), self._rates)
        for layer in range(self.sizes.shape.layers):
            x = yield from layer_runs("layers", layer, x, own, (layout, layout), self._taps)
        (y,) = yield Run("head", (x,), (layout,))
        return y
