"""The connection of the front to the other stages: messages go in at the second stage, and answers come out after the
last. `LocalRing` has all stages in this process; `zeromq.py` has them in others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from localllm.backends.base import Backend
from localllm.cluster.cut import Cut
from localllm.cluster.errors import StageLost
from localllm.cluster.stage import Layout, Stage, bind_stage
from localllm.cluster.wire import Message, decode, encode


class Ring(Protocol):
    """All stages but the first. Messages are handled, and answered, in the order of sending."""

    def send(self, message: Message) -> None:
        """Send a message to the second stage. Raises StageLost."""
        ...

    def receive(self) -> Message:
        """Wait for the next answer. Raises StageLost if none can come any more."""
        ...

    def close(self) -> None: ...


# Starts the other stages, or those that ended. Raises StageLost if another attempt may succeed.
Connect = Callable[[Cut, Layout], Ring]


class LocalRing:
    """Stages of this process. Each message is encoded and decoded as between machines, and handled at once."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._answers: deque[bytes] = deque()

    @classmethod
    def over(cls, backends: Sequence[Backend]) -> Connect:
        """Return a function that binds the stages after the first to these backends."""

        def connect(cut: Cut, layout: Layout) -> LocalRing:
            stages: list[Stage] = []
            try:
                for number, backend in zip(range(1, cut.stages), backends, strict=True):
                    stages.append(bind_stage(number, cut, layout, backend))
            except BaseException:
                for stage in stages:
                    stage.close()
                raise
            return cls(stages)

        return connect

    def send(self, message: Message) -> None:
        data = encode(message)
        for stage in self._stages:
            answer = stage.handle(decode(data))
            if answer is None:
                return
            data = encode(answer)
        self._answers.append(data)

    def receive(self) -> Message:
        if not self._answers:
            raise StageLost("no stage has an answer to give")
        return decode(self._answers.popleft())

    def close(self) -> None:
        for stage in self._stages:
            stage.close()
