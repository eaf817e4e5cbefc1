"""Mel spectrograms: windowed FFTs of frames, through a bank of triangular filters. Computed in float64.

The products use `einsum` and no BLAS, so that the result does not depend on the number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_BLOCK = 1024  # frames at a time


@dataclass(frozen=True, slots=True)
class Front:
    """The front end of an encoder of sound. Lengths are in samples."""

    rate: int = 16000
    fft: int = 400
    window: int = 400
    hop: int = 160
    periodic: bool = True  # the Hann window
    centred: bool = True  # a window shorter than the FFT is in its middle, or at its begin
    htk: bool = False  # HTK's mel scale and filters of height 1, or Slaney's scale and filters of equal area
    magnitude: bool = False  # of the FFT; False: its square

    def hann(self) -> Floats:
        """Return the window, padded with zeros to the length of the FFT."""
        n = np.arange(self.window)
        window = 0.5 - 0.5 * np.cos(2 * np.pi * n / (self.window - (not self.periodic)))
        before = (self.fft - self.window) // 2 if self.centred else 0
        out = np.zeros(self.fft)
        out[before : before + self.window] = window.astype(np.float32)
        return out

    def filters(self, bins: int) -> Floats:
        """Return (bins, fft // 2 + 1)."""
        top = _to_mel(self.rate / 2, self.htk)
        edges = np.array([_to_hz(top * i / (bins + 1), self.htk) for i in range(bins + 2)])
        left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
        frequency = np.arange(self.fft // 2 + 1) * (self.rate / self.fft)
        rising = (frequency - left) / np.maximum(centre - left, 1e-30)
        falling = (right - frequency) / np.maximum(right - centre, 1e-30)
        weights = np.maximum(0, np.minimum(rising, falling))
        if not self.htk:
            weights *= 2 / np.maximum(right - left, 1e-30)
        rounded: Floats = weights.astype(np.float32).astype(np.float64)
        return rounded


def _to_mel(hz: float, htk: bool) -> float:
    if htk:
        return 2595 * math.log10(1 + hz / 700)
    return hz * 0.015 if hz < 1000 else 15 + math.log(hz / 1000) * 27 / math.log(6.4)


def _to_hz(mel: float, htk: bool) -> float:
    if htk:
        return 700 * (10 ** (mel / 2595) - 1)
    return mel / 0.015 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)


def frames_of(length: int, front: Front) -> int:
    """Return the number of whole frames in `length` samples."""
    return max(0, (length - front.fft) // front.hop + 1)


def spectrogram(samples: NDArray[np.floating], front: Front, window: Floats, filters: Floats) -> Floats:
    """Return the filtered spectrum of each whole frame, (bins, frames)."""
    out = np.empty((len(filters), frames_of(len(samples), front)))
    for start in range(0, out.shape[1], _BLOCK):
        stop = min(start + _BLOCK, out.shape[1])
        part = samples[start * front.hop : (stop - 1) * front.hop + front.fft].astype(np.float64)
        spectrum = np.abs(np.fft.rfft(sliding_window_view(part, front.fft)[:: front.hop] * window, axis=1))
        if not front.magnitude:
            spectrum *= spectrum
        for bin, row in enumerate(filters):  # a filter covers few frequencies
            used = np.flatnonzero(row)
            if len(used):
                low, high = used[0], used[-1] + 1
                out[bin, start:stop] = np.einsum("fk,k->f", spectrum[:, low:high], row[low:high])
            else:
                out[bin, start:stop] = 0
    return out


def reflected(samples: NDArray[np.float32], before: int, after: int) -> NDArray[np.float32]:
    """Return the samples mirrored at both ends, without repeating the first and the last; zeros beyond a mirror."""
    out = np.zeros(before + len(samples) + after, np.float32)
    out[before : before + len(samples)] = samples
    head, tail = samples[1 : before + 1][::-1], samples[-after - 1 : -1][::-1] if after else samples[:0]
    out[before - len(head) : before] = head
    out[before + len(samples) : before + len(samples) + len(tail)] = tail
    return out


def whisper_scale(mel: Floats, floor: float, maximum: float | None = None) -> NDArray[np.float32]:
    """Return log10 of the spectrogram, at most 8 below its maximum, as (x + 4) / 4."""
    logs = np.log10(np.maximum(mel, floor), out=mel)
    top = logs.max() if maximum is None else maximum
    np.maximum(logs, top - 8, out=logs)
    logs += 4
    logs /= 4
    return logs.astype(np.float32)
