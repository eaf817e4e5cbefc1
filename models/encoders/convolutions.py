"""Convolutions as products: the rows of inputs that NumPy gathers, their runs, and sums over all rows of a picture.

A depthwise convolution multiplies each gathered value by its weight, and adds the taps.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from localllm.models import derived
from localllm.models.encoders.network import Network, flat
from localllm.plan import F32, Plan, Value, Weight
from localllm.plan.runs import Encoding, Layout, Run

CONVOLVED = 1 << 12  # rows of a convolution over a picture that run together
GATHERED = 1 << 22  # values of a depthwise convolution's inputs that run together
SUMMED = 16  # rows that are added at once

Pads = tuple[int, int]  # zeros before and after a side


def windows(x: F32, taps: int, stride: int) -> F32:
    """Return the inputs of a convolution over time, (rows, channels * taps), from frames (frames, channels)."""
    wide = np.pad(x, ((taps // 2, taps // 2), (0, 0)))
    seen = np.lib.stride_tricks.sliding_window_view(wide, taps, axis=0)[::stride]
    return np.ascontiguousarray(seen).reshape(len(seen), -1)


def same(size: int, side: int, stride: int) -> Pads:
    """Return the padding with which a side of n values becomes n / stride, rounded up; the odd zero is at the end."""
    total = max(0, (-(-size // stride) - 1) * stride + side - size)
    return total // 2, total - total // 2


def convolved(
    part: str, picture: F32, stride: int = 2, side: int = 3, pads: tuple[Pads, Pads] | None = None, *more: F32
) -> Generator[Run, list[F32], F32]:
    """Yield the runs of a convolution over a picture (rows, columns, channels), and return its result.

    Other inputs have one row per position of the result.

    The inputs of the products are many times as large as the picture, so that rows run one group after the other.
    """
    middle = (side // 2, side // 2)
    wide = np.pad(picture, (*(pads or (middle, middle)), (0, 0)))
    seen = np.lib.stride_tricks.sliding_window_view(wide, (side, side), axis=(0, 1))[::stride, ::stride]
    rows, columns = seen.shape[:2]
    step, found = max(1, CONVOLVED // columns), []
    for start in range(0, rows, step):
        own = seen[start : start + step]
        inputs = np.ascontiguousarray(own).reshape(len(own) * columns, -1)
        rest = tuple([x[start * columns : start * columns + len(inputs)] for x in more])
        (x,) = yield Run(part, (inputs, *rest), (Layout((len(inputs),)),))
        found.append(x.reshape(len(own), columns, -1))
    return np.concatenate(found)


def rowwise(part: str, *inputs: F32, most: int = CONVOLVED) -> Encoding:
    """Yield the runs of a part whose rows do not see each other, a group of rows after the other."""
    found = []
    for start in range(0, len(inputs[0]), most):
        own = tuple([x[start : start + most] for x in inputs])
        (y,) = yield Run(part, own, (Layout((len(own[0]),)),))
        found.append(y)
    return np.concatenate(found)


# -- depthwise ---------------------------------------------------------------------------------------------------------


def depthwise_rows(values: int) -> int:
    """Return the maximum number of rows of a part with a depthwise convolution of this many values per row."""
    return max(64, min(CONVOLVED, GATHERED // values))


def depthwise(network: Network, x: Value, name: str, channels: int, bias: bool = False) -> Value:
    """Return a depthwise convolution of rows (taps * channels), whose values are ordered by tap."""
    taps, recorder = x.width // channels, network.recorder
    weight = flat(network.tensors, f"{name}.weight", (channels, taps))

    def rows(start: int, stop: int) -> F32:
        return np.ascontiguousarray(derived.values(weight).T).reshape(1, -1)[start:stop]

    x = recorder.mul(x, Weight.of(derived.Derived(f"{name}.weight by taps", (x.width,), rows)))
    x = recorder.mix(x, taps, network.tensors.ones(taps))
    own = f"{name}.bias"
    if bias or own in network.tensors:
        x = recorder.scale_columns(x, network.tensors.ones(channels), bias=flat(network.tensors, own, (channels,)))
    return x


def depthwise_runs(
    part: str, picture: F32, side: int, stride: int = 1, pads: tuple[Pads, Pads] | None = None, *more: F32
) -> Encoding:
    """Yield the runs of a part whose first input is the windows of a picture (rows, columns, channels).

    Other inputs have one row per position. The result is (rows, columns, values).
    """
    middle = (side // 2, side // 2)
    wide = np.pad(picture, (*(pads or (middle, middle)), (0, 0)))
    height, width, channels = wide.shape
    rows, columns = ((n - side) // stride + 1 for n in (height, width))
    first = (np.arange(rows)[:, None] * width + np.arange(columns)).reshape(-1) * stride
    taps = (np.arange(side)[:, None] * width + np.arange(side)).reshape(-1)
    values, found = wide.reshape(-1, channels), []
    step = depthwise_rows(side * side * channels)
    for start in range(0, len(first), step):
        index = first[start : start + step, None] + taps
        inputs = values[index].reshape(len(index), -1)
        own = (inputs, *[x[start : start + step] for x in more])
        (y,) = yield Run(part, own, (Layout((len(inputs),)),))
        found.append(y)
    return np.concatenate(found).reshape(rows, columns, -1)


# -- sums over rows ----------------------------------------------------------------------------------------------------


def sum_plan(network: Network, width: int, squares: bool = False) -> Plan:
    """Record the sum of `SUMMED` rows, or of their squares, which stand side by side."""
    x = network.recorder.receive(SUMMED * width, "rows")
    x = network.recorder.glu(x, x, "identity") if squares else x
    network.end(network.recorder.mix(x, SUMMED, network.tensors.ones(SUMMED)))
    return network.plan()


def summed(part: str, x: F32, first: str = "") -> Encoding:
    """Yield the runs of a sum over rows (rows, width), and return (1, width); `first` is the part of the first step."""
    width, name = x.shape[1], first or part
    while len(x) > 1 or name != part:
        x = np.pad(x, ((0, -len(x) % SUMMED), (0, 0))).reshape(-1, SUMMED * width)
        x = yield from rowwise(name, x)
        name = part
    return x
