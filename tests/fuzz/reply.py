"""A compromised confined child process replies with random bytes.

A call must return the right answer or raise ConfinedError. The next call must return the right answer.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from localllm.sandbox import Confined, ConfinedError, ResourceLimits
from localllm.sandbox.wire import HEAD
from tests.fuzz import reply_task, values
from tests.fuzz.case import Case, Wrong
from tests.fuzz.children import PerProcess

HONEST = {"answer": {"text": "Hello", "spans": [[0, 5, True]], "none": None}}


class Kind:
    together: ClassVar[int] = 100
    seconds: ClassVar[float] = 30.0

    def __init__(self, home: Path) -> None:
        self._child = PerProcess(reply_task.__name__, ResourceLimits(seconds=1.0, wall=2.0, answer=1 << 20))

    def make(self, random: Random, folder: Path) -> Case:
        sent = [_message(random) for _ in range(random.choice((1, 1, 1, 2, 3)))]
        parts = [base64.b64encode(part).decode() for part in sent]
        return Case((f"{len(sent)} messages, {sum(map(len, sent))} bytes",), lambda: _use(self._child.get(), parts))


def _use(child: Confined, parts: list[str]) -> str:
    try:
        answer = child.call({"send": parts})
        said = "answered"
    except ConfinedError as error:
        answer, said = {}, type(error).__name__
        if "\n" in str(error) or not str(error):
            raise Wrong(f"the message {str(error)!r}") from None
    if not isinstance(answer, dict):
        raise Wrong(f"the answer is {type(answer).__name__}")
    for number in range(2):
        try:
            found = child.call({"number": number})
        except ConfinedError as error:
            if number:  # bytes left in the pipe may fail the next call, but never give an answer
                raise Wrong(f"a good child does not answer: {error}") from None
            continue
        if found != {"number": number}:
            raise Wrong(f"call {number} got {str(found)[:200]}")
    return said


def _message(random: Random) -> bytes:
    """Return a message. `reply_task` replaces a first byte of 1 by the number of the request."""
    tree: Any = json.loads(json.dumps(HONEST))
    for _ in range(random.choice((0, 1, 1, 3))):
        values.change_json(random, tree)
    data = json.dumps(tree).encode("utf-8", "surrogatepass")
    match random.randrange(10):
        case 0:
            data = values.damage(random, data)
        case 1:
            data = random.choice((b"[", b'{"a":', b'"', b"1", b"[],", b'"",', b"\\")) * random.choice(
                (9, 5000, 400_000)
            )
        case 2:
            data = random.choice(
                (b"", b"null", b"[]", b"5", b"NaN", b'{"limit": 5}', b'{"limit": "memory"}', b'{"answer": []}')
            )
    length = len(data) if random.random() < 0.8 else values.integer(random, len(data)) % 2**64
    head = HEAD.pack(bytes(16), length)
    if random.random() < 0.05:
        head = head[: random.randrange(len(head))]
    return bytes([random.random() < 0.8]) + head + data
