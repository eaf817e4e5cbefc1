"""The paged KV cache is compared with a plain list per sequence. Every token must read the data of the right
sequence.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from numpy.typing import NDArray

from localllm.base.errors import LocalLLMError
from localllm.engine import paging
from localllm.engine.paging import BlockPool, CacheFull, CacheSequence, how_many_fit

WINDOW, SLACK = 6, 8


class Conversation:
    """A sequence and its expected contents."""

    def __init__(self, sequence: CacheSequence, values: list[int]) -> None:
        self.sequence = sequence
        self.values = values
        self.slack = paging.SLACK
        self.evaluated = 0  # number of values whose step has run


class PagedCache(RuleBasedStateMachine):
    """A simulated KV cache with one number per slot. Several sequences may change between two steps, as when
    a scheduler builds a batch.

    Sliding-window layers have fewer blocks. Visible positions are always stored, and others while blocks are free.
    """

    conversations = Bundle("conversations")

    def __init__(self) -> None:
        super().__init__()
        self.size, self.blocks = 4, 9
        windowed = BlockPool(7, self.size, WINDOW)
        self.pools = [BlockPool(self.blocks, self.size, windowed=windowed), windowed]
        self.storage = [np.full(self.size * pool.blocks, -1) for pool in self.pools]
        self.pending: list[tuple[Conversation, list[NDArray[np.int32]], list[int]]] = []
        self.live: list[Conversation] = []
        self.next_value = 0

    @rule(target=conversations)
    def begin(self) -> Conversation:
        self.live.append(Conversation(self.pools[0].new_sequence(), []))
        return self.live[-1]

    @rule(who=conversations, n=st.integers(0, 14))
    def append(self, who: Conversation, n: int) -> None:
        if who.evaluated < len(who.values):
            self.step()
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
        assert [s.dtype for s in slots] == [np.int32] * 2
        assert [len(s) for s in slots] == [n] * 2
        who.values += values
        self.pending.append((who, slots, values))

    @rule(one=conversations, other=conversations, n=st.integers(1, 9), m=st.integers(1, 9))
    def append_together(self, one: Conversation, other: Conversation, n: int, m: int) -> None:
        """Append to two sequences in one step. The check whether both fit must be right and must not change
        the cache.
        """
        if one is other:
            return
        self.step()
        before = self.state()
        fit = how_many_fit([(one.sequence, n), (other.sequence, m)])
        assert self.state() == before
        assert (fit > 0) == (n <= one.sequence.room)
        if fit == 2:
            self.append(one, n)
            assert m <= other.sequence.room
            self.append(other, m)

    @rule(who=conversations)
    def abort(self, who: Conversation) -> None:
        """Cancel the step for the newest tokens, as after an error or Ctrl-C."""
        self.pending = [entry for entry in self.pending if entry[0] is not who]
        assert who.sequence.reach(who.evaluated) == who.evaluated
        self.cut(who, who.evaluated)

    @rule(who=conversations, back=st.integers(0, SLACK))
    def take_back(self, who: Conversation, back: int) -> None:
        """Remove rejected draft tokens. A few tokens can always be removed, even if blocks were freed."""
        self.abort(who)
        length = max(0, len(who.values) - min(back, who.slack))
        assert who.sequence.reach(length) == length
        self.cut(who, length)

    @rule(who=conversations, share=st.floats(0, 1))
    def truncate(self, who: Conversation, share: float) -> None:
        self.abort(who)
        self.cut(who, who.sequence.reach(int(share * len(who.values))))

    def cut(self, who: Conversation, length: int) -> None:
        who.sequence.truncate(length)
        del who.values[length:]
        who.evaluated = length

    @rule(target=conversations, who=conversations)
    def fork(self, who: Conversation) -> Conversation:
        if who.evaluated < len(who.values):
            self.step()
        self.live.append(Conversation(who.sequence.fork(), who.values.copy()))
        self.live[-1].evaluated, self.live[-1].slack = who.evaluated, who.slack
        return self.live[-1]

    @rule(target=conversations, who=conversations)
    def keep_and_take_up(self, who: Conversation) -> Conversation:
        """Save and restore whole blocks, as in a prompt cache file. Sliding-window layers save only the visible
        blocks.
        """
        if who.evaluated < len(who.values):
            self.step()
        values = who.values[: len(who.values) // self.size * self.size]
        copy = Conversation(self.pools[0].new_sequence(), [])
        copy.slack = SLACK // 2
        self.live.append(copy)
        contents = [self.seen(who, n, max(0, len(values) - n * SLACK // 2), len(values)) for n in range(2)]
        try:
            copy.sequence.occupy(values)
        except CacheFull:
            assert copy.sequence.length == 0
            return copy
        copy.values, copy.evaluated = values.copy(), len(values)
        for n, (first, content) in enumerate(contents):
            table = copy.sequence.tables()[n][first // self.size :]
            self.storage[n].reshape(-1, self.size)[table] = np.reshape(content, (-1, self.size))
        return copy

    @rule(who=consumes(conversations))
    def free(self, who: Conversation) -> None:
        self.abort(who)
        who.sequence.free()
        assert [t.tolist() for t in who.sequence.tables()] == [[], []]
        self.live.remove(who)

    @rule()
    def step(self) -> None:
        """Run all copies at once and then the writes, in the same way as a backend."""
        for pool, storage in zip(self.pools, self.storage, strict=True):
            source, target = pool.take_copies()
            assert len(set(target.tolist())) == len(target)
            by_block = storage.reshape(pool.blocks, self.size)
            by_block[target] = by_block[source]
        for _, slots, values in self.pending:
            for storage, places in zip(self.storage, slots, strict=True):
                storage[places] = values
        # Positions visible to the first new token, and those visible to the token after this step.
        for who, _, values in self.pending:
            start = len(who.values) - len(values)
            for n, length in ((0, 0), (1, max(0, start + 1 - WINDOW))):
                assert self.read(who, n)[length:] == who.values[length:]
            who.evaluated = len(who.values)
        self.pending.clear()
        for who in self.live:
            for n in range(2):
                first, found = self.seen(who, n, len(who.values), len(who.values))
                assert found == who.values[first:]

    def read(self, who: Conversation, n: int) -> list[int]:
        table = who.sequence.tables()[n]
        return self.storage[n].reshape(-1, self.size)[table].ravel()[: len(who.values)].tolist()  # type: ignore[no-any-return]

    def seen(self, who: Conversation, n: int, length: int, end: int) -> tuple[int, list[int]]:
        """Return the first position visible after `length` tokens, in whole blocks, and the stored values up to
        `end`.
        """
        first = self.pools[n].first_seen(length) * self.size
        return first, self.read(who, n)[first:end]

    @invariant()
    def every_block_is_free_or_counted(self) -> None:
        for n, pool in enumerate(self.pools):
            users = Counter(block for who in self.live for block in who.sequence._tables[n].blocks)
            assert [users[block] for block in range(pool.blocks)] == pool._users
            assert sorted([*pool._free, *users]) == list(range(pool.blocks))
        for who in self.live:
            assert who.sequence.tokens == who.values
            assert [len(t) for t in who.sequence.tables()] == [-(-who.sequence.length // self.size)] * 2

    def state(self) -> object:
        return (
            [(who.sequence.tokens.copy(), [t.tolist() for t in who.sequence.tables()]) for who in self.live],
            [(pool._users.copy(), pool._free.copy(), pool._copies.copy()) for pool in self.pools],
        )

    def teardown(self) -> None:
        self.step()
        for who in self.live:
            who.sequence.free()
        for pool in self.pools:
            assert pool.free_blocks == pool.blocks


PagedCache.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class TestAnyHistoryOfEdits(PagedCache.TestCase):  # type: ignore[misc]
    @pytest.fixture(autouse=True)
    def little_slack(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paging, "SLACK", SLACK)


def test_slots_follow_the_block_table() -> None:
    pool = BlockPool(blocks=8, block_size=4)
    other, sequence = pool.new_sequence(), pool.new_sequence()
    assert sequence.append(range(3))[0].tolist() == [0, 1, 2]
    assert other.append([7])[0].tolist() == [4]
    assert sequence.append(range(6))[0].tolist() == [3, 8, 9, 10, 11, 12]
    assert sequence.tables()[0].tolist() == [0, 2, 3]


def test_a_shared_block_is_copied_by_the_first_to_write() -> None:
    pool = BlockPool(blocks=4, block_size=4)
    first = pool.new_sequence()
    first.append(range(6))
    second = first.fork()
    assert second.append([9])[0].tolist() == [2 * 4 + 2]
    assert first.append([8])[0].tolist() == [1 * 4 + 2]  # the block has no other user now, so it is not copied
    assert [pairs.tolist() for pairs in pool.take_copies()] == [[1], [2]]
    assert [pairs.tolist() for pairs in pool.take_copies()] == [[], []]
    assert (first.tables()[0].tolist(), second.tables()[0].tolist()) == ([0, 1], [0, 2])


def test_a_copy_of_a_copy_that_is_still_to_be_made_reads_the_original() -> None:
    pool = BlockPool(blocks=4, block_size=4)
    first = pool.new_sequence()
    first.append(range(6))
    second = first.fork()
    second.append([9])
    second.truncate(6)  # neither its step nor the copy 1 -> 2 has run
    second.fork().append([9])
    assert [pairs.tolist() for pairs in pool.take_copies()] == [[1, 1], [2, 3]]


def test_a_copy_into_a_block_that_has_gone_to_another_is_not_made() -> None:
    pool = BlockPool(blocks=4, block_size=4)
    first = pool.new_sequence()
    first.append(range(6))
    second = first.fork()
    second.append([9])
    second.free()
    assert pool.new_sequence().append([5])[0].tolist() == [2 * 4]
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
    assert (fork.room, pool.free_blocks) == (3, 1)  # the free block is reserved for the copy
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


def windowed(blocks: int, full: int = 40) -> BlockPool:
    return BlockPool(full, 4, windowed=BlockPool(blocks, 4, WINDOW))


def test_what_has_fallen_out_of_the_window_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "SLACK", 2)
    pool = windowed(4)
    sequence = pool.new_sequence()
    for token in range(120):
        sequence.append([token])
        tables = sequence.tables()
        assert len(tables[1]) == len(tables[0]) == token // 4 + 1
    assert len(set(tables[0].tolist())) == 30
    assert pool.windowed is not None
    assert pool.windowed.free_blocks == 0  # blocks outside the window are not needed
    assert (sequence.reach(118), sequence.reach(111), sequence.reach(100)) == (118, 111, 0)
    assert sequence.common_prefix(list(range(100))) == 0
    assert sequence.common_prefix(list(range(118))) == 118
    other = pool.new_sequence()
    other.append([1])
    assert sequence.reach(111) == 0
    assert sequence.reach(118) == 118
    assert other.room == 7  # free slots in its own block and in a free block


def test_many_tokens_at_once_do_not_fit_a_small_pool_of_windowed_layers() -> None:
    pool = windowed(4)
    sequence = pool.new_sequence()
    assert sequence.room == 16
    with pytest.raises(CacheFull, match="17 more tokens do not fit, 16 do"):
        sequence.append(range(17))


def test_guesses_can_be_taken_back_however_little_room_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "SLACK", SLACK)
    pool = windowed(8)
    sequence, greedy = pool.new_sequence(), pool.new_sequence()
    for token in range(100):
        sequence.append([token])
    while greedy.room:
        greedy.append([1])
    assert greedy.length == 16  # the other sequence keeps 14 tokens, in four blocks
    assert sequence.reach(100 - SLACK) == 100 - SLACK
    assert sequence.reach(80) == 0


def test_how_many_fit_together_is_told_by_the_smaller_pool() -> None:
    for full, own in ((2, 3), (3, 2)):
        pool = windowed(own, full)
        assert how_many_fit([(pool.new_sequence(), 4) for _ in range(4)]) == 2


def test_copies_that_were_not_made_are_handed_out_again() -> None:
    pool = BlockPool(4, 4)
    first = pool.new_sequence()
    first.append(range(6))
    second = first.fork()
    second.append([9])
    pool.put_back(*pool.take_copies())
    assert pool.has_copies
    assert [pairs.tolist() for pairs in pool.take_copies()] == [[1], [2]]
    assert not pool.has_copies
