"""Kept prefixes are found by their blocks, evicted in order of use, and stored on disk across restarts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import localllm
from localllm.engine import BlockPool, prefix
from localllm.engine.prefix import PrefixCache, chain, same
from localllm.generation.request import Request
from localllm.generation.scheduler import Scheduler
from localllm.options import SamplingOptions
from localllm.saved.prefix_files import LEAST, PrefixFiles
from tests.localllm.generation.support import ask, stepper_of
from tests.models.kit import KIT

GREEDY = SamplingOptions(temperature=0.0)


def kept(pool: BlockPool, cache: PrefixCache, tokens: list[int]) -> object:
    sequence = pool.new_sequence()
    sequence.append(tokens)
    cache.keep(sequence)
    return sequence


def test_the_longest_common_beginning_is_found() -> None:
    pool = BlockPool(40, 4)
    cache = PrefixCache(4)
    short = kept(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8])
    long = kept(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    kept(pool, cache, [1, 2, 3, 9, 5, 6, 7, 8])
    tiny = kept(pool, cache, [7, 7])
    assert cache.find([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == (long, 10, 10)
    assert cache.find([1, 2, 3, 4, 5, 6, 0])[1] == 6  # the match ends within a block
    assert cache.find([7, 7, 7]) == (tiny, 2, 2)
    assert cache.find([5]) == (None, 0, 0)
    cache.drop(long)  # type: ignore[arg-type]
    assert cache.find([1, 2, 3, 4, 5, 6, 7, 8, 9])[0] is short


def test_the_least_recently_used_is_evicted_first() -> None:
    pool = BlockPool(10, 4)
    told: list[list[int]] = []
    cache = PrefixCache(4, lambda sequence: told.append(list(sequence.tokens)))
    kept(pool, cache, [1] * 8)
    kept(pool, cache, [2] * 8)
    cache.find([1] * 9)
    assert cache.evict()
    assert told == [[2] * 8]
    assert pool.free_blocks == 8
    cache.clear()
    assert not cache.evict()
    assert pool.free_blocks == 10


def test_the_newest_of_equal_ones_is_found_and_counts_as_used() -> None:
    pool = BlockPool(20, 4)
    cache = PrefixCache(4)
    old = kept(pool, cache, [1] * 9)
    new = kept(pool, cache, [1] * 9)
    assert cache.find([1] * 9)[0] is new
    assert list(cache) == [old, new]
    other = kept(pool, cache, [2] * 4)
    assert cache.find([1] * 9)[0] is new
    assert list(cache) == [old, other, new]


def test_a_prefix_for_a_file_has_all_its_blocks() -> None:
    """A longer sequence may have given up blocks in front of the window."""
    pool, tokens = BlockPool(400, 4, 8), list(range(1, 301))
    cache = PrefixCache(4)
    longer = pool.new_sequence()
    longer.append(tokens[:200])
    longer.settle()
    cache.keep(shorter := longer.fork())
    longer.append(tokens[200:])
    longer.settle()
    cache.keep(longer)
    assert cache.find(tokens[:200], for_file=True) == (longer, 200, 200)
    table = longer._tables[0]
    while table.unneeded:
        table.give_up()
    assert cache.find(tokens[:200]) == (longer, 200, 200)
    assert cache.find(tokens[:200], for_file=True) == (shorter, 200, 200)
    assert cache.find(tokens, for_file=True) == (longer, 300, 300)


def test_the_number_of_sequences_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MOST", 3)
    pool = BlockPool(20, 4)
    cache = PrefixCache(4)
    for first in range(5):
        kept(pool, cache, [first] * 5)
    assert [sequence.tokens[0] for sequence in cache] == [2, 3, 4]
    assert pool.free_blocks == 20 - 3 * 2
    assert cache.find([0] * 5) == (None, 0, 0)
    cache.clear()
    assert not cache._by_hash


def test_a_window_that_has_moved_on_saves_nothing_but_is_alike() -> None:
    """A sliding-window model can continue a kept prefix from its end. It can continue from an earlier
    position only if a copy was kept there.
    """
    pool = BlockPool(80, 4, windowed=BlockPool(40, 4, window=4))
    cache = PrefixCache(4)
    tokens = list(range(200))
    moved = pool.new_sequence()
    for start in range(0, 200, 8):
        moved.append(tokens[start : start + 8])
        moved.settle()
    cache.keep(moved)
    assert moved.reach(20) == 0
    assert cache.find([*tokens[:20], 0]) == (None, 0, 20)
    short = kept(pool, cache, tokens[:12])
    assert cache.find([*tokens[:20], 0]) == (short, 12, 20)
    assert cache.find([*tokens, 0]) == (moved, 200, 200)


def test_hashes_cover_whole_blocks_and_all_before_them() -> None:
    assert list(chain([1, 2, 3, 4, 5], 2)) == list(chain([1, 2, 3, 4], 2))
    assert list(chain([1, 2, 3, 4], 2))[1] != list(chain([0, 2, 3, 4], 2))[1]
    assert same(list(range(3000)), [*range(2999), 0]) == 2999
    assert same([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize("family", ["llama-dense", "qwen35-mtp", "gpt-oss-moe", "qwen4exp-8of40"])
def test_prefixes_come_back_after_a_restart(family: str, tmp_path: Path) -> None:
    path = KIT[family].write(tmp_path / "model.gguf")
    prompt = [(7 * i) % 100 for i in range(LEAST + 30)]

    def run() -> tuple[list[int], int]:
        with localllm.load(path, backend="cpu", threads=1, ctx_size=512, sequences=2) as model:
            store = PrefixFiles(tmp_path / "cache", model)
            with Scheduler(stepper_of(model, store=store)) as scheduler:
                answer = ask(scheduler, Request([*prompt, 5, 6], GREEDY, 40))
                answer.result()
        return answer.tokens, answer.reused

    first, none = run()
    second, reused = run()
    assert first == second
    assert none == 0
    assert reused >= LEAST


def test_damaged_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x.prefix").write_bytes(b"LOCALLLM" + bytes(100))
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=512) as model:
        files = PrefixFiles(tmp_path, model)
        assert files.best([1] * 300) == 0
        assert files.load([1] * 300) is None
    assert (tmp_path / "x.prefix").exists()


def test_a_folder_of_prefixes_is_this_users_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pipes and links in the folder are neither read nor deleted, and other users cannot read saved files."""
    folder = tmp_path / "cache"
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=1024) as model:
        first = PrefixFiles(folder, model)
        sequence = model.engine.add()
        model.engine.step([localllm.engine.SequenceRows(sequence, [3] * (LEAST + 5))])
        first.save(sequence)
        model.engine.release(sequence)
        [path] = folder.iterdir()
        assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
        path.chmod(0o644)  # the mode that earlier versions gave the file
        assert PrefixFiles(folder, model).best([3] * 500) == LEAST
        assert path.stat().st_mode & 0o777 == 0o600
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        os.mkfifo(folder / "pipe.prefix")
        (folder / "folder.prefix").mkdir()
        with caplog.at_level("INFO"):
            assert PrefixFiles(folder, model).best([3] * 500) == 0
        assert "is a link, which is not followed" in caplog.text
        assert "is not a regular file but a pipe" in caplog.text


def test_the_folder_keeps_to_its_size(tmp_path: Path) -> None:
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=1024) as model:
        files = PrefixFiles(tmp_path, model, most_bytes=1)
        for first in (3, 4):
            sequence = model.engine.add()
            model.engine.step([localllm.engine.SequenceRows(sequence, [first] * (LEAST + 5))])
            files.save(sequence)
            model.engine.release(sequence)
        assert files.best([4] * 500) == LEAST
        assert files.best([3] * 500) == 0
        assert len(list(tmp_path.iterdir())) == 1
