"""Prompts of a replica that decodes, evaluated by other replicas, which send the finished cache blocks (DistServe).

`PromptSource` is in the replica that decodes. It asks for prompts with many tokens that are not cached, and puts the
blocks into its prefix cache, where the request finds them. `PromptServer` is in the replica that evaluates prompts, one
for each connection; it uses the scheduler there, and so its prefix cache. The blocks travel as in saved conversations
(`saved/prompt_cache.py`), in pieces. After any error, the replica that decodes evaluates the prompt itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.base.closing import Closing
from localllm.base.errors import LocalLLMError
from localllm.base.printable import printable
from localllm.cluster.errors import ClusterError, MessageError
from localllm.cluster.wire import Kind, Message, text_array, text_of
from localllm.distributed.link import Link
from localllm.generation.request import Event, Failed, Finished, Request
from localllm.generation.request import text_of as words_of
from localllm.generation.request_state import Ticket
from localllm.generation.scheduler import Scheduler
from localllm.generation.slots import Slots
from localllm.model import Model
from localllm.options import SamplingOptions
from localllm.saved.prompt_cache import CacheFileError, loaded, packed, packed_bytes, unpacked

if TYPE_CHECKING:
    from localllm.cluster.zeromq import Endpoint

LEAST = 64  # tokens that the cache lacks, from which a prompt is evaluated elsewhere
LATE = 30.0  # seconds after which a prompt is evaluated here
PIECE = 256 << 10  # bytes of a message with blocks; only whole ones count as a sign of life
MOST_BYTES = 1 << 30  # maximum size of a prompt's blocks; longer prompts are evaluated here
MOST_QUEUED = 2 << 30  # bytes of blocks that wait for the network, beyond which a prompt is refused
RETRY = 2.0  # seconds between attempts to connect
_HEADERS = 1 << 16  # bytes of a message besides its tokens or blocks
log = logging.getLogger("localllm.server")


def endpoint_bytes(context: int) -> int:
    """Return the size of the largest message, for an endpoint on either side."""
    return max(PIECE, 4 * context) + _HEADERS


class PromptServer(Closing):
    """Evaluates the prompts that arrive over one connection."""

    def __init__(self, model: Model, scheduler: Scheduler, endpoint: Endpoint) -> None:
        self._model, self._scheduler = model, scheduler
        self._tickets: dict[int, Ticket | None] = {}  # until the answer is sent; None: being submitted
        self._lock = threading.Lock()
        self.connected = True
        self._link = Link(endpoint, self._take, self._lost)
        self._link.start()

    def close(self) -> None:
        self._link.close()

    def _lost(self, reason: str) -> None:
        self.connected = False
        for number in list(self._tickets):
            self._drop(number)

    def _drop(self, number: int) -> bool:
        """Forget a prompt, and end its request if it still runs. Return whether an answer was to be sent."""
        with self._lock:
            known, ticket = number in self._tickets, self._tickets.pop(number, None)
        if ticket is not None:
            ticket.cancel()
        return known

    def _take(self, message: Message) -> None:
        if message.kind is Kind.DROP:
            self._drop(message.number)
            self._link.withdraw(message.number)
            return
        if message.kind is not Kind.PROMPT or len(message.integers) != 1 or len(message.arrays) != 2:
            raise MessageError("message: a prompt has one number and two arrays")
        number, (tokens, client) = message.number, message.arrays
        try:
            ids = self._checked(tokens)
            request = Request(ids, SamplingOptions(), 0, client=text_of(client), priority=message.integers[0])
            self._tickets[number] = None
            ticket = self._scheduler.submit(request, partial(self._listen, number, ids))
        except LocalLLMError as error:
            self._drop(number)
            self._refuse(number, error)
            return
        with self._lock:
            if number in self._tickets:  # otherwise its answer is sent
                self._tickets[number] = ticket

    def _checked(self, tokens: NDArray[Any]) -> list[int]:
        model = self._model
        if tokens.dtype != np.int32 or tokens.ndim != 1 or not 0 < len(tokens) <= model.context:
            raise MessageError(f"message: a prompt has 1 to {model.context} tokens of int32")
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < model.vocabulary:
            raise MessageError(f"message: tokens must be from 0 to {model.vocabulary - 1}")
        found: list[int] = tokens.tolist()
        if packed_bytes(model, len(found)) > MOST_BYTES:
            raise ClusterError("too many cache blocks to send")
        self._check_queue()
        return found

    def _check_queue(self) -> None:
        if self._link.queued > MOST_QUEUED:
            raise ClusterError("too many cache blocks wait for the network")

    def _refuse(self, number: int, error: Exception) -> None:
        text = text_array(printable(str(error), None) or type(error).__name__)
        self._link.send(Message(Kind.ERROR, number, (0, int(Kind.PROMPT)), (text,)))

    def _listen(self, number: int, tokens: Sequence[int], event: Event) -> None:
        """Send the blocks once they are evaluated. Runs in the scheduler's thread."""
        if isinstance(event, Failed):
            if self._drop(number):
                self._refuse(number, event.error)
        elif isinstance(event, Finished) and number in self._tickets:
            with suppress(LocalLLMError):  # the scheduler has stopped
                self._scheduler.between(lambda slots: self._answer(number, tokens, slots))

    def _answer(self, number: int, tokens: Sequence[int], slots: Slots) -> None:
        if not self._drop(number):
            return
        try:
            self._check_queue()  # again: other answers came before
            data = slots.with_cached(tokens, lambda sequence: packed(self._model, sequence))
        except (LocalLLMError, BackendError) as error:
            self._refuse(number, error)
            return
        content = np.frombuffer(data, np.uint8)
        pieces = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
        self._link.send(*[Message(Kind.RESULT, number, (at, len(pieces)), (piece,)) for at, piece in enumerate(pieces)])


@dataclass(slots=True)
class _Asked:
    """A prompt whose blocks are on their way."""

    tokens: int
    most: int  # bytes
    answer: Future[bytes] = field(default_factory=Future)
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0


class PromptClient(Closing):
    """The connection to one replica that evaluates prompts. It connects again when it is lost."""

    def __init__(self, connect: Callable[[], Endpoint], retry: float = RETRY) -> None:
        """`connect` returns a connected endpoint, or raises an error. It is called in another thread."""
        self._connect, self._retry = connect, retry
        self._lock = threading.Lock()
        self._asked: dict[int, _Asked] = {}
        self._numbers = count(1)
        self._link: Link | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_connected, name="prompts", daemon=True)
        self._lost_event = threading.Event()
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompts that wait for an answer."""
        return sum(asked.tokens for asked in list(self._asked.values()))

    def ask(self, tokens: Sequence[int], most: int, priority: int, client: str) -> tuple[int, Future[bytes]]:
        """Ask for the blocks of a prompt, of at most `most` bytes. Raises ClusterError without a connection."""
        number, asked = next(self._numbers), _Asked(len(tokens), most)
        message = Message(
            Kind.PROMPT, number, (priority,), (np.asarray(tokens, np.int32), text_array(client or "-", 200))
        )
        with self._lock:
            if self._link is None:
                raise ClusterError("the replica for prompts is not connected")
            self._asked[number] = asked
            self._link.send(message)
        return number, asked.answer

    def drop(self, number: int) -> None:
        """Give up a prompt."""
        with self._lock:
            if self._asked.pop(number, None) is not None and self._link is not None:
                self._link.send(Message(Kind.DROP, number))

    def close(self) -> None:
        self._closed.set()
        self._lost_event.set()
        with self._lock:
            link = self._link
        if link is not None:
            link.close()
        self._thread.join()

    # -- threads ---------------------------------------------------------------------------------------------------

    def _keep_connected(self) -> None:
        told = ""
        while not self._closed.is_set():
            try:
                endpoint = self._connect()
            except Exception as error:  # Ray's own among them, while an actor starts
                new = isinstance(error, LocalLLMError) and str(error) != told
                told = str(error)
                level = logging.WARNING if new else logging.INFO
                log.log(level, "no connection to a replica for prompts: %s", printable(told, 400))
                self._closed.wait(self._retry)
                continue
            self._lost_event.clear()
            with self._lock:
                self._link = Link(endpoint, self._take, self._lost)
                self._link.start()
            if self._closed.is_set():
                self._link.close()
            self._lost_event.wait()
            self._closed.wait(self._retry)

    def _lost(self, reason: str) -> None:
        with self._lock:
            self._link = None
            lost, self._asked = self._asked, {}
        if not self._closed.is_set():
            log.warning("a replica for prompts is lost: %s", printable(reason, 200))
        for asked in lost.values():
            if asked.answer.set_running_or_notify_cancel():
                asked.answer.set_exception(ClusterError("the replica for prompts is lost"))
        self._lost_event.set()

    def _take(self, message: Message) -> None:
        asked = self._asked.get(message.number)
        if asked is None:  # given up
            return
        if message.kind is Kind.ERROR:
            self._end(message.number, ClusterError(text_of(message.arrays[0]) if message.arrays else "no reason given"))
            return
        if message.kind is not Kind.RESULT or len(message.integers) != 2 or len(message.arrays) != 1:
            raise MessageError("message: an answer to a prompt has two numbers and one array")
        (at, total), (piece,) = message.integers, message.arrays
        asked.size += piece.nbytes
        if piece.dtype != np.uint8 or at != len(asked.pieces) or not at < total <= -(-asked.most // PIECE):
            raise MessageError("message: a piece of blocks has a wrong place")
        if asked.size > asked.most:
            raise MessageError(f"message: more than {asked.most} bytes of blocks")
        asked.pieces.append(piece.tobytes())
        if at == total - 1:
            self._end(message.number, None)

    def _end(self, number: int, error: ClusterError | None) -> None:
        with self._lock:
            asked = self._asked.pop(number, None)
        if asked is not None and asked.answer.set_running_or_notify_cancel():
            if error is not None:
                asked.answer.set_exception(error)
            else:
                asked.answer.set_result(b"".join(asked.pieces))


class PromptSource(Closing):
    """Gets the blocks of prompts from other replicas, before their requests are submitted."""

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        clients: Sequence[PromptClient],
        least: int = LEAST,
        late: float = LATE,
        most_waiting: int = 0,
    ) -> None:
        """`least` is the number of tokens that the cache lacks from which a prompt is asked for. A prompt is evaluated
        here if more than `most_waiting` tokens wait elsewhere (0: never).
        """
        self._model, self._scheduler, self._clients = model, scheduler, clients
        self._least, self._late, self._most_waiting = least, late, most_waiting
        self.fetched = self.failed = 0  # prompts

    async def fetch(self, request: Request) -> None:
        """Put the blocks of a request's prompt into the prefix cache, except for its last token. Raises no error: what
        is missing is evaluated here.
        """
        tokens = words_of(request.prompt)
        plain = len(tokens) == len(request.prompt) and self._model.engine.start is None
        if not plain or request.whole_prompt or not request.reuse or len(tokens) <= self._least:
            return
        try:
            if await self._fetch(request, tokens[:-1]):
                self.fetched += 1
        except (LocalLLMError, TimeoutError) as error:
            self.failed += 1
            log.warning("a prompt is evaluated here: %s", printable(str(error) or "no answer in time", 200))

    async def _fetch(self, request: Request, tokens: list[int]) -> bool:
        """Return whether the blocks were put into the cache."""
        model, most = self._model, packed_bytes(self._model, len(tokens))
        if most > MOST_BYTES or len(tokens) >= model.context:
            return False
        have = await asyncio.wrap_future(self._scheduler.between(lambda slots: slots.cached(tokens)))
        client = min((each for each in self._clients if each.connected), key=lambda each: each.tokens, default=None)
        if len(tokens) - have < self._least or client is None:
            return False
        if self._most_waiting and client.tokens > self._most_waiting:
            return False
        number, answer = client.ask(tokens, most, request.priority, request.client)
        try:
            data = await asyncio.wait_for(asyncio.wrap_future(answer), self._late)
        finally:
            client.drop(number)
        kept = await asyncio.to_thread(unpacked, data, model)
        if kept.media or not kept.tokens or kept.tokens != tokens[: len(kept.tokens)]:
            raise CacheFileError("the blocks that arrived belong to another prompt")
        await asyncio.wrap_future(
            self._scheduler.between(lambda slots: slots.take_up(lambda: (loaded(kept, model), 0)))
        )
        return True

    def close(self) -> None:
        for client in self._clients:
            client.close()
