"""Positioned reads from many threads give the same bytes with and without the system call."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localllm.base.files.positioned import read_at


@pytest.mark.parametrize("positioned", [True, False])
def test_threads_read_where_they_say(positioned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not positioned:
        monkeypatch.delattr(os, "preadv")
    data = os.urandom(1 << 16)
    (path := tmp_path / "a").write_bytes(data)
    with io.FileIO(path) as file, ThreadPoolExecutor(8) as threads:

        def read(offset: int) -> bytes:
            target = bytearray(300)
            return bytes(target[: read_at(file, memoryview(target), offset)])

        offsets = [seed * 7919 % len(data) for seed in range(2000)]
        assert list(threads.map(read, offsets)) == [data[offset : offset + 300] for offset in offsets]
        assert read(len(data)) == b""
    with pytest.raises(ValueError):
        read_at(file, memoryview(bytearray(1)), 0)
