"""The front's requests to a ring, and their answers. Several requests may wait for their answers at the same time."""

from __future__ import annotations

from localllm.backends.base import BackendError
from localllm.cluster.errors import ClusterError, StageLost
from localllm.cluster.ring import Ring
from localllm.cluster.stage import Arrays
from localllm.cluster.wire import Kind, Message, text_of


class Exchange:
    """Sends requests and assigns the answers, which come in the order of the requests."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.lost: StageLost | None = None
        self.number = 0  # of the last request
        self._open: dict[int, Message | None] = {}  # requests whose answers are wanted, with those that came early
        self._closed = False

    def send(self, kind: Kind, integers: tuple[int, ...] = (), arrays: Arrays = ()) -> int:
        """Send a request, and return its number. All but copies have an answer."""
        if self.lost is not None:
            raise self.lost
        self.number += 1
        try:
            self.ring.send(Message(kind, self.number, integers, arrays))
        except StageLost as error:
            self.lost = error
            raise
        if kind is not Kind.COPY:
            self._open[self.number] = None
        return self.number

    def answer(self, number: int) -> Arrays:
        """Return the arrays that answer a request. On any error, the answer is forgotten."""
        try:
            while (message := self._open[number]) is None:
                self._receive(number)
        finally:
            del self._open[number]
        if message.kind is not Kind.ERROR:
            return message.arrays
        stage, kind = _stage_of(message)
        text = text_of(message.arrays[0]) if message.arrays else "unknown error"
        raise ClusterError(text) if kind == Kind.HELLO else BackendError(f"stage {stage}: {text}")

    def ask(self, kind: Kind, integers: tuple[int, ...] = (), arrays: Arrays = ()) -> Arrays:
        """Send a request, and return the arrays that answer it."""
        return self.answer(self.send(kind, integers, arrays))

    def forget(self, number: int) -> None:
        """Skip the answer to a request."""
        self._open.pop(number, None)

    def _receive(self, wanted: int) -> None:
        """Take the next answer, while the answer to `wanted` is missing."""
        if self.lost is not None:
            raise self.lost
        try:
            message = self.ring.receive()
            if message.kind is Kind.ERROR and not message.number:  # a stage gives up
                raise StageLost(text_of(message.arrays[0]) if message.arrays else "a stage gave up")
            if message.number > wanted or message.kind not in (Kind.RESULT, Kind.ERROR):
                raise StageLost(f"the stages answered request {message.number} instead of {wanted}")
        except StageLost as error:
            self.lost = error
            raise
        number = message.number
        if message.kind is Kind.ERROR and _stage_of(message)[1] == Kind.COPY:
            # the step that needs the copy fails, unless it was given up
            number = min((each for each in self._open if each > number), default=0)
        if number in self._open and self._open[number] is None:
            self._open[number] = message

    def close(self) -> None:
        """Close the ring. Further requests fail."""
        self.lost = self.lost or StageLost("the connection to the stages is closed")
        if not self._closed:
            self._closed = True
            self.ring.close()


def _stage_of(message: Message) -> tuple[int, int]:
    """Return the stage that reports an error, and the kind of the message that it could not handle."""
    stage, kind = message.integers if len(message.integers) == 2 else (-1, 0)
    return stage, kind
