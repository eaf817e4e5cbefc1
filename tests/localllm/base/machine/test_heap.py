"""Heap functions of glibc, which do nothing on other C libraries."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator

import pytest

from localllm.base.machine import heap
from localllm.base.machine.heap import heap_in_use, limit_spare, return_pages

BLOCK = 8 << 20
RETURNED = """
import re, threading
from pathlib import Path
from localllm.base.machine.heap import limit_spare, return_pages

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

def work():
    global before, high
    before = resident()
    blocks = [bytearray(2000) for _ in range(40_000)]
    kept.extend(blocks[::400])  # so that no heap gets shorter
    high = resident()
    del blocks

kept = []
limit_spare()
thread = threading.Thread(target=work)
thread.start()
thread.join()
return_pages()
print(high - before, resident() - before)
"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    heap._library.cache_clear()
    yield
    heap._library.cache_clear()


@pytest.mark.skipif(heap_in_use() is None, reason="the size of this C library's heap is unknown")
def test_a_block_counts_while_it_is_held() -> None:
    before = heap_in_use()
    block = bytearray(BLOCK)
    held = heap_in_use()
    del block
    after = heap_in_use()
    assert before is not None
    assert held is not None
    assert after is not None
    assert held - before > BLOCK // 2
    assert held - after > BLOCK // 2


@pytest.mark.skipif(heap_in_use() is None, reason="only glibc keeps free pages")
def test_free_pages_between_used_ones_are_returned() -> None:
    ran = subprocess.run([sys.executable, "-c", RETURNED], capture_output=True, text=True, check=True, timeout=60)
    high, left = map(int, ran.stdout.split())
    assert high > 60 << 20
    assert left < 20 << 20


@pytest.mark.parametrize("system", ["darwin", "win32", "freebsd14", "linux"])
def test_other_c_libraries_are_left_alone(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions do nothing if the C library lacks them, like musl on Linux."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert heap_in_use() is None
    limit_spare()
    return_pages()
