"""Answers of a stage that is broken or was replaced: wrong shapes, types, tokens and numbers end only a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from localllm.backends.cpu.backend import CpuBackend
from localllm.cluster.errors import ClusterError, StageLost
from localllm.cluster.stage import MOST_TOP_K
from localllm.cluster.wire import Kind, Message
from localllm.engine import SequenceRows
from tests.localllm.cluster.support import local
from tests.localllm.engine.support import LIMITS, PLANS, engine_of

Change = Callable[[Message], Message]


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=1)
    yield backend
    backend.close()


def changed(arrays: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Change:
    return lambda message: Message(message.kind, message.number, message.integers, arrays(message.arrays))


@pytest.mark.parametrize(
    ("change", "top_k"),
    [
        (changed(lambda found: (found[0][:, :-1].copy(),)), 0),
        (changed(lambda found: (found[0][:-1].copy(),)), 0),
        (changed(lambda found: (found[0].astype(np.float64),)), 0),
        (changed(lambda found: (found[0].reshape(-1),)), 0),
        (changed(lambda found: ()), 0),
        (changed(lambda found: (*found, found[0])), 0),
        (changed(lambda found: (found[0] + (1 << 30), found[1])), 4),
        (changed(lambda found: (found[0] - (1 << 30), found[1])), 4),
        (changed(lambda found: (found[0][:, :2].copy(), found[1][:, :2].copy())), 4),
        (changed(lambda found: (found[1], found[1])), 4),
    ],
)
def test_a_result_that_does_not_fit_is_an_error_of_its_step(cpu: CpuBackend, change: Change, top_k: int) -> None:
    engine = engine_of(local(cpu, 2), PLANS["llama"](), LIMITS)
    ring = engine.executable._exchange.ring  # type: ignore[attr-defined]
    receive, sequence = ring.receive, engine.add()
    ring.receive = lambda: change(receive())
    with pytest.raises(ClusterError, match=r"^message: a result has"):
        engine.step([SequenceRows(sequence, [1, 2, 3], "all", top_k=top_k)])
    assert not sequence.tokens
    ring.receive = receive
    engine.step([SequenceRows(sequence, [1, 2, 3])])
    engine.executable.close()


def test_the_last_stage_selects_the_largest_logits(cpu: CpuBackend) -> None:
    """Otherwise all logits of the vocabulary travel for each token."""
    engine = engine_of(local(cpu, 2), PLANS["llama"](), LIMITS)
    assert engine.max_top_k == MOST_TOP_K
    ring, sequence, sizes = engine.executable._exchange.ring, engine.add(), list[int]()  # type: ignore[attr-defined]
    receive = ring.receive

    def counted() -> Message:
        message = receive()
        sizes.append(sum(array.size for array in message.arrays))
        return message

    ring.receive = counted
    [result] = engine.step([SequenceRows(sequence, [1, 2, 3], top_k=4)])
    assert sizes == [8]
    assert result.top_k.ids.shape == (1, 4)
    engine.executable.close()


@pytest.mark.parametrize("number", [0, 99, 1 << 63])
def test_an_answer_to_another_request_ends_the_ring(cpu: CpuBackend, number: int) -> None:
    engine = engine_of(local(cpu, 2), PLANS["llama"](), LIMITS)
    ring, sequence = engine.executable._exchange.ring, engine.add()  # type: ignore[attr-defined]
    receive = ring.receive
    ring.receive = lambda: Message(Kind.ERROR if not number else Kind.RESULT, number, (), receive().arrays)
    with pytest.raises(StageLost):
        engine.step([SequenceRows(sequence, [1, 2, 3])])
    engine.executable.close()


def test_repeated_answers_and_errors_of_copies_that_nobody_needs_are_skipped(cpu: CpuBackend) -> None:
    engine = engine_of(local(cpu, 2), PLANS["llama"](), LIMITS)
    exchange, sequence = engine.executable._exchange, engine.add()  # type: ignore[attr-defined]
    ring = exchange.ring
    receive, extra = ring.receive, list[Message]()
    engine.step([SequenceRows(sequence, [1, 2, 3])])

    def twice() -> Message:
        if extra:
            return extra.pop()
        message = receive()
        repeated = Message(Kind.RESULT, message.number - 1, (), message.arrays)
        failed = Message(Kind.ERROR, exchange.number, (1, int(Kind.COPY)))  # no later step needs the copy
        extra.extend([message, repeated, failed][:: 1 if message.number == exchange.number else 3])
        return extra.pop()

    ring.receive = twice
    exchange.forget(exchange.send(Kind.VALUE, (1, 0)))
    engine.step([SequenceRows(sequence, [4])])
    engine.executable.close()
