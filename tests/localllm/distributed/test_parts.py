"""Parts of a model in a sparse file: fetched once, checked, and continued after an interruption."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from localllm.cluster.cut import even_cut
from localllm.cluster.errors import ClusterError
from localllm.distributed import parts
from localllm.distributed.parts import CHUNK, Needed, Range, fetch, needed
from localllm.gguf import GGUFError, open_gguf
from localllm.gguf.identity import identity
from localllm.loading.recording import Recording
from tests.conftest import full_disk
from tests.models.kit import KIT

WHOLE = np.random.RandomState(1).bytes(3 * CHUNK)
WANTED = Needed("ab" * 16, (len(WHOLE),), (((0, 100), (CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK + 10)),), ())


class Server:
    """Sends ranges of WHOLE, and remembers which."""

    def __init__(self, most: int = 100) -> None:
        self.sent: list[Range] = []
        self.most = most

    def read(self, shard: int, ranges: Sequence[Range]) -> Iterator[tuple[bytes, bytes]]:
        for start, stop in ranges:
            if len(self.sent) == self.most:
                raise ConnectionError("the network is gone")
            self.sent.append((start, stop))
            yield WHOLE[start:stop], hashlib.sha256(WHOLE[start:stop]).digest()


def check(path: Path) -> None:
    data = path.read_bytes()
    assert len(data) == len(WHOLE)
    for start, stop in WANTED.ranges[0]:
        assert data[start:stop] == WHOLE[start:stop]
    assert not any(data[100:CHUNK])
    assert path.stat().st_blocks * 512 < 2 * CHUNK


def test_only_the_wanted_ranges_are_fetched_and_only_once(tmp_path: Path) -> None:
    server, told = Server(), list[int]()
    check(fetch(tmp_path, WANTED, server.read, told.append))
    assert server.sent == list(WANTED.ranges[0])
    assert sum(told) == WANTED.bytes
    check(fetch(tmp_path, WANTED, server.read))
    assert len(server.sent) == 3
    more = Needed(WANTED.identity, WANTED.sizes, (((100, 200), *WANTED.ranges[0]),), ())  # another cut
    assert fetch(tmp_path, more, server.read).read_bytes()[:200] == WHOLE[:200]
    assert server.sent[3:] == [(100, 200)]


def test_an_interrupted_transfer_goes_on_where_it_ended(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be stored"):  # ConnectionError is an OSError
        fetch(tmp_path, WANTED, Server(2).read)
    server = Server()
    check(fetch(tmp_path, WANTED, server.read))
    assert server.sent == [WANTED.ranges[0][2]]


@pytest.mark.parametrize("change", ["content", "list", "size"])
def test_a_file_that_was_changed_is_fetched_again(tmp_path: Path, change: str) -> None:
    path = fetch(tmp_path, WANTED, Server().read)
    if change == "content":
        with open(path, "r+b") as file:
            file.write(b"changed")
    elif change == "size":
        os.truncate(path, 5)
    else:
        path.with_suffix(".json").write_text('{"ranges": 3}')
    server = Server()
    check(fetch(tmp_path, WANTED, server.read))
    assert len(server.sent) == 3


def test_damaged_bytes_are_refused_and_not_listed(tmp_path: Path) -> None:
    def read(shard: int, ranges: Sequence[Range]) -> Iterator[tuple[bytes, bytes]]:
        yield from Server().read(shard, ranges[:1])
        yield bytes(CHUNK), hashlib.sha256(WHOLE[CHUNK : 2 * CHUNK]).digest()

    with pytest.raises(ClusterError, match=r"bytes 8388608 to 16777216 arrived damaged; try again"):
        fetch(tmp_path, WANTED, read)
    server = Server()
    check(fetch(tmp_path, WANTED, server.read))
    assert server.sent == list(WANTED.ranges[0][1:])


def test_a_full_disk_is_said_in_one_line(tmp_path: Path) -> None:
    with full_disk(1 << 20), pytest.raises(ClusterError, match=r"model.gguf: cannot be stored: .*needs 8 MiB there$"):
        fetch(tmp_path, WANTED, Server().read)
    check(fetch(tmp_path, WANTED, Server().read))


def test_an_identity_is_no_path(tmp_path: Path) -> None:
    for wrong in ("../up", "", "ab/cd"):
        with pytest.raises(ClusterError, match="hexadecimal"):
            fetch(tmp_path, Needed(wrong, (1,), ((),), ()), Server().read)


@pytest.mark.parametrize("name", sorted(KIT))
def test_the_part_of_a_stage_is_enough_to_bind_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every architecture: each stage's plan reads all its weights from a file with only its part."""
    monkeypatch.setattr(parts, "SMALL", 1024)  # bytes; matrices are larger
    path = KIT[name].write(tmp_path / "model.gguf")
    with open_gguf(path) as file:
        plan = Recording(256).plan(file)
        try:
            cut = even_cut(plan, 2)
        except ClusterError:
            pytest.skip("cannot be cut")
        known = identity(file)
        for number in (0, 1):
            wanted = needed(file, known, [cut.parts[number]])

            def read(
                shard: int, ranges: Sequence[Range], paths: tuple[Path, ...] = file.paths
            ) -> Iterator[tuple[bytes, bytes]]:
                whole = paths[shard].read_bytes()
                for start, stop in ranges:
                    yield whole[start:stop], hashlib.sha256(whole[start:stop]).digest()

            place = fetch(tmp_path / str(number), wanted, read)
            with open_gguf(place) as part:
                part.forget(wanted.absent)
                own = even_cut(Recording(256).plan(part), 2)
                assert own.firsts == cut.firsts
                for op in own.parts[number].operations:
                    for weight in (*op.matrices, *op.vectors):
                        weight.read(0, 1)
            if number:
                assert wanted.bytes < path.stat().st_size


def test_a_tensor_that_was_not_fetched_cannot_be_read(tmp_path: Path) -> None:
    with open_gguf(KIT["llama-gqa"].write(tmp_path / "model.gguf")) as file:
        tensor = file.tensors["blk.0.attn_q.weight"]
        file.forget([tensor.name])
        with pytest.raises(GGUFError, match=r"attn_q.weight': is not in this file, which has only a part of the model"):
            tensor.read(0, 1)
        file.tensors["blk.1.attn_q.weight"].read(0, 1)
