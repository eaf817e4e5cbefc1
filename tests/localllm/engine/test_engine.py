"""Many sequences in one step have the same bits as separate sequences. A step that does not fit changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from localllm.backends.base import Backend, BackendError, Limits
from localllm.backends.cache import CACHE_TYPES
from localllm.backends.cpu.backend import CpuBackend
from localllm.base.errors import LocalLLMError
from localllm.engine import CacheFull, ContextFull, Engine, SequenceRows, StepTooLarge, top_k_of
from localllm.plan import BLOCK
from tests.backends.gpu.conftest import pocl
from tests.localllm.engine.support import (
    ALONE,
    ATTENDING,
    FEW,
    LIMITS,
    PLANS,
    RECURRENT,
    Live,
    Schedule,
    alone,
    engine_of,
    state,
)


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=1)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def card() -> Iterator[Backend]:
    backend = pocl()
    yield backend
    backend.close()


@pytest.fixture
def small(cpu: CpuBackend) -> Iterator[Engine]:
    """Provide a KV cache of four blocks, too small for two sequences of three blocks."""
    engine = engine_of(cpu, PLANS["llama"](), Limits(rows=80, logit_rows=16, blocks=4, positions=3 * BLOCK))
    yield engine
    engine.executable.close()


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, cache) for name in ATTENDING for cache in CACHE_TYPES), *((name, "f16") for name in RECURRENT)],
)
def test_sequences_together_get_the_bits_they_have_alone(cpu: CpuBackend, name: str, cache: str) -> None:
    """The steps have up to 16 sequences: prompt chunks together with decoded tokens, forks, truncations, and
    steps that do not fit.
    """
    plan = PLANS[name]()
    engines = engine_of(cpu, plan, LIMITS, cache), engine_of(cpu, plan, ALONE, cache)
    total = dict[str, int]()
    for seed, (most, steps) in enumerate([(1, 12), (3, 20), (16, 50)]):
        schedule = Schedule(*engines, plan.logits.width, seed, long=40, longest=40)
        schedule.run(steps, most)
        total = {name: total.get(name, 0) + count for name, count in schedule.counts.items()}
    assert total["compared"] > 500
    assert min(total["mixed"], total["forks"], total["truncated"]) > 10
    assert total["refused"] > 0
    assert schedule.counts["together"] >= 12
    for engine in engines:
        engine.executable.close()


@pytest.mark.parametrize(
    ("name", "cache"), [*(("llama", cache) for cache in CACHE_TYPES), ("experts and windows", "q8_0")]
)
def test_decoded_rows_on_a_card_get_the_bits_they_have_alone(card: Backend, name: str, cache: str) -> None:
    """Sequences run separately, together, and with long prompt chunks. Results are compared for up to 16
    tokens of a sequence per step.
    """
    plan = PLANS[name]()
    engines = engine_of(card, plan, LIMITS, cache), engine_of(card, plan, ALONE, cache)
    for seed, (most, steps) in enumerate([(2, 8), (16, 30)]):
        schedule = Schedule(*engines, plan.logits.width, seed, long=FEW, longest=40)
        schedule.run(steps, most)
    assert schedule.counts["compared"] > 80
    assert min(schedule.counts["mixed"], schedule.counts["forks"]) > 3
    for engine in engines:
        engine.executable.close()


def test_largest_of_says_what_the_device_says() -> None:
    """Ties are ordered by id, NaN comes first, and zeros of both signs are equal."""
    logits = np.array([[1, 3, 3, -np.inf, 2], [5, np.nan, 5, np.nan, np.inf], [-0.0, 0.0, -1, -0.0, -2]], np.float32)
    found = top_k_of(logits, 3)
    assert found.ids.tolist() == [[1, 2, 4], [1, 3, 4], [0, 1, 3]]
    assert found.ids.dtype == np.int32
    assert not np.signbit(found.logits[2]).any()
    assert top_k_of(logits, 9).ids.shape == (3, 5)


# -- what does not fit -----------------------------------------------------------------------------------------------


def test_a_step_that_does_not_fit_the_cache_changes_nothing(small: Engine) -> None:
    one, two = small.add(), small.add()
    small.step([SequenceRows(one, [1] * 40), SequenceRows(two, [2] * 40)])
    assert (small.free_blocks, small.room(one)) == (2, 3 * BLOCK - 40)
    fork = small.fork(one)  # the fork shares a block, and needs a copy if both sequences write to it
    live = [Live(one), Live(two), Live(fork)]
    before = state(small, live)
    wanted = [SequenceRows(one, [1] * 25), SequenceRows(two, [2] * 25), SequenceRows(fork, [3] * 2)]
    assert not small.fits([(part.sequence, len(part.tokens)) for part in wanted])
    with pytest.raises(CacheFull, match="52 more tokens do not fit, 25 do") as error:
        small.step(wanted)
    assert error.value.fit == 25
    assert state(small, live) == before
    small.step([SequenceRows(one, [1]), SequenceRows(two, [2]), SequenceRows(fork, [3])])
    assert [s.length for s in (one, two, fork)] == [41, 41, 41]
    assert small.free_blocks == 1


def test_the_last_that_shares_a_block_needs_no_copy(small: Engine) -> None:
    """Four blocks are enough for four sequences that continue from the same tokens, but not for a fifth."""
    first = small.add()
    small.step([SequenceRows(first, [1, 2, 3])])
    four = [first, *(small.fork(first) for _ in range(3))]
    fifth = small.fork(first)
    assert not small.fits([(one, 1) for one in [*four, fifth]])
    small.release(fifth)
    assert small.fits([(one, 1) for one in four])
    small.step([SequenceRows(one, [n]) for n, one in enumerate(four)])
    assert small.free_blocks == 0


def test_more_than_a_step_or_a_sequence_takes(small: Engine) -> None:
    one, two = small.add(), small.add()
    for rows, says in (
        (
            [SequenceRows(one, [1] * 41), SequenceRows(two, [1] * 40)],
            "81 tokens, 2 of them with logits.* up to 80 and 16",
        ),
        ([SequenceRows(one, [1] * 16, "all"), SequenceRows(two, [1])], "17 tokens, 17 of them with logits"),
    ):
        with pytest.raises(StepTooLarge, match=says):
            small.step(rows)
    for rows in ([], [SequenceRows(one, [])]):
        with pytest.raises(LocalLLMError, match="at least one"):
            small.step(rows)
    small.step([SequenceRows(one, [1] * 80)])
    small.step([SequenceRows(one, [1] * 80)])
    with pytest.raises(ContextFull, match="the context of 192 tokens is full: 160 are in use and 33 more do not fit"):
        small.step([SequenceRows(two, [1]), SequenceRows(one, [1] * 33)])
    assert not small.fits([(one, 33)])
    assert (one.length, two.length, small.room(one)) == (160, 0, 32)


def test_a_step_that_fails_takes_all_its_tokens_back(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the copies of shared blocks fail too, the next step repeats the copies."""
    one = small.add()
    small.step([SequenceRows(one, [1, 2, 3])])
    two, other = small.fork(one), small.add()
    with pytest.raises(BackendError, match="tokens must be"):
        small.step([SequenceRows(one, [4]), SequenceRows(two, [5]), SequenceRows(other, [10_000])])
    assert [s.length for s in (one, two, other)] == [3, 3, 0]
    third = small.fork(one)

    def fails(*_: Any) -> None:
        raise BackendError("no copies today")

    with monkeypatch.context() as patched:
        patched.setattr(small.executable, "copy_blocks", fails)
        with pytest.raises(BackendError, match="today"):
            small.step([SequenceRows(third, [4]), SequenceRows(two, [5])])
    assert [s.length for s in (one, two, third)] == [3, 3, 3]
    found = small.step([SequenceRows(third, [6]), SequenceRows(two, [7])])
    together = [result.logits.copy() for result in found]
    for sequence in (one, two, third, other):
        small.release(sequence)
    for token, logits in zip((6, 7), together, strict=True):
        np.testing.assert_array_equal(alone(small, [1, 2, 3, token], 4)[3:], logits)


def test_a_block_still_to_be_copied_is_copied_before_it_is_filled(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block must get its pending copy before other content. A pending copy remains after a failed step, and its
    source can then be filled from a prompt cache file.
    """
    tokens = [1, 2, 3, 4, 5] * 14
    truth = alone(small, [*tokens, 6], 16)[-1:]
    one = small.add()
    small.step([SequenceRows(one, tokens)])
    two = small.fork(one)

    def fails(*_: Any) -> None:
        raise BackendError("no copies today")

    with monkeypatch.context() as patched:
        patched.setattr(small.executable, "copy_blocks", fails)
        with pytest.raises(BackendError, match="today"):
            small.step([SequenceRows(two, [6])])
    last = one.blocks[-1]
    small.release(one)
    other = small.add()
    with small.taking(other, [0] * BLOCK):
        assert other.blocks == [last]
        small.executable.write_blocks(0, np.array([last]), small.executable.read_blocks(0, np.array([last])) * 0)
    np.testing.assert_array_equal(small.step([SequenceRows(two, [6])])[0].logits, truth)
