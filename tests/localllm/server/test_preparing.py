"""Pictures of one client delay neither the texts nor the pictures of others, and their memory is limited."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.engine import ContextFull
from localllm.generation.interfaces import SchedulerLimits
from localllm.loading.media_parts import Medium
from localllm.media import EncoderInput
from localllm.media.decode import Decoder
from localllm.server import preparing
from localllm.server.accounts import ACCOUNT
from localllm.server.errors import BadRequest, TooManyRequests
from localllm.server.served import Prepared, Served
from localllm.server.turn import Completion, Turn
from tests.localllm.media_models import png, write_pair

WAIT = 20


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    model = localllm.load(write_pair(tmp_path), backend="cpu", threads=1, spec="off")
    with Served(model, SchedulerLimits()) as found:
        yield found


def turn(*seeds: int) -> Turn:
    parts: list[Any] = [{"type": "image", "image": png(seed=seed)} for seed in seeds]
    return Turn([{"role": "user", "content": [*parts, {"type": "text", "text": "a"}]}])


def test_pictures_delay_no_text_and_alternate_with_those_of_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, decoded, real = threading.Event(), list[Any](), Decoder.picture

    def slow(self: Decoder, source: Any, name: str = "picture") -> Any:
        assert go.wait(WAIT)
        decoded.append(source)
        return real(self, source, name)

    async def of(account: str, asked: Turn) -> Prepared:
        ACCOUNT.set(account)
        return await served.of_turn(asked)

    async def run() -> None:
        attack = asyncio.create_task(of("a", turn(1, 2, 3)))
        await asyncio.sleep(0.05)
        try:
            text = await asyncio.wait_for(of("b", Turn([{"role": "user", "content": "a"}])), WAIT / 2)
            assert len(text.requests[0].prompt) > 3
            neighbour = asyncio.create_task(of("b", turn(4)))
            await asyncio.sleep(0.05)
        finally:
            go.set()
        await asyncio.gather(attack, neighbour)

    monkeypatch.setattr(Decoder, "picture", slow)
    asyncio.run(run())
    assert decoded == [png(seed=seed) for seed in (1, 4, 2, 3)]


def test_waiting_requests_hold_a_limited_size_of_pictures(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def of(account: str, asked: Turn) -> Prepared:
        ACCOUNT.set(account)
        return await served.of_turn(asked)

    first = asyncio.run(of("a", turn(1)))
    [piece] = served.model.encoders.parts(Medium("image", png(seed=1)))[1:2]
    assert isinstance(piece, EncoderInput)
    size = piece.nbytes
    monkeypatch.setattr(preparing, "MOST_HELD", 2 * size - 2)
    second = asyncio.run(of("b", turn(10, 11, 12)))  # a request alone may have any number
    del second
    served.model.encoders._kept.clear()
    with pytest.raises(TooManyRequests, match="pictures and sounds of waiting requests fill their memory"):
        asyncio.run(of("a", turn(3)))
    second = asyncio.run(of("b", turn(3)))
    with pytest.raises(TooManyRequests):  # all together
        asyncio.run(of("c", turn(4)))
    del first, second, piece
    served.model.encoders._kept.clear()
    assert asyncio.run(of("c", turn(4))).requests


def test_pictures_beyond_the_context_are_not_prepared(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, real = list[Any](), Decoder.picture

    def counted(self: Decoder, source: Any, name: str = "picture") -> Any:
        decoded.append(source)
        return real(self, source, name)

    monkeypatch.setattr(Decoder, "picture", counted)
    served.model.encoders.context = 20  # one picture has 16 tokens
    marked = Completion("<__media__>" * 3, media=[png(seed=seed) for seed in range(3)])
    for asked in (served.of_turn(turn(0, 1, 2)), served.of_completion(marked)):
        with pytest.raises(ContextFull, match="leave some out"):
            asyncio.run(asked)
    assert decoded == [png(seed=0), png(seed=1)]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="the decoder cannot be halted")
def test_a_server_ends_while_a_picture_is_decoded(served: Served) -> None:
    failed = list[BaseException]()

    def ask() -> None:
        try:
            asyncio.run(served.of_turn(turn(1)))
        except BaseException as error:
            failed.append(error)

    confined = served.model.encoders._decoder._child
    confined.start()
    assert confined._child is not None
    os.kill(confined._child.pid, signal.SIGSTOP)
    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    began = time.monotonic()
    served.close()
    assert time.monotonic() - began < WAIT
    asking.join(WAIT)
    assert [type(each) for each in failed] == [BadRequest]
