"""The paged cache's bookkeeping against sequences that each own a list: every token reads as its own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from numpy.typing import NDArray

from localllm.errors import LocalLLMError
from localllm.paging import BlockPool, CacheFull, Sequence


class Conversation:
    """A sequence and what must be in it."""

    def __init__(self, sequence: Sequence, values: list[int]) -> None:
        self.sequence = sequence
        self.values = values
        self.evaluated = 0  # values of which the step has been carried out


class PagedCache(RuleBasedStateMachine):
    """Storage is one number per slot. Several edits may come between two steps, as when a scheduler builds a batch."""

    conversations = Bundle("conversations")

    def __init__(self) -> None:
        super().__init__()
        self.size, self.blocks = 4, 9
        self.pool = BlockPool(self.blocks, self.size)
        self.storage = np.full(self.size * self.blocks, -1)
        self.pending: list[tuple[Conversation, NDArray[np.int32], list[int]]] = []
        self.live: list[Conversation] = []
        self.next_value = 0

    @rule(target=conversations)
    def begin(self) -> Conversation:
        self.live.append(Conversation(self.pool.new_sequence(), []))
        return self.live[-1]

    @rule(who=conversations, n=st.integers(0, 14))
    def append(self, who: Conversation, n: int) -> None:
        values = list(range(self.next_value, self.next_value + n))
        self.next_value += n
        room = who.sequence.room
        if n > room:
            before = self.state()
            with pytest.raises(CacheFull) as error:
                who.sequence.append(values)
            assert error.value.fit == room
            assert self.state() == before
            return
        slots = who.sequence.append(values)
        assert slots.dtype == np.int32
        assert len(slots) == n
        who.values += values
        self.pending.append((who, slots, values))

    @rule(who=conversations)
    def abort(self, who: Conversation) -> None:
        """The step that was to evaluate the newest tokens does not happen, as after an error or Ctrl-C."""
        self.pending = [entry for entry in self.pending if entry[0] is not who]
        self.cut(who, who.evaluated)

    @rule(who=conversations, share=st.floats(0, 1))
    def truncate(self, who: Conversation, share: float) -> None:
        self.abort(who)
        self.cut(who, int(share * len(who.values)))

    def cut(self, who: Conversation, length: int) -> None:
        who.sequence.truncate(length)
        del who.values[length:]
        who.evaluated = length

    @rule(target=conversations, who=conversations)
    def fork(self, who: Conversation) -> Conversation:
        if who.evaluated < len(who.values):
            self.step()
        self.live.append(Conversation(who.sequence.fork(), who.values.copy()))
        self.live[-1].evaluated = who.evaluated
        return self.live[-1]

    @rule(who=consumes(conversations))
    def free(self, who: Conversation) -> None:
        self.abort(who)
        who.sequence.free()
        assert who.sequence.table().tolist() == []
        self.live.remove(who)

    @rule()
    def step(self) -> None:
        """All copies at once, then the writes: what a backend does."""
        source, target = self.pool.take_copies()
        assert len(set(target.tolist())) == len(target)
        by_block = self.storage.reshape(self.blocks, self.size)
        by_block[target] = by_block[source]
        for who, slots, values in self.pending:
            self.storage[slots] = values
            who.evaluated = len(who.values)
        self.pending.clear()
        for who in self.live:
            table = who.sequence.table()
            read = self.storage.reshape(self.blocks, self.size)[table].ravel()[: len(who.values)]
            assert read.tolist() == who.values

    @invariant()
    def every_block_is_free_or_counted(self) -> None:
        users = Counter(block for who in self.live for block in who.sequence.blocks)
        assert [users[block] for block in range(self.blocks)] == self.pool._users
        assert sorted([*self.pool._free, *users]) == list(range(self.blocks))
        for who in self.live:
            assert who.sequence.tokens == who.values
            assert len(who.sequence.blocks) == -(-who.sequence.length // self.size)

    def state(self) -> object:
        return (
            [(who.sequence.tokens.copy(), who.sequence.blocks.copy()) for who in self.live],
            self.pool._users.copy(),
            self.pool._free.copy(),
            self.pool._copies.copy(),
        )

    def teardown(self) -> None:
        self.step()
        for who in self.live:
            who.sequence.free()
        assert self.pool.free_blocks == self.blocks


PagedCache.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_any_history_of_edits = PagedCache.TestCase


def test_slots_follow_the_block_table() -> None:
    pool = BlockPool(blocks=8, block_size=4)
    other, sequence = pool.new_sequence(), pool.new_sequence()
    assert sequence.append(range(3)).tolist() == [0, 1, 2]
    assert other.append([7]).tolist() == [4]
    assert sequence.append(range(6)).tolist() == [3, 8, 9, 10, 11, 12]
    assert sequence.table().tolist() == [0, 2, 3]


def test_a_shared_block_is_copied_by_the_first_to_write() -> None:
    pool = BlockPool(blocks=4, block_size=4)
    first = pool.new_sequence()
    first.append(range(6))
    second = first.fork()
    assert second.append([9]).tolist() == [2 * 4 + 2]
    assert first.append([8]).tolist() == [1 * 4 + 2]  # now alone in its block: no second copy
    assert [pairs.tolist() for pairs in pool.take_copies()] == [[1], [2]]
    assert [pairs.tolist() for pairs in pool.take_copies()] == [[], []]
    assert (first.table().tolist(), second.table().tolist()) == ([0, 1], [0, 2])


def test_a_copy_of_a_copy_that_is_still_to_be_made_reads_the_original() -> None:
    pool = BlockPool(blocks=4, block_size=4)
    first = pool.new_sequence()
    first.append(range(6))
    second = first.fork()
    second.append([9])
    second.truncate(6)  # its step did not happen, nor did the copy 1 -> 2
    second.fork().append([9])
    assert [pairs.tolist() for pairs in pool.take_copies()] == [[1, 1], [2, 3]]


def test_a_copy_into_a_block_that_has_gone_to_another_is_not_made() -> None:
    pool = BlockPool(blocks=4, block_size=4)
    first = pool.new_sequence()
    first.append(range(6))
    second = first.fork()
    second.append([9])
    second.free()
    assert pool.new_sequence().append([5]).tolist() == [2 * 4]
    assert [pairs.tolist() for pairs in pool.take_copies()] == [[], []]


def test_full_shared_blocks_need_no_copy() -> None:
    pool = BlockPool(blocks=3, block_size=4)
    first = pool.new_sequence()
    first.append(range(4))
    first.fork().append([1])
    assert len(pool.take_copies()[0]) == 0


def test_a_full_cache_says_how_much_fits_and_changes_nothing() -> None:
    pool = BlockPool(blocks=3, block_size=4)
    sequence = pool.new_sequence()
    sequence.append(range(5))
    with pytest.raises(CacheFull, match=r"8 more tokens do not fit, 7 do \(the cache holds 12\)") as error:
        sequence.append(range(8))
    assert error.value.fit == 7
    assert isinstance(error.value, LocalLLMError)
    assert (sequence.length, pool.free_blocks) == (5, 1)
    fork = sequence.fork()
    assert (fork.room, pool.free_blocks) == (3, 1)  # the free block must hold the copy
    assert pool.new_sequence().room == 4
    sequence.append(range(3))
    with pytest.raises(CacheFull, match="1 more tokens do not fit, 0 do"):
        sequence.append([1])


def test_no_room_for_the_copy_of_a_shared_block_is_no_room_at_all() -> None:
    pool = BlockPool(blocks=1, block_size=4)
    first = pool.new_sequence()
    first.append(range(2))
    second = first.fork()
    assert (first.room, second.room) == (0, 0)
    second.free()
    assert first.room == 2


def test_common_prefix() -> None:
    sequence = BlockPool(2, 4).new_sequence()
    sequence.append([5, 6, 7])
    assert [sequence.common_prefix(t) for t in ([], [5], [5, 6, 7, 8], [5, 9, 7], [1])] == [0, 1, 3, 1, 0]
