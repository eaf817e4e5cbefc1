"""Pulls from a hub that disconnects or sends wrong bytes are resumed, and checksums are verified."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from localllm.hub import StoreError, find
from localllm.hub.client import Hub
from localllm.hub.fetch import FetchHooks
from localllm.hub.labels import Variant, titles
from localllm.hub.owned import is_owned, remove_model
from localllm.hub.pull import Pulled, pull_model
from localllm.hub.reference import Reference
from tests.conftest import full_disk
from tests.localllm.hub.hub_client import DATA, GIB, Client
from tests.localllm.hub.hub_server import COMMIT, Faults, HubServer, sha256

# -- interruptions -------------------------------------------------------------------------------------------------


def test_a_broken_connection_goes_on_where_it_broke(client: Client, server: HubServer) -> None:
    server.faults.cuts = 3
    assert client.pull("ann/Toy-GGUF:Q8_0").path.read_bytes() == DATA["Q8_0"]
    ranges = [int(headers["range"][6:-1]) for headers in server.asked("/content/") if "range" in headers]
    assert len(ranges) == 3
    assert ranges == sorted(ranges)
    assert 0 < ranges[0] < ranges[-1] < len(DATA["Q8_0"])
    assert len(client.told) == len(client.waited) == 3
    assert client.told[0] == "the connection was lost at 50 % of Toy-Q8_0.gguf; trying again in 1 s"


def test_a_later_run_goes_on_where_an_earlier_one_stopped(client: Client, server: HubServer) -> None:
    server.faults.cuts, server.faults.cut_at = 1, 200_000
    hub = Hub(server.url)

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_model(
            hub,
            Reference("ann/Toy-GGUF", "Q8_0"),
            client.cache,
            GIB,
            FetchHooks(lambda *step: None, client.told.append, stop),
        )
    (left,) = client.partials()
    assert left.stat().st_size == 200_000
    assert client.models() == []
    server.seen.clear()
    assert client.pull("ann/Toy-GGUF:Q8_0").path.read_bytes() == DATA["Q8_0"]
    assert [headers.get("range") for headers in server.asked("/content/")] == ["bytes=200000-"]
    assert client.told == ["continuing Toy-Q8_0.gguf at 66 %"]
    assert client.progress[0][1] > 200_000
    assert client.partials() == []


def test_a_server_that_ignores_ranges_is_read_from_the_beginning(client: Client, server: HubServer) -> None:
    server.faults.cuts, server.faults.deaf = 2, True
    assert client.pull("ann/Toy-GGUF:Q8_0").path.read_bytes() == DATA["Q8_0"]
    assert len(server.asked("/content/")) == 3


def test_a_connection_that_always_breaks_gives_up_and_keeps_what_came(client: Client, server: HubServer) -> None:
    server.faults.cuts, server.faults.cut_at, server.faults.deaf = 999, 150_000, True
    with pytest.raises(StoreError, match=r"at 49 % of Toy-Q8_0\.gguf, 5 times in a row; run the same command"):
        client.pull("ann/Toy-GGUF:Q8_0")
    assert client.waited == [1, 2, 4, 8, 16]
    (left,) = client.partials()
    assert left.stat().st_size == 150_000
    server.faults = Faults()
    assert client.pull("ann/Toy-GGUF:Q8_0").path.read_bytes() == DATA["Q8_0"]


def test_a_server_that_falls_silent_is_asked_again(
    client: Client, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    server.faults.pause = 1.0

    def wait(seconds: float) -> None:
        server.faults.pause = 0

    hub, told = Hub(server.url), client.told.append
    done = pull_model(
        hub, Reference("ann/Toy-GGUF", "Q8_0"), client.cache, GIB, FetchHooks(lambda *step: None, told, wait)
    )
    assert done.path.read_bytes() == DATA["Q8_0"]
    assert client.told == ["no data for some time at 21 % of Toy-Q8_0.gguf; trying again in 1 s"]


def test_a_busy_server_is_asked_again(client: Client, server: HubServer) -> None:
    server.faults.busy = 2
    assert client.pull("ann/Toy-GGUF:Q8_0").path.read_bytes() == DATA["Q8_0"]
    assert client.told == [f"the server answered 503 at 0 % of Toy-Q8_0.gguf; trying again in {s} s" for s in (2, 4)]


def test_a_full_disk_keeps_what_came(client: Client) -> None:
    with (
        full_disk(100_000),
        pytest.raises(StoreError, match="cannot be written: File too large; the downloaded part"),
    ):
        client.pull("ann/Toy-GGUF:Q8_0")
    assert client.pull("ann/Toy-GGUF:Q8_0").path.read_bytes() == DATA["Q8_0"]


def test_a_disk_without_room_is_noticed_before(
    client: Client, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: os.terminal_size((9, 9)) and type("", (), {"free": 1000}))
    with pytest.raises(StoreError, match=r"294\.92 KiB are needed and 1000 B are free in .*; HF_HUB_CACHE names"):
        client.pull("ann/Toy-GGUF:Q8_0")
    assert server.asked("/content/") == []


def test_pulls_of_one_repository_at_once_are_all_remembered(client: Client, server: HubServer) -> None:
    names = [f"ann/Toy-GGUF:{name}" for name in DATA]
    threads = [threading.Thread(target=Client(server, client.cache).pull, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(client.models()) == 4
    assert all(is_owned(each, client.cache) for each in client.models())


def test_a_pull_waits_for_another_program_and_says_so(client: Client, server: HubServer) -> None:
    from huggingface_hub.utils import WeakFileLock

    lock = client.cache / f".locks/models--ann--Toy-GGUF/{sha256(DATA['Q8_0'])}.lock"
    lock.parent.mkdir(parents=True)
    with WeakFileLock(lock):
        thread = threading.Thread(target=client.pull, args=("ann/Toy-GGUF:Q8_0",))
        thread.start()
        thread.join(1.6)
        assert thread.is_alive()
        assert server.asked("/content/") == []
    thread.join(30)
    assert client.told == ["another program is fetching Toy-Q8_0.gguf; waiting for it"]
    assert len(client.models()) == 1


def test_two_pulls_at_once_fetch_it_once(client: Client, server: HubServer) -> None:
    done: list[Pulled] = []
    threads = [
        threading.Thread(
            # each thread has its own Hub
            target=lambda: done.append(Client(server, client.cache).pull("ann/Toy-GGUF:Q8_0"))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(each.fetched for each in done) == [False, False, True]
    assert len(server.asked("/content/")) == 1


# -- bytes that differ from the listing ------------------------------------------------------------------------------


def test_wrong_bytes_are_deleted(client: Client, server: HubServer) -> None:
    server.faults.wrong = True
    with pytest.raises(StoreError, match=r"does not match its checksum \([0-9a-f]{12}\.\.\.\), so it was deleted"):
        client.pull("ann/Toy-GGUF:Q8_0")
    assert list(client.cache.glob("*/blobs/*")) == []
    assert client.models() == []
    server.faults.wrong = False
    assert client.pull("ann/Toy-GGUF:Q8_0").path.read_bytes() == DATA["Q8_0"]


def test_a_damaged_beginning_is_fetched_again(client: Client, server: HubServer) -> None:
    blobs = client.cache / "models--ann--Toy-GGUF/blobs"
    blobs.mkdir(parents=True)
    for left in (b"not the beginning", b"x" * (len(DATA["Q8_0"]) + 1), b""):
        (blobs / f"{sha256(DATA['Q8_0'])}.incomplete").write_bytes(left)
        done = client.pull("ann/Toy-GGUF:Q8_0")
        assert done.path.read_bytes() == DATA["Q8_0"]
        remove_model(find(done.name, client.models()), client.cache)
        blobs.mkdir(parents=True, exist_ok=True)


def test_a_partial_file_behind_a_link_is_not_written(client: Client, tmp_path: Path) -> None:
    blobs = client.cache / "models--ann--Toy-GGUF/blobs"
    blobs.mkdir(parents=True)
    (tmp_path / "victim").write_bytes(b"mine")
    (blobs / f"{sha256(DATA['Q8_0'])}.incomplete").symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError, match="cannot be written: Too many levels of symbolic links"):
        client.pull("ann/Toy-GGUF:Q8_0")
    assert (tmp_path / "victim").read_bytes() == b"mine"


def test_more_bytes_than_announced_are_an_error(client: Client, server: HubServer) -> None:
    server.faults.longer = True
    with pytest.raises(StoreError, match=r"the server sends more than the \d+ bytes of Toy-Q8_0\.gguf"):
        client.pull("ann/Toy-GGUF:Q8_0")


def test_another_checksum_in_the_head_is_an_error(client: Client, server: HubServer) -> None:
    server.faults.etag = "0" * 64
    with pytest.raises(StoreError, match=r"announces Toy-Q8_0\.gguf with a different checksum than in its list"):
        client.pull("ann/Toy-GGUF:Q8_0")
    assert server.asked("/content/") == []


def test_a_file_too_large_for_http_is_left_to_the_library_and_checked(client: Client, server: HubServer) -> None:
    hub = Hub(server.url)
    hub.limit = 100_000
    server.faults.wrong = True
    with pytest.raises(StoreError, match="does not match its checksum"):
        client.pull("ann/Toy-GGUF:Q8_0", hub=hub)
    assert client.models() == [] or client.models()[0].problem
    server.faults.wrong = False
    assert client.pull("ann/Toy-GGUF:Q8_0", hub=hub).path.read_bytes() == DATA["Q8_0"]


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>", b"[]", b"7", b"{}", b'{"id": "ann/Toy-GGUF"}', b'{"siblings": 5}', b'{"siblings": [1]}',
        b'{"id": 7, "sha": 7, "siblings": [{}]}', b"[" * 100_000,
        b'{"id": "ann/Toy-GGUF", "sha": "../../../x", "siblings": []}',
    ],
    ids=lambda answer: answer[:30].decode(),
)  # fmt: skip
def test_a_list_that_is_none_is_one_line(client: Client, server: HubServer, answer: bytes) -> None:
    server.faults.listing = answer
    with pytest.raises(StoreError, match=r"does not answer like a Hugging Face hub|gives no commit"):
        client.pull("ann/Toy-GGUF")
    assert not client.cache.exists()


@pytest.mark.parametrize(
    "path", ["../x-Q4_0.gguf", "/x-Q4_0.gguf", "a/../../x-Q4_0.gguf", "a//x-Q4_0.gguf", "..\\x-Q4_0.gguf", "x\n.gguf"]
)
def test_a_file_that_would_lie_elsewhere_is_skipped(client: Client, server: HubServer, path: str) -> None:
    file = {"rfilename": path, "size": 9, "lfs": {"sha256": "0" * 64, "size": 9, "pointerSize": 1}}
    answer = {"id": "ann/Toy-GGUF", "sha": COMMIT, "siblings": [file]}
    server.faults.listing = json.dumps(answer).encode()
    with pytest.raises(StoreError, match="has no GGUF files, only nothing"):
        client.pull("ann/Toy-GGUF")
    assert not client.cache.exists()


def test_a_list_of_files_without_end_is_refused(client: Client, server: HubServer) -> None:
    file = {"size": 9, "lfs": {"sha256": "0" * 64, "size": 9, "pointerSize": 1}}
    files = [{"rfilename": f"m{number}-Q4_0.gguf", **file} for number in range(60_000)]
    answer = {"id": "ann/Toy-GGUF", "sha": COMMIT, "siblings": files, "tags": []}
    server.faults.listing = json.dumps(answer).encode()
    with pytest.raises(StoreError, match="lists 60000 files, more than 50000"):
        client.pull("ann/Toy-GGUF")
    assert not client.cache.exists()


def test_names_of_many_models_take_time_in_proportion() -> None:
    """The number of label comparisons to choose short titles is linear in the number of models.

    It used to be quadratic, so that 60,000 models took 20 s.
    """

    class Counted(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    found = [Variant(f"m{number}", Counted("Q4_0"), (f"m{number}.gguf",)) for number in range(1000)]
    Counted.compared = 0
    assert titles("u/r", found)[found[-1]] == "u/r:m999"
    assert Counted.compared < 20_000
