"""Rings of this process that fail at a chosen message, and come back with stages whose caches hold something else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localllm.backends.base import Backend, Limits
from localllm.cluster.cut import Cut
from localllm.cluster.errors import StageLost
from localllm.cluster.ring import LocalRing
from localllm.cluster.stage import Layout, Stage, bind_stage
from localllm.cluster.wire import Message

LOST = "stage 1: its process ended"


class Faults:
    """Connects stages, and decides which message is the last one of a ring. Messages are counted over all rings."""

    def __init__(self, backend: Backend, fatal: Sequence[int] = ()) -> None:
        self._backend, self.fatal = backend, set(fatal)
        self.stages: list[Stage] = []
        self.first: list[Stage] = []  # the first stage, once it is known
        self.messages = self.connections = self.refusals = 0
        self.refused: list[int] = []  # attempts to connect that fail

    def connect(self, cut: Cut, layout: Layout) -> FaultyRing:
        self.connections += 1
        if self.connections in self.refused:
            self.refusals += 1
            raise StageLost("stage 1: no machine is free")
        if not self.stages:
            self.stages = [bind_stage(number, cut, layout, self._backend) for number in range(1, cut.stages)]
        for stage in [*self.stages, *self.first]:
            spoil(stage, layout.limits)
        return FaultyRing(self)

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


def spoil(stage: Stage, limits: Limits) -> None:
    """Overwrite the whole cache of a stage."""
    for number, (layer, size) in enumerate(zip(stage._part.layers, stage.executable.block_bytes, strict=True)):
        blocks = np.arange(limits.blocks_of(layer))
        stage.executable.write_blocks(number, blocks, np.full((len(blocks), size), 0x2A, np.uint8))


class FaultyRing(LocalRing):
    """A ring that counts sent and received messages, and fails for ever at a fatal one."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults.stages)
        self._faults, self._failed = faults, False

    def _count(self) -> None:
        if self._faults.messages in self._faults.fatal:
            self._failed = True
        self._faults.messages += 1
        if self._failed:
            raise StageLost(LOST)

    def send(self, message: Message) -> None:
        if self._faults.messages % 2:  # some messages arrive although the ring fails
            super().send(message)
            self._count()
        else:
            self._count()
            super().send(message)

    def receive(self) -> Message:
        self._count()
        return super().receive()

    def close(self) -> None:
        """The stages keep their weights."""
