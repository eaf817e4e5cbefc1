"""What a front and its replicas send each other through Ray: plain data, without functions or open files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.constrained.request import Constrained, Recipe
from localllm.generation.interfaces import Load
from localllm.generation.request import Event, Request, text_of

if TYPE_CHECKING:
    from localllm.cluster.secured import Peer

CHUNK = 64  # tokens of a prompt that have one hash; the router compares whole chunks


class States(NamedTuple):
    """Hidden states (n, width) of prompt tokens from `start` on, for a request with `Request.states`."""

    start: int
    rows: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request on its way to a replica. Its constraint travels as a recipe, which the replica follows itself, and its
    prompt as tokens of text, and as pictures and sounds.
    """

    front: str  # name of the front whose outbox takes the events
    number: int  # of this attempt: a request that is sent again has a new number
    request: Request
    recipe: Recipe | None
    states: bool  # whether the front wants the hidden states
    chunks: tuple[int, ...]  # hashes of the chunks of the prompt and the known answer, for the router
    tokens: int  # number of tokens of both, pictures and sounds included
    media: tuple[tuple[int, bytes], ...] = ()  # see `localllm.distributed.media.packed`

    @classmethod
    def of(
        cls,
        front: str,
        number: int,
        request: Request,
        prompt: Sequence[int],
        known: Sequence[int],
        media: tuple[tuple[int, bytes], ...] = (),
    ) -> Ask:
        """Return the message for a request. The client already has the answer's first tokens, `known`. `prompt` is as
        `media.routed` returns it, and `media` as `packed` does.
        """
        made = request.constraint
        assert made is None or isinstance(made, Constrained), "a constraint without a recipe cannot be sent"
        plain = replace(
            request, prompt=text_of(request.prompt), constraint=None, dry_breakers=None, states=None, observer=None,
            processor=None, known=tuple(known),
        )  # fmt: skip
        recipe = None if made is None else made.recipe
        text = [*prompt, *known]
        return cls(front, number, plain, recipe, request.states is not None, chunks_of(text), len(text), media)


@dataclass(frozen=True, slots=True)
class Listen:
    """Asks one replica, by its id, for the events of a front's requests."""

    front: str
    replica: str
    key: bytes = b""  # of the front for a direct connection; "": without one


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a replica runs. Its first report has it."""

    actor: str  # its actor's name in Ray, and the namespace of the name
    namespace: str
    process: int
    node: str
    stages: int = 1
    hop_seconds: float = 0.0  # from a stage to the next
    problem: str = ""  # why it cannot answer
    peer: Peer | None = None  # for a direct connection


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica has to tell: the events since the last report, by the number of their request. Without events it
    is a heartbeat.
    """

    events: Sequence[tuple[int, Event | States]]
    load: Load | None = None  # if it was counted again, with `restarted` and `recovering`
    steps: Sequence[tuple[int, int]] = ()  # sequences, and sequences with drafts, of each step since the last report
    origin: Origin | None = None  # in the first report
    recovering: float = 0.0  # seconds since the replica waits for lost stages; 0: it does not
    restarted: int = 0  # stages that the replica has started again
    number: int = 0  # from 1: reports with events are taken in this order, those without a number at once
    before: int = 0  # number of the report before this one, if this one has no number


def chunks_of(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return a hash for each whole chunk of the tokens. Each covers all tokens before it, too."""
    data = np.asarray(tokens, np.int32)
    found, last = [], b""
    for end in range(CHUNK, len(data) + 1, CHUNK):
        last = blake2b(last + data[end - CHUNK : end].tobytes(), digest_size=8).digest()
        found.append(int.from_bytes(last, "little"))
    return tuple(found)
