"""Records the operations of an encoder by tensor name, with checked shapes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from localllm.models import derived
from localllm.models.errors import ModelError
from localllm.models.tensors import Tensors
from localllm.plan import F32, Activation, Plan, Recorder, Stack, Value, Weight

Norms = Literal["layer", "rms"]
WIDEST = 1 << 17  # columns and rows of a matrix


class Network:
    """A part of an encoder that is being recorded. Names are tensor names without `.weight` and `.bias`."""

    def __init__(self, tensors: Tensors, eps: float, activation: Activation = "gelu", norms: Norms = "layer") -> None:
        self.tensors, self.eps, self.activation, self.norms = tensors, eps, activation, norms
        self.recorder = Recorder()
        self.limit = 0.0  # bounds of gated units with SiLU; 0: none

    # -- products ------------------------------------------------------------------------------------------------------

    def linear(self, x: Value, name: str, rows: int = 0) -> Value:
        """Return x @ weight.T + bias; `rows` 0 means the tensor's rows. Clamps, if given, limit input and output."""
        weight = self.tensors.matrix(f"{name}.weight", rows or self._height(f"{name}.weight"), x.width)
        if f"{name}.input_max" in self.tensors:
            x = self._clamped(x, f"{name}.input")
        y = self.recorder.linear(x, weight, self.tensors.optional(f"{name}.bias", weight.shape[0]))
        return self._clamped(y, f"{name}.output") if f"{name}.output_max" in self.tensors else y

    def _height(self, name: str) -> int:
        rows = self.tensors.height(name)
        if not rows and name not in self.tensors:
            raise ModelError(f"{name}: this tensor is missing")
        if not 1 <= rows <= WIDEST:
            raise ModelError(f"{name}: expected a matrix with at most {WIDEST} rows, found {rows}")
        return rows

    def _clamped(self, x: Value, name: str) -> Value:
        low, high = (self.number(f"{name}_{end}") for end in ("min", "max"))
        return self.recorder.clamp(x, high, low)

    def number(self, name: str) -> float:
        found = self.tensors.optional_numbers(name, 1)
        if found is None:
            raise ModelError(f"{name}: this tensor is missing; expected shape (1)")
        return float(found[0])

    def kernel(self, x: Value, name: str, rows: int, bias: bool = True) -> Value:
        """Return the product with a convolution kernel, whose values per output are the columns of a matrix."""
        weight = self.kernel_matrix(f"{name}.weight", rows, x.width)
        own = self.folded(f"{name}.bias", rows) if bias and f"{name}.bias" in self.tensors else None
        return self.recorder.linear(x, weight, own)

    def kernel_matrix(self, name: str, rows: int, columns: int) -> Weight:
        """Return a tensor of any rank as a matrix. A format with blocks must have whole rows."""
        return flat(self.tensors, name, (rows, columns))

    def folded(self, name: str, width: int) -> Weight:
        """Return a tensor of any rank as a vector."""
        return flat(self.tensors, name, (width,))

    # -- norms and sums ------------------------------------------------------------------------------------------------

    def norm(self, x: Value, name: str, kind: Norms | None = None, eps: float = 0.0, groups: int = 1) -> Value:
        weight = self.tensors.vector(f"{name}.weight", x.width // groups)
        if (kind or self.norms) == "rms":
            return self.recorder.rms_norm(x, weight, eps or self.eps, groups)
        bias = self.tensors.optional(f"{name}.bias", x.width // groups)
        return self.recorder.layer_norm(x, weight, bias, eps or self.eps, groups)

    def unit(self, x: Value, groups: int = 1, eps: float = 0.0) -> Value:
        """Return the RMS norm without weights."""
        return self.recorder.rms_norm(x, self.tensors.ones(x.width // groups), eps or self.eps, groups)

    def mean(self, x: Value, slices: int, factor: float = 1.0) -> Value:
        """Return the mean of equal slices of x, times a factor."""
        weight = self.tensors.numbers(f"mean({slices}, {factor})", [factor / slices] * slices)
        return self.recorder.mix(x, slices, weight)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def activate(self, x: Value, activation: Activation | None = None) -> Value:
        return self.recorder.activate(x, activation or self.activation)

    def mlp(self, x: Value, first: str, second: str, activation: Activation | None = None) -> Value:
        return self.linear(self.activate(self.linear(x, first), activation), second)

    def gated(self, x: Value, gate: str, up: str, down: str, activation: Activation = "silu") -> Value:
        kind: Literal["swiglu_clamp"] | Activation = "swiglu_clamp" if self.limit else activation
        return self.linear(self.recorder.glu(self.linear(x, gate), self.linear(x, up), kind, self.limit), down)

    def experts(self, x: Value, router: str, stacks: tuple[str, str, str], bias: str, used: int) -> Value:
        """Return a mixture of gated units. `stacks` names gate, up and down, without `_exps`; the bias only selects."""
        scores = self.linear(x, router)
        count, inner = scores.width, self.tensors.height(f"{stacks[0]}_exps.weight") or 1
        if not 1 <= used <= count:
            raise ModelError(f"{router}.weight: {count} experts, and the key expert_used_count is {used}")
        gate, up, down = (
            Stack(self.tensors.stack(f"{name}_exps.weight", count, rows, columns))
            for name, rows, columns in zip(stacks, (inner, inner, x.width), (x.width, x.width, inner), strict=True)
        )
        own = self.tensors.optional(f"{bias}.weight", count)
        return self.recorder.experts(
            x, scores, gate, up, down, used, "sigmoid", normalize=True, scale=1.0, activation="silu", choice_bias=own
        )

    def end(self, *sent: Value) -> None:
        self.recorder.end_stage(*sent)

    def plan(self) -> Plan:
        return self.recorder.finish_stages(self.tensors.used())


def flat(tensors: Tensors, name: str, shape: tuple[int, ...]) -> Weight:
    """Return a tensor of any rank with the same number of values, as a tensor of this shape."""
    weight = tensors.any_shape(name, int(np.prod(shape)))
    if weight is None:
        raise ModelError(f"{name}: this tensor is missing; expected {int(np.prod(shape))} values")
    return Weight.of(derived.folded(weight, shape))


def table(tensors: Tensors, name: str, rows: int, width: int) -> F32:
    """Return a small tensor as float32 (rows, width), for computations with NumPy; its values must be finite."""
    values = derived.values(flat(tensors, name, (rows, width)))
    if not np.isfinite(values).all():
        raise ModelError(f"{name}: contains NaN or infinity")
    return values


def constant(name: str, values: F32) -> Weight:
    """Return a constant matrix that is not in the GGUF; the same name must mean the same values."""
    return Weight.of(derived.table(name, values))


def swapped(tensors: Tensors, width: int) -> Tensors:
    """Return tensors in which `ffn_up` and `ffn_down` of old files, which name them the other way round, are right."""
    if tensors.width("v.blk.0.ffn_down.weight") != width:
        return tensors
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}

    def stored(name: str) -> str:
        return next((name.replace(f".{a}.", f".{b}.") for a, b in names.items() if f".{a}." in name), name)

    return tensors.renamed(stored)
