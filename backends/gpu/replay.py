"""Replays steps with few rows: their launches are recorded once per shape, then replayed as one launch.

Kernels read tokens, positions and block tables from device memory, so a replay is correct for every batch of its shape.
A shape is the number of rows, the number of logit rows, and the number of attention partitions rounded up to a power of
two. Work-groups of partitions beyond the context return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from localllm.backends.base import BackendError
from localllm.backends.gpu.device import Device

MOST = 64  # maximum number of recorded shapes per stage of a plan


class Replays:
    """The recordings of a device, by shape."""

    def __init__(self, device: Device, most: int = MOST) -> None:
        self._device, self._most = device, most
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, Callable[[], None]] = {}
        self.refused = ""  # why the device cannot record, or ""

    def run(self, shape: Hashable, work: Callable[[], None]) -> None:
        """Queue the launches of `work`. The second call with a shape records them; later calls replay the recording."""
        replay = self._recorded.get(shape)
        if replay is None:
            replay = self._record(shape, work) if shape in self._seen and not self.refused else work
            self._seen.add(shape)
        replay()

    def _record(self, shape: Hashable, work: Callable[[], None]) -> Callable[[], None]:
        if len(self._recorded) >= self._most:
            self.clear()
        try:
            self._recorded[shape] = replay = self._device.record(work)
        except BackendError as error:
            self.refused = str(error)
            return work
        return replay

    def clear(self) -> None:
        """Drop all recordings. Must be called before the memory in use is freed."""
        try:
            self._device.sync()
        finally:
            self._recorded.clear()


def bucket(partitions: int) -> int:
    """Return the number of partitions, rounded up to a power of two."""
    return 1 << (partitions - 1).bit_length()
