"""Steps of few rows again and again: their launches are recorded once per shape and replayed as one.

Tokens, positions and tables are read from device memory, so a replay is right for every batch of its shape: rows, rows
of logits, partitions of attention in powers of two (work-groups past the last one find nothing to do).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from localllm.backends.base import BackendError
from localllm.backends.gpu.device import Device

MOST = 64  # shapes that are held of a part of a plan


class Replays:
    """What a device has recorded, by shape."""

    def __init__(self, device: Device, most: int = MOST) -> None:
        self._device, self._most = device, most
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, Callable[[], None]] = {}
        self.refused = ""  # why the device records nothing, where it does not

    def run(self, shape: Hashable, work: Callable[[], None]) -> None:
        """Queue what `work` queues; at the second time of a shape that is recorded, from then on replayed."""
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
        """Before what was recorded would use memory that is gone."""
        self._device.sync()
        self._recorded.clear()


def bucket(partitions: int) -> int:
    """The power of two that stands for so many."""
    return 1 << (partitions - 1).bit_length()
