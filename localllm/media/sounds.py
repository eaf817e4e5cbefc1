"""The table of projector types for sound: rate, spectrogram, markers, and the number of tokens.

A rule turns mono samples into tensors (mel bins, frames). Each tensor is one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localllm.media.errors import MediaError
from localllm.media.mel import Floats, Front, frames_of, reflected, spectrogram, whisper_scale

Samples = NDArray[np.float32]  # mono
Tensor = NDArray[np.float32]  # (mel bins, frames)

WHISPER = Front()
GEMMA = Front(fft=512, window=320, centred=False, htk=True, magnitude=True)
CONFORMER = Front(fft=512, periodic=False)
GRANITE = Front(fft=512, htk=True)
MIMO = Front(24000, 960, 960, 240, htk=True, magnitude=True)
PARAKEET = Front(fft=512)
_SECONDS = 30  # of a chunk
_FRAMES = 3000  # of a chunk of 30 s
_FLOOR = 2.0**-24


@dataclass(frozen=True, slots=True)
class SoundSettings:
    """What a rule and a count know of the file."""

    bins: int
    stack: int = 1  # frames side by side in a token
    window: int = 1  # granite_speech: frames of a window, and frames per token
    step: int = 1
    group: int = 1  # mimo_audio
    filters: Floats | None = None  # parakeet: tensors of the file
    hann: Floats | None = None


SoundRule = Callable[[Samples, SoundSettings], list[Tensor]]


@dataclass(frozen=True, slots=True)
class SoundRow:
    """A projector type. `least` samples are needed for one token."""

    rule: SoundRule
    count: Callable[[int, SoundSettings], int]  # tokens by the number of frames
    begin: str = ""
    end: str = ""
    rate: int = 16000
    least: int = 1
    stack: bool = False  # the key audio.projector.stack_factor is required
    windows: bool = False  # the keys audio.projector.window_size and downsample_rate are required
    groups: bool = False  # the key audio.local_group_size is required
    tensors: bool = False  # filters and window are tensors of the file
    bins: int = 0  # instead of the key num_mel_bins


def whisper(samples: Samples, settings: SoundSettings) -> list[Tensor]:
    """30 s of silence behind the recording; chunks of 30 s, the incomplete last one dropped."""
    front = WHISPER
    before = front.fft // 2
    if len(samples) <= before:
        samples = np.pad(samples, (0, before + 1 - len(samples)))
    count = frames_of(len(samples) + _SECONDS * front.rate + 2 * before, front) // _FRAMES * _FRAMES
    # Behind the recording, all frames are silent.
    padded = np.pad(reflected(samples, before, 0), (0, front.fft))
    mel = spectrogram(padded, front, front.hann(), front.filters(settings.bins))[:, :count]
    mel = np.pad(mel, ((0, 0), (0, count - mel.shape[1])))
    scaled = whisper_scale(mel, _FLOOR)
    return [scaled[:, at : at + _FRAMES] for at in range(0, count, _FRAMES)]


_CHUNK, _WINDOW = 100, 800  # qwen3a: frames of a convolution, and of a piece


def windows(samples: Samples, settings: SoundSettings) -> list[Tensor]:
    """qwen3a: windows of 800 frames, padded with 0 to whole chunks of 100."""
    before = WHISPER.fft // 2
    padded = reflected(samples, before, before)
    scaled = whisper_scale(
        spectrogram(padded, WHISPER, WHISPER.hann(), WHISPER.filters(settings.bins)), _FLOOR
    )[:, : len(samples) // WHISPER.hop + 1]  # fmt: skip
    parts = [scaled[:, at : at + _WINDOW] for at in range(0, scaled.shape[1], _WINDOW)]
    return [np.pad(part, ((0, 0), (0, -part.shape[1] % _CHUNK))) for part in parts]


def minutes(samples: Samples, settings: SoundSettings) -> list[Tensor]:
    """dots3note_a: chunks of 60 s, each with its own maximum; the end of the last one is not mirrored."""
    front, length, before = WHISPER, 60 * WHISPER.rate, WHISPER.fft // 2
    tensors = []
    for start in range(0, len(samples), length):
        chunk = samples[start : start + length]
        if not (count := len(chunk) // front.hop):
            continue
        padded = reflected(chunk, before, before if len(chunk) == length else 0)
        padded = np.pad(padded, (0, before + len(chunk) + before - len(padded)))
        mel = spectrogram(padded, front, front.hann(), front.filters(settings.bins))
        tensors.append(whisper_scale(np.ascontiguousarray(mel[:, :count]), _FLOOR))
    return tensors


def semicausal(samples: Samples, settings: SoundSettings) -> list[Tensor]:
    """gemma4a: half a window of silence in front; natural logarithm of magnitudes; chunks of 30 s."""
    front, length, tensors = GEMMA, _SECONDS * GEMMA.rate, []
    for start in range(0, len(samples), length):
        chunk = samples[start : start + length]
        before = front.window // 2
        if (last := len(chunk) + before - front.window - 1) <= -front.hop:
            continue
        count = max(last, 0) // front.hop + 1
        padded = np.pad(chunk, (before, (count - 1) * front.hop + front.fft - before - len(chunk)))
        mel = spectrogram(padded, front, front.hann(), front.filters(settings.bins))
        tensors.append(np.log(np.maximum(mel, 0.001)).astype(np.float32))
    return tensors


def raw(samples: Samples, settings: SoundSettings) -> list[Tensor]:
    """gemma4ua: the samples, 640 per frame."""
    padded = np.pad(samples, (0, -len(samples) % settings.bins))
    return [np.ascontiguousarray(padded.reshape(-1, settings.bins).T)]


def _normalized_rows(logs: Floats, count: int) -> Floats:
    """Return the rows less their mean, over their standard deviation, both of the first `count` frames."""
    valid = logs[:, :count]
    values: Floats = (logs - valid.mean(1, keepdims=True)) / (valid.std(1, ddof=1, keepdims=True) + 1e-5)
    return values


def conformer(samples: Samples, settings: SoundSettings) -> list[Tensor]:
    """lfm2a: pre-emphasis, natural logarithm, each bin normalized; frames behind the recording are 0."""
    front, count = CONFORMER, len(samples) // CONFORMER.hop
    emphasized = _emphasized(samples)
    padded = np.pad(emphasized, front.fft // 2)
    mel = spectrogram(padded, front, front.hann(), front.filters(settings.bins))
    values = _normalized_rows(np.log(mel + _FLOOR), count)
    values[:, count:] = 0
    return [values.astype(np.float32)]


def own_filters(samples: Samples, settings: SoundSettings) -> list[Tensor]:
    """parakeet: as lfm2a, with the file's filters and window, and the frames behind the recording as they are."""
    assert settings.filters is not None
    assert settings.hann is not None
    padded = np.pad(_emphasized(samples), PARAKEET.fft // 2)
    mel = spectrogram(padded, PARAKEET, settings.hann, settings.filters)
    return [_normalized_rows(np.log(mel + _FLOOR), len(samples) // PARAKEET.hop).astype(np.float32)]


def _emphasized(samples: Samples) -> Samples:
    return np.concatenate([samples[:1], samples[1:] - np.float32(0.97) * samples[:-1]])


def stacked(samples: Samples, settings: SoundSettings) -> list[Tensor]:
    """granite_speech: Whisper's scale, two frames below each other."""
    front, before = GRANITE, GRANITE.fft // 2
    index = np.arange(-before, len(samples) + before)
    index = np.where(index < 0, np.minimum(-index, len(samples) - 1), index)
    index = np.where(index >= len(samples), np.maximum(2 * len(samples) - 2 - index, 0), index)
    mel = spectrogram(samples[index], front, front.hann(), front.filters(settings.bins // 2))
    scaled = whisper_scale(mel, 1e-10)
    return [np.concatenate([scaled[:, 0 : scaled.shape[1] // 2 * 2 : 2], scaled[:, 1::2]])]


def magnitudes(samples: Samples, settings: SoundSettings) -> list[Tensor]:
    """mimo_audio: natural logarithm of magnitudes at 24 kHz."""
    before = MIMO.fft // 2
    padded = reflected(samples, before, before)
    mel = spectrogram(padded, MIMO, MIMO.hann(), MIMO.filters(settings.bins))
    return [np.log(np.maximum(mel, 1e-7)).astype(np.float32)]


# ---------------------------------------------------------------- tokens by the number of frames


def _stacked(frames: int, settings: SoundSettings) -> int:
    return -(-frames // settings.stack) // 2


def _granite(frames: int, settings: SoundSettings) -> int:
    return -(-frames // settings.window) * (settings.window // settings.step)


def _mimo(frames: int, settings: SoundSettings) -> int:
    half = (frames - 1) // 2 + 1
    return -(-((half - 2) // 2 + 1) // settings.group)


def _quarter(frames: int, settings: SoundSettings) -> int:
    return -(-frames // 4)


def _eighth(frames: int, settings: SoundSettings) -> int:
    return -(-frames // 8)


_WHISPER = SoundRow(whisper, _stacked)
SOUNDS: dict[str, SoundRow] = {
    "ultravox": replace(_WHISPER, stack=True),
    "meralion": replace(_WHISPER, stack=True),
    # llama.cpp pools pairs of frames before stacking (187 tokens of 30 s); the model itself does not (375).
    "voxtral": replace(_WHISPER, begin="[BEGIN_AUDIO]", stack=True),
    "qwen2a": replace(_WHISPER, count=lambda n, s: n // 4, begin="<|audio_bos|>", end="<|audio_eos|>"),
    "musicflamingo": replace(_WHISPER, count=lambda n, s: n // 4, begin="<sound>"),
    "glma": replace(_WHISPER, count=lambda n, s: n // 2 // s.stack + 2, stack=True),
    "qwen3a": SoundRow(windows, lambda n, s: n // _CHUNK * 13, "<|audio_start|>", "<|audio_end|>"),
    "dots3note_a": SoundRow(minutes, _eighth, "<|audio_comp_start|>", "<|audio_comp_end|>", least=160),
    "gemma4a": SoundRow(semicausal, _quarter, "<|audio>", "<audio|>", least=2),
    "gemma4ua": SoundRow(raw, lambda n, s: n, "<|audio>", "<audio|>", bins=640),
    "lfm2a": SoundRow(conformer, _eighth, least=320),
    "parakeet": SoundRow(own_filters, _eighth, least=320, tensors=True),
    "granite_speech": SoundRow(stacked, _granite, least=160, windows=True),
    "mimo_audio": SoundRow(
        magnitudes, _mimo, "<|mimo_audio_start|>", "<|mimo_audio_end|>", rate=24000, least=480, groups=True
    ),
}


def check_length(samples: Samples, row: SoundRow) -> None:
    """Raise MediaError if the sound is too short for one token, or has values that are not finite."""
    if len(samples) < row.least:
        raise MediaError(
            f"the sound has {len(samples)} samples at {row.rate} per second; this model needs {row.least} or more:"
            " record a longer one"
        )
    if not np.isfinite(samples).all():
        raise MediaError("the sound has values that are infinite or not numbers; save it again as 16-bit WAV")
