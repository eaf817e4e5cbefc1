"""Chooses how many threads of the pool run a step, so that a busy machine costs little.

If another program occupies a core, the thread on that core is late at every barrier and all other threads wait for it.
Fewer threads are then faster. Threads that wait long at barriers are the sign of this. A trial with fewer threads shows
whether they are faster, and later trials with more threads show when the core is free again. Very short steps spend
most of their time on barriers, so they are tried with fewer threads on an idle machine too. `CpuExecutable` asks for
the number before each step. The number of threads never changes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter

WINDOW = 0.02  # seconds of steps that make a measurement: several time slices of the operating system
LATE = 0.15  # share of its time that a thread waits too long at barriers, from which fewer threads are tried
GAIN = 0.97  # a trial succeeds if it takes at most this share of the time
SHORT = 0.001  # seconds; trials with fewer threads of shorter steps need no sign of a busy machine
WEIGHT = 0.3  # weight of the newest window in the moving average
DRIFT = 0.1  # growth of a step's shortest time per second of steps, because contexts grow
CUT = WINDOW / 4  # a trial ends early if it has lost this number of seconds


@dataclass(slots=True)
class Trials:
    """Trials in one direction. A failure delays the next trial, so that failures take at most a share of the time.

    Several cores may be busy, and then one thread less gains nothing. So failed trials with fewer threads are followed
    by trials with still fewer.
    """

    share: float  # largest share of the time that failed trials may lose
    least: float  # seconds until the next trial after one failure; doubled by each further failure
    most: float  # largest number of seconds, unless `share` requires more
    failures: int = 0
    stride: int = 1  # threads to add or remove
    after: float = 0.0  # time of the next trial

    def failed(self, now: float, lost: float) -> None:
        pause = min(self.least * 2.0**self.failures, self.most)
        self.failures = min(self.failures + 1, 30)
        self.after = now + max(pause, lost / self.share)

    def succeeded(self) -> None:
        self.failures, self.after = 0, 0.0


class AdaptiveThreads:
    """The number of threads for steps of one kind, from 1 to `most`."""

    def __init__(self, most: int, clock: Callable[[], float] = perf_counter) -> None:
        self.most, self.threads, self._clock = most, most, clock
        self.fewer, self.more = Trials(0.01, 0.1, 30.0), Trials(0.04, 0.1, 1.0)
        self._shortest: dict[Hashable, float] = {}  # kind of step -> shortest duration in seconds
        self._pace = 0.0  # moving average of the time of windows, relative to the shortest times; 0: no window yet
        self._before = 0  # during a trial: the number of threads before it
        self._restart()

    def _restart(self) -> None:
        self._seconds = self._expected = self._late = 0.0
        self._steps = 0

    def observe(self, kind: Hashable, seconds: float, late: float) -> None:
        """Record a step. `late` is the share of its time that a thread, on average, waited too long at barriers."""
        if self.most == 1:
            return
        seconds = max(seconds, 1e-9)  # a coarse clock may see no time
        shortest = self._shortest.get(kind, seconds)
        if not self._before:  # a trial is compared with the times before it
            self._shortest[kind] = shortest = min(shortest * (1 + DRIFT * seconds), seconds)
        self._steps += 1
        self._seconds += seconds
        self._expected += shortest
        self._late += late * seconds
        if self._before:
            self._try_on()
        elif self._seconds >= WINDOW:
            pace = self._seconds / self._expected
            self._pace += (pace - self._pace) * (WEIGHT if self._pace else 1.0)
            late = self._late / self._seconds
            short = self._seconds < SHORT * self._steps
            self._restart()
            self._begin(late > LATE or short)

    def _begin(self, fewer: bool) -> None:
        """Begin a trial if it is time for one. `fewer`: whether fewer threads may be faster."""
        now, target = self._clock(), self.threads
        if fewer and self.threads > 1 and now >= self.fewer.after:
            target = max(self.threads - self.fewer.stride, 1)
        elif now >= self.more.after:
            target = min(self.threads + self.more.stride, self.most)
        if target != self.threads:
            self._before, self.threads = self.threads, target

    def _try_on(self) -> None:
        """Continue a trial, and decide at its end."""
        lost = self._seconds - self._expected * self._pace
        if self._seconds < WINDOW and lost < CUT:
            return
        pace, more = self._seconds / self._expected, self.threads > self._before
        trials, good = self.more if more else self.fewer, pace <= self._pace * GAIN
        if good:
            self._pace = 0.0  # the shortest times change now
            trials.succeeded()
        else:
            self.threads = self._before
            trials.failed(self._clock(), max(lost, 0.0))
        longer = 2 * trials.stride if trials.stride < self.threads // 2 else 1
        self.more.stride = longer if more and good else 1
        self.fewer.stride = longer if not more and not good else 1
        if not more and self.threads < self._before:
            self.more.failed(self._clock(), 0.0)  # the core is occupied: wait before the first trial with more threads
        self._before = 0
        self._restart()
