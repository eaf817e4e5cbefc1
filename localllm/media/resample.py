"""Change the sampling rate of sound with a windowed sinc, block by block.

Quality: flat to 0.1 dB up to 87% of the lower of the two Nyquist frequencies. Tones above that Nyquist frequency, and
their aliases, end below -90 dB. The kernel is a sinc under a Kaiser window, 48 zeros wide on each side, computed for
every phase of the ratio of the two rates.
"""

from __future__ import annotations

from math import ceil, gcd

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Samples = NDArray[np.float32]
LOWEST, HIGHEST = 1000, 384_000  # supported rates

_ZEROS = 48  # zeros of the sinc on each side
_CUTOFF = 0.935  # middle of the transition, of the lower Nyquist frequency
_BETA = 9.5  # of the Kaiser window
_BLOCK = 4096  # outputs at a time


class Resampler:
    """Turns blocks of mono samples at the rate `source` into samples at the rate `target`."""

    def __init__(self, source: int, target: int) -> None:
        shared = gcd(source, target)
        self._up, self._down = target // shared, source // shared
        scale = min(1.0, target / source)
        self._half = ceil(_ZEROS / scale)  # taps on each side of an output
        self._kernel = _kernel(self._up, self._half, _CUTOFF * scale) if source != target else None
        self._held = np.zeros(self._half - 1, np.float32)  # samples that later outputs need; silence in front
        self._start = 1 - self._half  # number of the first of them
        self._done = 0  # outputs so far
        self._read = 0  # inputs so far

    def push(self, samples: Samples) -> Samples:
        """Return the outputs that need no sample after these."""
        self._read += len(samples)
        if self._kernel is None:
            return samples
        self._held = np.concatenate([self._held, samples])
        return self._outputs((self._read - 1 - self._half) * self._up // self._down + 1)

    def flush(self) -> Samples:
        """Return the remaining outputs. The total is the duration times the new rate, rounded up."""
        if self._kernel is None:
            return np.zeros(0, np.float32)
        self._held = np.concatenate([self._held, np.zeros(self._half + 1, np.float32)])
        return self._outputs(-(-self._read * self._up // self._down))

    def _outputs(self, stop: int) -> Samples:
        assert self._kernel is not None
        parts = [np.zeros(0, np.float32)]
        taps = self._kernel.shape[1]
        for begin in range(self._done, stop, _BLOCK):
            places = np.arange(begin, min(begin + _BLOCK, stop)) * self._down
            first = places // self._up - (self._half - 1) - self._start
            windows = sliding_window_view(self._held, taps)[first]
            parts.append(np.einsum("nt,nt->n", windows, self._kernel[places % self._up]))
        if stop > self._done:
            self._done = stop
            unused = self._done * self._down // self._up - (self._half - 1) - self._start
            self._held, self._start = self._held[unused:], self._start + unused
        return np.concatenate(parts)


def resample(samples: Samples, source: int, target: int) -> Samples:
    """Return mono samples at another rate."""
    resampler = Resampler(source, target)
    return np.concatenate([resampler.push(samples), resampler.flush()])


def _kernel(phases: int, half: int, cutoff: float) -> NDArray[np.float32]:
    """Return the weights of 2 * half samples around an output, for each place between two samples."""
    kernel = np.empty((phases, 2 * half), np.float32)
    at = np.arange(2 * half) - (half - 1)
    for begin in range(0, phases, 256):
        places = np.arange(begin, min(begin + 256, phases))[:, None] / phases
        away = at - places
        weights = np.sinc(cutoff * away) * np.i0(_BETA * np.sqrt(np.maximum(0, 1 - (away / half) ** 2)))
        kernel[begin : begin + len(places)] = weights / weights.sum(1, keepdims=True)
    return kernel
