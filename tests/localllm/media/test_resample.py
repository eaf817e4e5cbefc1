"""Resampled sound keeps tones in the pass band, removes all others, and does not depend on the blocks."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.media.resample import HIGHEST, LOWEST, Resampler, resample

PAIRS = [(44100, 16000), (48000, 16000), (8000, 16000), (22050, 24000), (16000, 24000), (44101, 16000)]


def _tone(frequency: float, rate: int, seconds: float = 0.25) -> np.ndarray:
    return np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate).astype(np.float32)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("part", [0.02, 0.5, 0.87])
def test_a_tone_below_the_limit_stays(source: int, target: int, part: float) -> None:
    frequency = part * min(source, target) / 2
    out, expected = resample(_tone(frequency, source), source, target), _tone(frequency, target)
    assert abs(len(out) - len(expected)) <= 1
    middle = slice(len(out) // 4, 3 * len(out) // 4)
    assert np.abs(out[middle] - expected[middle]).max() < 10 ** (0.1 / 20) - 1  # 0.1 dB


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[0] > pair[1]])
@pytest.mark.parametrize("above", [1.0, 1.1, 1.4])
def test_a_tone_above_the_limit_disappears(source: int, target: int, above: float) -> None:
    out = resample(_tone(above * target / 2 + 1, source), source, target)
    assert np.abs(out[len(out) // 4 : 3 * len(out) // 4]).max() < 10 ** (-90 / 20)


@pytest.mark.parametrize(("source", "target"), [*PAIRS, (16000, 16000), (LOWEST, 24000), (HIGHEST, 16000)])
def test_blocks_give_the_same_samples(source: int, target: int) -> None:
    samples = np.random.default_rng(1).standard_normal(source // 10 + 7).astype(np.float32)
    whole = resample(samples, source, target)
    resampler, parts, at = Resampler(source, target), [], 0
    for size in (1, 2, 300, 5, len(samples)):
        parts.append(resampler.push(samples[at : at + size]))
        at += size
    parts.append(resampler.flush())
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert len(whole) == -(-len(samples) * target // source)
