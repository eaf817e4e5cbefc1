"""Sound encoders of the Whisper kind: convolutions over a mel spectrogram, layers, and a projector over frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from localllm.models.encoders.convolutions import CONVOLVED, convolved, windows
from localllm.models.encoders.keys import read_sizes
from localllm.models.encoders.layers import Layers, Style, Turn
from localllm.models.encoders.network import Network, Norms, table
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Activation, Plan, Value
from localllm.plan.runs import Encoding, Layout, Part, Run

Head = Callable[[Network, Value], Value]
MOST = 4096  # frames of the layers, by default; 30 seconds are 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio:
    """What the file does not say about the encoder of a projector type."""

    head: Head
    stack: int = 1  # frames that stand side by side in a row of the head; an incomplete stack is dropped
    stack_key: bool = False  # a key gives this number
    pictures: bool = False  # three convolutions over time and frequency, instead of two over time
    chunk: int = 0  # frames that are convolved together; 0: all
    norms: Norms = "layer"
    activation: Activation | None = None  # None: exact GELU
    turn: Callable[[int], Turn] | None = None
    positions: bool = True  # a table of positions, which begins again in every chunk
    after: tuple[str, ...] = ("a.post_ln",)  # norms of each frame
    ends: tuple[str, str] | None = None  # learned rows before and after the tokens


class AudioEncoder:
    """The encoder of a mel spectrogram: plans, and a generator of their runs."""

    def __init__(self, row: Audio, keys: Keys, tensors: Tensors) -> None:
        self.row, self.sizes, self._tensors = row, read_sizes(keys, "audio", turned=row.turn is not None), tensors
        self._bins = keys.integer("audio.num_mel_bins", 1, 1024)
        self._stack = keys.integer("audio.projector.stack_factor", 1, 64, row.stack) if row.stack_key else row.stack
        self._positions: F32 | None = None
        if row.positions:
            name, width = "a.position_embd.weight", self.sizes.shape.width
            self._positions = table(tensors, name, tensors.values(name) // width or 1, width)
        self.parts: dict[str, Part] = {}
        if row.pictures:
            self._record_pictures()
        else:
            self._record("first", 2 * MOST, self._bins * 3, "a.conv1d.1")
            self._inputs = self.sizes.shape.width * 3
        self.parts["layers"] = Part(self._layers(), MOST)
        self.parts["head"] = Part(self._head(), max(64, MOST // self._stack))
        self._ends = [table(tensors, name, 1, self.width) for name in row.ends or ()]

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _network(self) -> Network:
        row, sizes = self.row, self.sizes
        return Network(self._tensors, sizes.eps, row.activation or sizes.activation, row.norms)

    def _record(self, part: str, rows: int, columns: int, name: str) -> int:
        """Record a convolution with GELU as a part, and return its number of channels."""
        network = self._network()
        channels = self._tensors.values(f"{name}.weight") // columns
        if not channels:
            raise ModelError(f"{name}.weight: this tensor is missing, or smaller than {columns} values")
        x = network.recorder.receive(columns, "windows")
        network.end(network.activate(network.kernel(x, name, channels), "gelu_erf"))
        self.parts[part] = Part(network.plan(), rows)
        return channels

    def _record_pictures(self) -> None:
        channels, bins = 1, self._bins
        for number in (1, 2, 3):
            channels = self._record(f"conv {number}", CONVOLVED, channels * 9, f"a.conv2d.{number}")
            bins = -(-bins // 2)
        self._inputs = channels * bins

    def _layers(self) -> Plan:
        network, row, shape = self._network(), self.row, self.sizes.shape
        recorder = network.recorder
        inputs = {"frames": self._inputs} | ({"positions": shape.width} if row.positions else {})
        x, *added = recorder.receive_all(inputs)
        if row.pictures:
            x = network.linear(x, "a.conv_out", shape.width)
        else:
            x = network.activate(network.kernel(x, "a.conv1d.2", shape.width), "gelu_erf")
        x = recorder.add(x, added[0]) if added else x
        turn = None if row.turn is None else row.turn(shape.head_dim)
        layers = Layers(network, shape, Style(turn=turn))
        for number in range(shape.layers):
            if number:
                network.end()
            x = layers.layer(x, number)
        for name in row.after:
            x = network.norm(x, name)
        network.end(x)
        return network.plan()

    def _head(self) -> Plan:
        network = self._network()
        y = self.row.head(network, network.recorder.receive(self._stack * self.sizes.shape.width, "frames"))
        network.end(y)
        self.width = y.width
        return network.plan()

    # -- runs ----------------------------------------------------------------------------------------------------------

    def encode(self, inputs: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs of a mel spectrogram (bins, frames)."""
        row, mel = self.row, np.asarray(inputs[0], np.float32)
        if mel.ndim != 2 or len(mel) != self._bins or not 1 <= mel.shape[1] <= 2 * MOST:
            raise ModelError(f"sound: {mel.shape} is not ({self._bins}, 1 to {2 * MOST}), the shape of a spectrogram")
        frames, positions = [], []
        for start in range(0, mel.shape[1], row.chunk or mel.shape[1]):
            part = mel[:, start : start + (row.chunk or mel.shape[1])]
            frames.append((yield from self._convolved(part)))
            if self._positions is not None:
                if len(frames[-1]) > len(self._positions):
                    raise ModelError(
                        f"sound: {len(frames[-1])} frames, and the position table has {len(self._positions)}"
                    )
                positions.append(self._positions[: len(frames[-1])])
        x = np.concatenate(frames)
        received = (x, np.concatenate(positions)) if positions else (x,)
        (x,) = yield Run("layers", received, (Layout((len(x),)),))
        stacks = len(x) // self._stack
        if not stacks:
            raise ModelError(
                f"sound: {len(x)} frames are fewer than the {self._stack} of a token; use a longer recording"
            )
        x = x[: stacks * self._stack].reshape(stacks, -1)
        (y,) = yield Run("head", (x,), (Layout((stacks,)),))
        return np.concatenate([self._ends[0], y, self._ends[1]]) if self._ends else y

    def _convolved(self, mel: F32) -> Encoding:
        """Return the inputs of the layers, (frames, columns), of a part of the spectrogram."""
        if not self.row.pictures:
            x = windows(np.ascontiguousarray(mel.T), 3, 1)
            (x,) = yield Run("first", (x,), (Layout((len(x),)),))
            return windows(x, 3, 2)
        picture = mel[:, :, None]
        for number in (1, 2, 3):
            picture = yield from convolved(f"conv {number}", picture)
        return np.ascontiguousarray(picture.transpose(1, 2, 0)).reshape(picture.shape[1], -1)
