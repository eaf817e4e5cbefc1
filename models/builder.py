"""Building blocks of a layer: norms and matrix products, identified by tensor name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from localllm.models.config import Config, MediaInput
from localllm.models.properties import Properties
from localllm.models.tensors import Tensors
from localllm.plan import Recorder, Rope, Value, Weight

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Builder:
    """Records norms and matrix products; names are tensor names without `.weight`, `.bias` or `.scale`."""

    config: Config
    row: Properties
    tensors: Tensors
    recorder: Recorder
    media: MediaInput | None = None  # the embeddings that the model takes besides tokens

    def own(self, kind: type[T]) -> T:
        """Return what the family has read, `Config.own`."""
        own = self.config.own
        assert isinstance(own, kind), f"{self.row.name} has read {type(own).__name__}, not {kind.__name__}"
        return own

    def norm(self, name: str, x: Value, eps: float = 0.0) -> Value:
        """Return the norm of x, of the architecture's kind; a nonzero `eps` overrides the model's."""
        eps = eps or self.config.eps
        own = name if name in self.tensors else f"{name}.weight"  # PLaMo's norm names have no suffix
        named = self.row.norm_weights or own == name
        weight = self.tensors.vector(own, x.width) if named else self.tensors.ones(x.width)
        if self.config.norm == "rms":
            return self.recorder.rms_norm(x, weight, eps)
        return self.recorder.layer_norm(x, weight, self.tensors.optional(f"{name}.bias", x.width), eps)

    def optional_norm(self, name: str, x: Value) -> Value:
        """Return the norm of x, or x if the GGUF has no norm of that name."""
        return self.norm(name, x) if f"{name}.weight" in self.tensors else x

    def unit(self, x: Value, groups: int = 1) -> Value:
        """Return the RMS norm of each of `groups` slices, without weights."""
        return self.recorder.rms_norm(x, self.tensors.ones(x.width // groups), self.config.eps, groups)

    def rotate_last(self, x: Value, size: int, rope: Rope) -> Value:
        """Rotate the last dimensions of every head; the head width is `size`."""
        heads, plain = x.width // size, size - rope.n_rot
        if not plain:
            return self.recorder.rotate(x, size, rope)
        rotated = self.recorder.rotate(self.recorder.slice(x, plain, size, heads), rope.n_rot, rope)
        return self.recorder.concat(self.recorder.slice(x, 0, plain, heads), rotated, heads)

    def linear(self, name: str, x: Value, rows: int, columns: int) -> Value:
        """Return (x @ weight.T) * scale + bias; the scale applies to the matrix, as in NVFP4 GGUFs."""
        weight = self.tensors.matrix(f"{name}.weight", rows, columns)
        return self.recorder.linear(x, weight, self.tensors.optional(f"{name}.bias", rows), self.scale(name))

    def product(self, name: str, x: Value, rows: int, bias: Weight | None = None) -> Value:
        """Return x @ weight.T + bias, ignoring any scale tensor, as in llama.cpp for newer recurrent models."""
        return self.recorder.linear(x, self.tensors.folded(f"{name}.weight", rows, x.width), bias)

    def rows(self, name: str, x: Value, start: int, stop: int, of: int, scale: float = 1.0) -> Value:
        """Return `linear` with rows start..stop of a matrix (of, width)."""
        weight = self.tensors.rows(f"{name}.weight", start, stop, of, self.config.width)
        bias = self.tensors.optional_part(f"{name}.bias", start, stop, of)
        return self.recorder.linear(x, weight, bias, scale)

    def ffn_linear(self, name: str, x: Value, rows: int, columns: int) -> Value:
        """Return (x @ weight.T + bias) * scale; llama.cpp's feed-forward scales after adding the bias."""
        weight = self.tensors.matrix(f"{name}.weight", rows, columns)
        bias = self.tensors.optional(f"{name}.bias", rows)
        scale = self.scale(name) if self.row.ffn_scales else 1.0
        if bias is None or scale == 1.0:
            return self.recorder.linear(x, weight, bias, scale)
        return self.recorder.scale(self.recorder.linear(x, weight, bias), scale)

    def scale(self, name: str) -> float:
        """Return the value of the tensor `name.scale`, or 1 without such a tensor."""
        scale = self.tensors.optional_numbers(f"{name}.scale", 1)
        return 1.0 if scale is None else float(scale[0])


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model: it records its operations with a builder."""

    builder: Builder

    @property
    def config(self) -> Config:
        return self.builder.config

    @property
    def recorder(self) -> Recorder:
        return self.builder.recorder

    @property
    def tensors(self) -> Tensors:
        return self.builder.tensors
