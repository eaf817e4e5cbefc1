"""Messages survive the wire, and damaged or hostile bytes end in one error: in the decoder, and in a stage."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from localllm.backends.base import F16_CACHE, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.cluster.cut import even_cut
from localllm.cluster.errors import MessageError
from localllm.cluster.executable import SplitExecutable
from localllm.cluster.ring import LocalRing
from localllm.cluster.stage import MOST_TOP_K, Layout, Stage, bind_stage
from localllm.cluster.wire import Kind, Message, decode, encode, text_of
from localllm.plan import BLOCK, Batch
from tests.localllm.engine.support import PLANS

LIMITS = Limits(8, 8, 6, 2 * BLOCK, window_blocks=5)
ARRAYS = (
    np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.int32), np.arange(7, dtype=np.uint8),
    np.array([-1], np.int64), np.array([0.5]), np.empty((0, 9), np.float32), np.empty(0, np.int32),
)  # fmt: skip
MESSAGE = Message(Kind.WRITE, 2**63, (-1, 2**40), ARRAYS)


def test_a_message_is_the_same_behind_the_wire() -> None:
    data = encode(MESSAGE)
    found = decode(data)
    assert (found.kind, found.number, found.integers) == (MESSAGE.kind, MESSAGE.number, MESSAGE.integers)
    for ours, theirs in zip(found.arrays, ARRAYS, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(ours, theirs)
        assert ours.flags.aligned
        assert not ours.flags.writeable or not ours.size
    odd = np.array([0x7FC00001, 0xFF800000, 0x80000000, 1], np.uint32).view(np.float32)[None]  # NaN, -inf, -0, tiny
    again = decode(encode(Message(Kind.STEP, 1, (), (odd,)))).arrays[0]
    assert again.tobytes() == odd.tobytes()
    assert decode(encode(Message(Kind.STEP, 1, (), (odd[:, ::2],)))).arrays[0].tolist()[0][1] == 0.0


def test_every_truncation_and_every_extension_is_noticed() -> None:
    data = encode(MESSAGE)
    for size in range(len(data)):
        with pytest.raises(MessageError):
            decode(data[:size])
    with pytest.raises(MessageError, match="announced"):
        decode(data + b"\0")
    for number in (b"LLMT", b"LLMS\1"):
        with pytest.raises(MessageError, match="another program or version"):
            decode(number + data[len(number) :])


def test_damaged_bytes_give_a_message_or_an_error_and_little_memory() -> None:
    data, random = encode(MESSAGE), np.random.default_rng(7)
    tracemalloc.start()
    outcomes = {True: 0, False: 0}
    for _ in range(1500):
        damaged = bytearray(data)
        for at in random.integers(0, len(data), random.integers(1, 4)):
            damaged[at] = random.integers(0, 256)
        try:
            decode(bytes(damaged))
            outcomes[True] += 1
        except MessageError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 40
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1 << 63, 1 << 63), "does not fit"),
        ((1 << 62, 4), "does not fit"),
        ((0, 1 << 63), "does not fit"),
        ((3, 3), "does not fit"),
        ((1, 3), "follow its arrays"),
    ],
)
def test_a_shape_larger_than_its_message_is_refused(shape: tuple[int, int], message: str) -> None:
    data = bytearray(encode(Message(Kind.STEP, 1, (), (np.zeros((2, 4), np.float32),))))
    struct.pack_into("<QQ", data, len(data) - 32 - 16, *shape)
    with pytest.raises(MessageError, match=message):
        decode(bytes(data))


# -- a stage and hostile messages ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stages() -> Iterator[tuple[Stage, list[Message]]]:
    """Provide the last of two stages, and messages that it handles: a step, a copy, a read and a write."""
    plan, backend = PLANS["experts and windows"](), CpuBackend(1)
    cut = even_cut(plan, 2)
    layout = Layout(cut.firsts, LIMITS, F16_CACHE)
    first, second = (bind_stage(number, cut, layout, backend) for number in (0, 1))
    sent: list[Message] = []

    class Tapped(LocalRing):
        def send(self, message: Message) -> None:
            sent.append(message)
            super().send(message)

    executable = SplitExecutable(cut, layout, first, Tapped([second]))
    rows = np.arange(5, dtype=np.int32)
    tables = np.array([[1, 2], [3, 4]], np.int32)
    sequence = np.array([0, 0, 0, 1, 1], np.int32)
    positions = np.array([0, 1, 2, 0, 1], np.int32)
    batch = Batch(
        rows, positions, tables[sequence, 0] * BLOCK + positions, sequence, tables, rows[[2, 4]],
        tables[sequence, 0] * BLOCK + positions, tables,
    )  # fmt: skip
    executable.step(batch)
    executable.copy_blocks(rows[:1], rows[1:2], True)
    layer = len(plan.layers) - 1
    executable.write_blocks(layer, rows[:1], executable.read_blocks(layer, rows[:1]))
    yield second, [replace(message) for message in sent if message.kind is not Kind.HELLO]
    executable.close()
    backend.close()


def refused(stage: Stage, message: Message) -> str:
    answer = stage.handle(message)
    assert answer is not None
    assert answer.kind is Kind.ERROR
    assert answer.number == message.number
    return text_of(answer.arrays[0])


def test_the_messages_of_a_step_and_of_the_cache_are_handled(stages: tuple[Stage, list[Message]]) -> None:
    stage, messages = stages
    assert [message.kind for message in messages] == [Kind.STEP, Kind.COPY, Kind.READ, Kind.WRITE]
    answers = [stage.handle(message) for message in messages]
    assert [answer and answer.kind for answer in answers] == [Kind.RESULT, None, Kind.RESULT, Kind.RESULT]


def changed(message: Message, at: int, array: np.ndarray) -> Message:
    return replace(message, arrays=(*message.arrays[:at], array, *message.arrays[at + 1 :]))


def test_a_step_outside_its_memory_is_refused(stages: tuple[Stage, list[Message]]) -> None:
    stage, (step, *_) = stages
    tokens, positions, slots, sequence, tables, logit_rows, _, window_tables, hidden = step.arrays
    for at, array, text in (
        (0, tokens + 1000, "tokens must be from 0 to"),
        (0, tokens - 1, "tokens must be from 0 to"),
        (0, tokens.astype(np.int64), "needs 8 arrays of int32"),
        (1, positions + 2 * BLOCK, "positions must be from 0"),
        (2, slots + 6 * BLOCK, "slots must be from 0"),
        (2, slots[:4], "slots must be a vector"),
        (3, sequence + 1, "sequence must be from 0"),
        (4, tables + 5, "names a block outside"),
        (4, tables[:, :0], "past its table"),
        (4, tables[0], "tables of two dimensions"),
        (5, logit_rows + 3, "logit_rows must be from 0"),
        (5, np.repeat(logit_rows, 5), "rows of logits, bound for 8"),
        (7, window_tables[:1], "window_tables must have 2 rows"),
        (8, hidden[:4], "expected float32 values of shapes"),
        (8, hidden[:, :7], "expected float32 values of shapes"),
        (8, hidden.astype(np.float64), "expected float32 values"),
    ):
        assert text in refused(stage, changed(step, at, np.ascontiguousarray(array))), (at, text)
    assert "needs 8 arrays" in refused(stage, replace(step, arrays=step.arrays[:7]))
    assert "STEP needs 2 integers" in refused(stage, replace(step, integers=()))
    for top_k in (-1, MOST_TOP_K + 1):
        assert "largest logits" in refused(stage, replace(step, integers=(top_k, 1)))
    assert "expected float32" in refused(stage, replace(step, arrays=(*step.arrays, hidden)))


def test_cache_blocks_outside_the_cache_are_refused(stages: tuple[Stage, list[Message]]) -> None:
    stage, (_, copy, read, write) = stages
    for message, at, array in (
        (copy, 0, np.array([5], np.int32)),  # window blocks: 0 to 4
        (copy, 1, np.array([-1], np.int32)),
        (copy, 1, np.array([1, 2], np.int32)),
        (copy, 1, np.array([[1]], np.int32)),
        (read, 0, np.array([9], np.int32)),
        (read, 0, np.array([1.0])),
        (write, 0, np.array([9], np.int32)),
        (write, 1, np.zeros((1, 3), np.uint8)),
        (write, 1, write.arrays[1].view(np.float32)),
    ):
        assert refused(stage, changed(message, at, array)), (message.kind, at)
    for layer in (-1, 99):
        assert "cache layers" in refused(stage, replace(read, integers=(1, layer)))
    assert "is not kept" in refused(stage, Message(Kind.VALUE, 1, (1, 0)))
    assert "has 0 heads" in refused(stage, Message(Kind.DRAFT, 1, (0, 0)))
    assert "another model" in refused(stage, Message(Kind.HELLO, 1))
    elsewhere = replace(read, integers=(7, 0))
    assert stage.handle(elsewhere) is elsewhere  # for another stage: passed on


def test_damaged_messages_leave_a_stage_working(stages: tuple[Stage, list[Message]]) -> None:
    stage, messages = stages
    random, answers = np.random.default_rng(11), set()
    whole = stage.handle(messages[0])
    assert whole is not None
    for number in range(1500):
        message = messages[number % len(messages)]
        damaged = bytearray(encode(message))
        for at in random.integers(24, len(damaged), random.integers(1, 3)):
            damaged[at] = random.integers(0, 256)
        try:
            answer = stage.handle(decode(bytes(damaged)))
        except MessageError:
            continue
        answers.add(None if answer is None else answer.kind)
    assert answers >= {None, Kind.RESULT, Kind.ERROR}
    again = stage.handle(messages[0])
    assert again is not None
    np.testing.assert_array_equal(again.arrays[0], whole.arrays[0])
