"""Fetching from a hub over HTTP with huggingface_hub itself: what is chosen, kept, continued, checked and refused."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, scan_cache_dir, try_to_load_from_cache

from localllm.store import Found, Places, StoreError, everything, find
from localllm.store.fetch import Watch
from localllm.store.hub import Hub
from localllm.store.labels import variants
from localllm.store.owned import is_owned, owned, remove
from localllm.store.pull import Pulled, pull
from localllm.store.reference import Reference, reference
from tests.conftest import full_disk
from tests.localllm.store.hub_server import COMMIT, Faults, HubServer, Repo, serving, sha256

GIB = 1 << 30
DATA = {name: os.urandom(300_000 + 1000 * n) for n, name in enumerate(("Q2_K", "Q4_K_M", "Q8_0", "F16"))}
FILES = {f"Toy-{name}.gguf": data for name, data in DATA.items()}
PARTS = {f"Big-Q4_0/Big-Q4_0-{n:05d}-of-00003.gguf": os.urandom(70_000 + n) for n in (1, 2, 3)}


class Client:
    """A cache, and what was told while pulling into it."""

    def __init__(self, server: HubServer, cache: Path) -> None:
        self.server, self.cache = server, cache
        self.told: list[str] = []
        self.waited: list[float] = []
        self.progress: list[tuple[str, int, int]] = []

    def pull(self, name: str, free: int = 16 * GIB, hub: Hub | None = None) -> Pulled:
        self.told, self.waited, self.progress = [], [], []
        return pull(
            hub or Hub(self.server.url), reference(name), self.cache, free,
            Watch(lambda *step: self.progress.append(step), self.told.append, self.waited.append),
        )  # fmt: skip

    def models(self) -> list[Found]:
        return everything(Places(self.cache))

    def partials(self) -> list[Path]:
        return list(self.cache.glob("*/blobs/*.incomplete"))


@pytest.fixture
def server() -> Iterator[HubServer]:
    small = {"README.md": b"# Toy", "config.json": b"{}"}
    with serving(
        {
            "ann/Toy-GGUF": Repo({**FILES, **small, "mmproj-F16.gguf": b"eyes" * 99, "imatrix.gguf": b"im" * 99}),
            "ann/Big-GGUF": Repo({**PARTS, "Big-Q8_0.gguf": os.urandom(400_000)}),
            "ann/One": Repo({"model.gguf": os.urandom(100_000)}),
            "ann/Git": Repo({"tiny-F32.gguf": b"GGUF, small enough for git"}),
            "ann/Gated": Repo({"g-Q4_0.gguf": os.urandom(99_999)}, gated=True),
            "ann/Private": Repo({"p-Q4_0.gguf": os.urandom(99_999)}, token="hf_secret"),
            "ann/Tensors": Repo({"config.json": b"{}", "model.safetensors": os.urandom(1000)}),
            "ann/Empty": Repo({"README.md": b"soon"}),
        }
    ) as hub:
        yield hub


@pytest.fixture
def client(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    return Client(server, tmp_path / "hub")


# -- what is fetched -----------------------------------------------------------------------------------------------


def test_a_pulled_file_is_in_the_cache_as_the_library_keeps_it(client: Client) -> None:
    done = client.pull("ann/Toy-GGUF:Q4_K_M")
    assert (done.name, done.fetched, done.bytes) == ("ann/Toy-GGUF:Q4_K_M", True, len(DATA["Q4_K_M"]))
    assert done.path.read_bytes() == DATA["Q4_K_M"]
    assert Path(os.path.realpath(done.path)).name == sha256(DATA["Q4_K_M"])
    assert try_to_load_from_cache("ann/Toy-GGUF", "Toy-Q4_K_M.gguf", cache_dir=client.cache) == str(done.path)
    found = scan_cache_dir(client.cache)
    assert found.warnings == []
    (repo,) = found.repos
    assert (repo.repo_id, repo.nb_files, [sorted(each.refs) for each in repo.revisions]) == (
        "ann/Toy-GGUF", 1, [["main"]],
    )  # fmt: skip
    assert client.partials() == []
    assert client.progress[-1] == ("Toy-Q4_K_M.gguf", len(DATA["Q4_K_M"]), len(DATA["Q4_K_M"]))
    assert find("ann/Toy-GGUF:Q4_K_M", client.models()).path == done.path


def test_what_is_there_is_not_fetched_again(client: Client, server: HubServer) -> None:
    first = client.pull("ann/Toy-GGUF:Q8_0")
    server.seen.clear()
    again = client.pull("ann/Toy-GGUF:q8")
    assert (again.path, again.fetched) == (first.path, False)
    assert [path for _, path, _ in server.seen] == ["/api/models/ann/Toy-GGUF?blobs=true"]


def test_all_parts_of_a_split_model_come(client: Client) -> None:
    done = client.pull("ann/Big-GGUF:Q4_0")
    assert done.bytes == sum(map(len, PARTS.values()))
    found = find("ann/Big-GGUF:Q4_0", client.models())
    assert [path.read_bytes() for path in found.paths] == list(PARTS.values())
    assert found.path == done.path
    assert done.path.name == "Big-Q4_0-00001-of-00003.gguf"


def test_a_small_file_that_git_keeps_is_checked_by_git_s_checksum(client: Client) -> None:
    assert client.pull("ann/Git").path.read_bytes() == b"GGUF, small enough for git"


@pytest.mark.parametrize("name", ["ann/Toy-GGUF:Q9", "ann/Toy-GGUF:Q2_K_S"])
def test_a_type_that_is_not_there_lists_those_that_are(client: Client, name: str) -> None:
    with pytest.raises(StoreError, match=r"has no Q.*; it has F16, Q2_K, Q4_K_M, Q8_0$"):
        client.pull(name)


def test_a_name_that_means_several_lists_them(client: Client, server: HubServer) -> None:
    server.repos["ann/Two"] = Repo({f"{name}.gguf": os.urandom(100) for name in ("a-Q4_0", "b-Q4_0", "a-Q4_1")})
    with pytest.raises(StoreError, match=r"ann/Two:Q4_0 is ambiguous: give one of a-Q4_0, b-Q4_0$"):
        client.pull("ann/Two:Q4_0")
    with pytest.raises(StoreError, match=r"give one of a-Q4_0, Q4_1, b-Q4_0$"):
        client.pull("ann/Two:Q4")
    assert client.pull("ann/Two:b-Q4_0.gguf").path.name == "b-Q4_0.gguf"


@pytest.mark.parametrize(
    ("free", "chosen", "reason"),
    [
        (16 * GIB, "Q8_0", "the largest usual type that fits 16.00 GiB of free memory with room for the cache"),
        (8 * GIB, "Q4_K_M", "the largest usual type that fits 8.00 GiB"),
        (5 * GIB, "Q2_K", "the largest usual type that fits 5.00 GiB"),
        (4 * GIB, "IQ1_S", "the largest type that fits 4.00 GiB"),
        (1 * GIB, "IQ1_S", "the smallest, but too large for 1.00 GiB of free memory"),
    ],
)
def test_without_a_type_the_memory_decides(free: int, chosen: str, reason: str) -> None:
    from localllm.store.choose import choose

    sizes = {
        "IQ1_S": 2 * GIB,
        "Q2_K": 3 * GIB,
        "Q4_K_M": 5 * GIB,
        "Q8_0": 8 * GIB,
        "UD-Q8_K_XL": 10 * GIB,
        "F16": 11 * GIB,
    }
    given = variants([f"m-{name}.gguf" for name in sizes])
    found = choose("u/r", given, "", lambda each: sizes[each.label], free, [])
    assert found.variant.label == chosen
    assert found.reason.startswith(reason)
    kept = choose("u/r", given, "", lambda each: sizes[each.label] * GIB, free, ["Q4_K_M"])
    assert (kept.variant.label, kept.reason) == ("Q4_K_M", "the one that is on this computer")


def test_the_choice_is_told_in_one_line(client: Client) -> None:
    assert client.pull("ann/Toy-GGUF").name == "ann/Toy-GGUF:Q8_0"
    told = "the largest usual type that fits 16.00 GiB of free memory with room for the cache"
    assert client.told == [f"ann/Toy-GGUF:Q8_0 (294.92 KiB): {told}"]
    assert client.pull("ann/Toy-GGUF", free=0).name == "ann/Toy-GGUF:Q8_0"  # once here, it stays the choice
    client.pull("ann/One")
    assert client.told == ["ann/One (97.66 KiB): the only model in the repository"]


def test_a_repository_without_models_says_what_it_has(client: Client) -> None:
    with pytest.raises(StoreError, match=r"but safetensors; .* `localllm quantize Tensors OUT\.gguf Q4_K_M`"):
        client.pull("ann/Tensors")
    with pytest.raises(StoreError, match=r"ann/Empty has no GGUF files, only README\.md; look for .* Empty-GGUF"):
        client.pull("ann/Empty")


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
        pull(
            hub,
            Reference("ann/Toy-GGUF", "Q8_0"),
            client.cache,
            GIB,
            Watch(lambda *step: None, client.told.append, stop),
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
    with pytest.raises(StoreError, match=r"at 49 % of Toy-Q8_0\.gguf, 5 times in a row; the same command continues"):
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
    done = pull(hub, Reference("ann/Toy-GGUF", "Q8_0"), client.cache, GIB, Watch(lambda *step: None, told, wait))
    assert done.path.read_bytes() == DATA["Q8_0"]
    assert client.told == ["nothing came for some time at 21 % of Toy-Q8_0.gguf; trying again in 1 s"]


def test_a_busy_server_is_asked_again(client: Client, server: HubServer) -> None:
    server.faults.busy = 2
    assert client.pull("ann/Toy-GGUF:Q8_0").path.read_bytes() == DATA["Q8_0"]
    assert client.told == [f"the server answered 503 at 0 % of Toy-Q8_0.gguf; trying again in {s} s" for s in (2, 4)]


def test_a_full_disk_keeps_what_came(client: Client) -> None:
    with (
        full_disk(100_000),
        pytest.raises(StoreError, match="cannot be written: File too large; what came"),
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
            target=lambda: done.append(Client(server, client.cache).pull("ann/Toy-GGUF:Q8_0"))  # each with its own hub
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(each.fetched for each in done) == [False, False, True]
    assert len(server.asked("/content/")) == 1


# -- bytes that are not those of the list --------------------------------------------------------------------------


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
        remove(find(done.name, client.models()), client.cache)
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
    with pytest.raises(StoreError, match=r"announces Toy-Q8_0\.gguf with another checksum than in its list"):
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
    with pytest.raises(StoreError, match=r"did not answer as a hub does|names no commit"):
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


# -- who may fetch what --------------------------------------------------------------------------------------------


def test_no_such_repository(client: Client, server: HubServer) -> None:
    with pytest.raises(StoreError, match=r"has no model ann/Nothing that you may read; check the name, or"):
        client.pull("ann/Nothing")
    with pytest.raises(StoreError, match="has no model ann/Private that you may read"):
        client.pull("ann/Private")


def test_a_token_opens_what_is_private_and_stays_with_the_hub(
    client: Client, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    client.pull("ann/Private")
    assert all(headers["authorization"] == "Bearer hf_secret" for headers in server.asked("/resolve/"))
    assert server.asked("/content/")
    assert all("authorization" not in headers for headers in server.asked("/content/"))


@pytest.mark.parametrize("token", ["", "hf_other"])
def test_a_gated_repository_says_where_its_terms_are(
    client: Client, server: HubServer, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(StoreError, match=rf"ann/Gated is gated: accept its terms at {server.url}/ann/Gated, then set"):
        client.pull("ann/Gated")


def test_a_name_that_the_hub_cannot_have(client: Client) -> None:
    with pytest.raises(StoreError, match=r"ann/x\.git cannot be the name of a repository"):
        client.pull("ann/x.git")


def test_nobody_there(client: Client) -> None:
    with pytest.raises(StoreError, match=r"^cannot reach 127\.0\.0\.1:9: .*; check the network, or HF_ENDPOINT$"):
        client.pull("ann/Toy-GGUF", hub=Hub("http://127.0.0.1:9"))
    with pytest.raises(StoreError, match="HF_ENDPOINT is hub; it must be an address"):
        Hub("hub")


def test_offline_is_said(client: Client, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StoreError, match=r"HF_HUB_OFFLINE is set, so ann/Toy-GGUF cannot be fetched; unset it"):
        client.pull("ann/Toy-GGUF")
    assert server.seen == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ann/Toy", Reference("ann/Toy")),
        ("ann/Toy:q4_k_m", Reference("ann/Toy", "q4_k_m")),
        ("ann/Toy:sub/a.gguf", Reference("ann/Toy", "sub/a.gguf")),
        ("ann/Toy:latest", Reference("ann/Toy")),
        ("hf.co/ann/Toy:Q8_0", Reference("ann/Toy", "Q8_0")),
        ("https://huggingface.co/ann/Toy", Reference("ann/Toy")),
    ],
)
def test_a_reference_has_an_owner_and_a_repository(text: str, found: Reference) -> None:
    assert reference(text) == found


@pytest.mark.parametrize(
    "text", ["", "ann", "ann/", "/Toy", "ann/Toy/x", "../Toy", "ann/..", "a b/c", "ann/a--b", "x:y"]
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(StoreError, match="is not of the form USER/REPO"):
        reference(text)


# -- what was fetched, and its removal -----------------------------------------------------------------------------


def test_removal_deletes_what_pull_fetched_and_nothing_else(client: Client) -> None:
    client.pull("ann/Toy-GGUF:Q4_K_M")
    client.pull("ann/Big-GGUF:Q4_0")
    client.pull("ann/Toy-GGUF:Q8_0")
    before = set(client.cache.rglob("*"))
    client.pull("ann/Toy-GGUF:Q2_K")
    assert remove(find("ann/Toy-GGUF:Q2_K", client.models()), client.cache) == len(DATA["Q2_K"])
    locks = {path for path in client.cache.rglob("*") if ".locks" in path.parts}
    assert set(client.cache.rglob("*")) - locks == before - locks
    assert remove(find("ann/Big-GGUF", client.models()), client.cache) == sum(map(len, PARTS.values()))
    assert [each.name for each in client.models()] == ["ann/Toy-GGUF:Q4_K_M", "ann/Toy-GGUF:Q8_0"]
    assert not (client.cache / "models--ann--Big-GGUF").exists()
    for name in ("Q4_K_M", "Q8_0"):
        remove(find(f"ann/Toy-GGUF:{name}", client.models()), client.cache)
    assert [path.name for path in client.cache.iterdir() if path.name.startswith("models")] == []
    assert scan_cache_dir(client.cache).warnings == []


def test_what_another_program_fetched_stays(client: Client, server: HubServer) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download("ann/Toy-GGUF", "Toy-Q8_0.gguf", cache_dir=client.cache, endpoint=server.url)
    assert client.pull("ann/Toy-GGUF:Q8_0").fetched is False
    client.pull("ann/Toy-GGUF:Q4_K_M")
    mine, theirs = client.models()
    assert (is_owned(mine, client.cache), is_owned(theirs, client.cache)) == (True, False)
    with pytest.raises(StoreError, match=r"not fetched by `localllm pull`, so it stays; `hf cache rm model/ann/T"):
        remove(theirs, client.cache)
    remove(mine, client.cache)
    assert [each.name for each in client.models()] == ["ann/Toy-GGUF:Q8_0"]


def test_a_newer_commit_replaces_what_pull_fetched(client: Client, server: HubServer) -> None:
    old = client.pull("ann/Toy-GGUF:Q8_0").path
    client.pull("ann/Toy-GGUF:Q4_K_M")
    repo = server.repos["ann/Toy-GGUF"]
    repo.commit, repo.files = "f" * 40, {**repo.files, "Toy-Q8_0.gguf": b"better" * 9999}
    new = client.pull("ann/Toy-GGUF:Q8_0").path
    assert new.read_bytes() == b"better" * 9999
    assert not old.exists()
    folder = client.cache / "models--ann--Toy-GGUF"
    assert owned(folder)["Toy-Q8_0.gguf"] == sha256(b"better" * 9999)
    assert {path.name for path in (folder / "blobs").iterdir()} == set(owned(folder).values())
    assert [each.name for each in client.models()] == ["ann/Toy-GGUF:Q4_K_M", "ann/Toy-GGUF:Q8_0"]
    client.pull("ann/Toy-GGUF:Q4_K_M")  # the same bytes under the new commit: linked, not fetched
    assert len(server.asked("/content/ann/Toy-GGUF/Toy-Q4_K_M.gguf")) == 1
    assert scan_cache_dir(client.cache).warnings == []


def test_a_file_that_two_commits_share_outlives_neither(client: Client, server: HubServer) -> None:
    client.pull("ann/One")
    server.repos["ann/One"].commit = "f" * 40
    client.pull("ann/One")
    assert len(list(client.cache.glob("*/snapshots/*/model.gguf"))) == 2
    remove(find("ann/One", client.models()), client.cache)
    assert not (client.cache / "models--ann--One").exists()
