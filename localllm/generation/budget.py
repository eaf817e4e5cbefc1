"""The number of prefill tokens in a step that also decodes, and the time of the encoder of pictures before it, so that
clients who read an answer do not wait long.

The time of a step is measured for each number of rows, because it does not grow evenly: on a CPU, a few more rows cost
little while the weights are read anyway. If the user's target is shorter than the smallest usual step, steps take as
many rows as fit. `schedule.py` asks for the number, and reports each step's duration.
"""

from __future__ import annotations

STRIDE = 16  # rows; the total of a step is a multiple of this, and kernels tile rows by its divisors
LEAST = 8  # minimum number of prefill tokens in a step
FEWEST = 4  # the same if a step with LEAST would miss the user's target
TARGET = 0.07  # seconds between two tokens of an answer, without a target and with few requests
PER_REQUEST = 0.0225  # with more, seconds for each: short chunks make prompts slow, and the last prompt waits for all
LEAST_SHARE = 2.0  # without a target, a step may take this multiple of its decode time, so that prefill gets half
MEDIA_SHARE = 1.3  # the same for the encoder and for prompts with pictures or sound, which would delay others for long
SLICE = 0.1  # seconds of the encoder before a step, if no request decodes
LEAST_SLICE = 0.002  # minimum seconds, in which each thread ends a task
_WEIGHT = 0.1  # weight of the newest step in the moving averages
_RENEWAL = 0.5  # weight of a step whose size was not used in the last STALE steps with prefill
STALE = 8
_FADE = 0.998  # per step: sizes that were too slow are tried again, because the machine may have been busy
_WORST = 4.0  # a measured time counts at most this multiple of the average, in case the machine stalled


class Budget:
    """Chooses the number of prefill tokens per step, for at most `rows` tokens in total.

    `seconds` is the longest step while requests decode. With 0 it is the longest of TARGET, PER_REQUEST for each
    running request, and LEAST_SHARE times the decode time.
    """

    def __init__(self, rows: int, seconds: float) -> None:
        self.rows, self.seconds = rows, seconds
        self._decode = 0.0  # duration of a step without prefill, in seconds
        self._small: dict[int, float] = {}  # rows of a small step -> seconds
        self._row = 0.0  # seconds per prefill token; 0: not yet measured
        self._times: dict[int, float] = {}  # rows of a step with prefill and decode, rounded up to STRIDE -> seconds
        self._measured: dict[int, int] = {}  # the same -> number of the last step of this size
        self._steps = 0
        self._last = 0.0  # duration of the last step in seconds

    def encoder_seconds(self, decoding: bool) -> float:
        """Return the time that the encoder may run before the next step. Without decode it gets half of the time."""
        if not decoding:
            return max(SLICE, self._last)
        left = self._media_target() - self._decode
        if self.seconds:  # prompts of text get the other half; a target that cannot be met does not stop the encoder
            left = max(left / 2, 0.1 * self._decode)
        return max(LEAST_SLICE, left)

    def _media_target(self) -> float:
        return self.seconds or MEDIA_SHARE * self._decode or TARGET

    def prompt_rows(self, decoding: int, requests: int = 0, media: bool = False, spent: float = 0.0) -> int:
        """Return the number of prefill tokens for a step with `decoding` decode tokens, including drafts.

        `requests` run, in decode or prefill. `media`: whether all prompts have pictures or sound. The encoder has
        `spent` seconds before this step. Without decode tokens, fill the step.
        """
        most = self.rows - decoding
        if not decoding:
            return most
        default = max(TARGET, PER_REQUEST * requests, LEAST_SHARE * self._decode)
        target = (self._media_target() if media else self.seconds or default) - spent
        total = _rounded(decoding + LEAST)
        while total + STRIDE <= self.rows and self._time(total + STRIDE, decoding) <= target:
            total += STRIDE
        found = total - decoding
        if (
            (self.seconds or media)
            and self._row
            and total == _rounded(decoding + LEAST)
            and self._time(total, decoding) > target
        ):
            while found > FEWEST and self._small_time(decoding + found) > target:
                found -= 1
        return max(0, min(most, found))

    def _small_time(self, total: int) -> float:
        """Return the measured or estimated duration of a step with fewer rows than `_time` distinguishes."""
        if total in self._small:
            return self._small[total]
        below = max((size for size in self._small if size < total), default=0)
        return (self._small[below] if below else self._decode) + (total - below) * self._row

    def _time(self, total: int, decoding: int) -> float:
        """Return the measured or estimated duration of a step with `total` rows."""
        if total in self._times:
            return self._faded(total)
        if not self._row:
            return float("inf") if total > 2 * STRIDE + _rounded(decoding) else 0.0
        below = max((size for size in self._times if size < total), default=0)
        known = self._times[below] if below else self._decode
        return known + (total - (below or decoding)) * self._row

    def observe(self, decoding: int, prompt: int, seconds: float) -> None:
        """Record the duration of a step with `decoding` decode tokens and `prompt` prefill tokens."""
        total, self._last = decoding + prompt, seconds
        if decoding and prompt < LEAST + STRIDE:
            self._small[total] = _mixed(self._small.get(total, 0.0), seconds)
        if not prompt:
            self._decode = _mixed(self._decode, seconds)
            return
        if prompt >= LEAST:
            rest = seconds - (self._decode if decoding else 0.0)
            self._row = _mixed(self._row, max(rest, 0.1 * seconds) / prompt)
        if not decoding:
            return
        if prompt >= LEAST and (not self.seconds or total == _rounded(total)):  # the last chunk of a prompt is shorter
            total = _rounded(total)
            before = self._faded(total) if total in self._times else 0.0
            stale = self._steps - self._measured.get(total, 0) > STALE
            self._times[total] = _mixed(before, seconds, _RENEWAL if stale else _WEIGHT)
            self._measured[total] = self._steps + 1
        self._steps += 1

    def _faded(self, total: int) -> float:
        return float(self._times[total] * _FADE ** (self._steps - self._measured[total]))


def _rounded(rows: int) -> int:
    return -(-rows // STRIDE) * STRIDE


def _mixed(old: float, new: float, weight: float = _WEIGHT) -> float:
    return old + weight * (min(new, _WORST * old) - old) if old else new
