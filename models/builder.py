"""What all parts of a layer are made of: norms and products by the names of their tensors."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.models.architecture import Architecture
from localllm.models.config import Config
from localllm.models.tensors import Tensors
from localllm.plan import Recorder, Value, Weight


@dataclass(frozen=True, slots=True)
class Builder:
    """Records norms and products; a name is that of a tensor without `.weight`, `.bias` or `.scale`."""

    config: Config
    row: Architecture
    tensors: Tensors
    recorder: Recorder

    def norm(self, name: str, x: Value, eps: float = 0.0) -> Value:
        """The architecture's kind of norm; with an `eps` of its own if that is not 0."""
        eps = eps or self.config.eps
        if name in self.tensors:  # PLaMo writes names of norms without a suffix
            weight = self.tensors.vector(name, x.width)
        else:
            weight = (
                self.tensors.vector(f"{name}.weight", x.width) if self.row.norm_weights else self.tensors.ones(x.width)
            )
        if self.config.norm == "rms":
            return self.recorder.rms_norm(x, weight, eps)
        return self.recorder.layer_norm(x, weight, self.tensors.optional(f"{name}.bias", x.width), eps)

    def optional_norm(self, name: str, x: Value) -> Value:
        """The norm, if the file has one of that name."""
        return self.norm(name, x) if f"{name}.weight" in self.tensors else x

    def linear(self, name: str, x: Value, rows: int, columns: int) -> Value:
        """(x @ weight.T) * scale + bias: the scale belongs to the matrix, as in NVFP4 files."""
        weight = self.tensors.matrix(f"{name}.weight", rows, columns)
        return self.recorder.linear(x, weight, self.tensors.optional(f"{name}.bias", rows), self.scale(name))

    def product(self, name: str, x: Value, rows: int, bias: Weight | None = None) -> Value:
        """x @ weight.T + bias, whatever scale the file has: llama.cpp's product in the newer recurrent models."""
        return self.recorder.linear(x, self.tensors.folded(f"{name}.weight", rows, x.width), bias)

    def rows(self, name: str, x: Value, start: int, stop: int, of: int, scale: float = 1.0) -> Value:
        """`linear` of rows start..stop of a matrix (of, width)."""
        weight = self.tensors.rows(f"{name}.weight", start, stop, of, self.config.width)
        bias = self.tensors.optional_part(f"{name}.bias", start, stop, of)
        return self.recorder.linear(x, weight, bias, scale)

    def ffn_linear(self, name: str, x: Value, rows: int, columns: int) -> Value:
        """(x @ weight.T + bias) * scale: llama.cpp's feed-forward scales after the bias."""
        weight = self.tensors.matrix(f"{name}.weight", rows, columns)
        bias = self.tensors.optional(f"{name}.bias", rows)
        scale = self.scale(name) if self.row.ffn_scales else 1.0
        if bias is None or scale == 1.0:
            return self.recorder.linear(x, weight, bias, scale)
        return self.recorder.scale(self.recorder.linear(x, weight, bias), scale)

    def scale(self, name: str) -> float:
        """The number in the tensor `name.scale`; 1 if the file has none."""
        scale = self.tensors.optional_numbers(f"{name}.scale", 1)
        return 1.0 if scale is None else float(scale[0])
