"""Pictures with `--ray`: their bytes on the way to a replica, and the answers of replicas and of stages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.distributed import media
from localllm.distributed.files import FileServer, Home
from localllm.distributed.media import check_media, packed, routed, unpacked
from localllm.distributed.messages import Ask, chunks_of
from localllm.distributed.parts import fetch, needed
from localllm.engine import MediaSpan
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Request
from localllm.gguf import open_gguf
from localllm.gguf.identity import identity
from localllm.loading.packed_media import MOST_TENSORS, pack, unpack
from localllm.media import EncoderInput
from localllm.media.encoder_input import Flags
from localllm.options import LoadOptions, SamplingOptions
from localllm.server.catalogue import only
from localllm.server.metrics import Metrics
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.service import Service
from tests.localllm.distributed.conftest import TwoNodes
from tests.localllm.distributed.servers import until
from tests.localllm.media_models import data_url, png, write_pair
from tests.localllm.server.calls import call

pytestmark = pytest.mark.xdist_group("ray")
USUAL: dict[str, Any] = {"backend": "cpu", "threads": 1, "spec": "off"}
MOST = 1 << 20
KINDS = ("image", "audio")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def model(pair: Path) -> Iterator[localllm.Model]:
    with localllm.load(pair, **USUAL) as found:
        yield found


def piece(**changed: Any) -> EncoderInput:
    random = np.random.default_rng(1)
    axes = random.integers(0, 9, (6, 4), np.int32)
    given: dict[str, Any] = {
        "kind": "image", "tensors": tuple(random.standard_normal((2, 4, 6, 3), np.float32)),
        "flags": Flags(True, False, 3, (2, 3), (40, 30)), "tokens": 6, "columns": 3, "rows": 2, "positions": 5,
        "causal": False, "axes": axes, "absolute": axes > 4,
    }  # fmt: skip
    return EncoderInput(**given | changed)


@pytest.mark.parametrize(
    "given",
    [
        piece(),
        piece(axes=None, absolute=None),
        piece(kind="audio", tensors=(np.ones((3, 5), np.float32),), causal=True),
    ],
)
def test_an_input_arrives_as_it_was_sent(given: EncoderInput) -> None:
    found, start = unpack(pack(given, 17), KINDS, MOST)
    assert start == 17
    assert found.key == given.key
    for field in fields(EncoderInput):
        np.testing.assert_equal(getattr(found, field.name), getattr(given, field.name))


def test_damaged_bytes_are_refused() -> None:
    given, refused = piece(), 0
    data, random = pack(given, 0), np.random.default_rng(2)
    for number in range(300):
        changed = bytearray(data)
        for at in random.integers(0, len(data), 1 + number % 4):
            changed[at] = random.integers(256)
        changed = changed[: random.integers(len(data))] if number % 3 == 0 else changed
        try:
            found, _ = unpack(bytes(changed), KINDS, MOST)
        except LocalLLMError as error:
            assert "arrived damaged" in str(error)  # noqa: PT017
            refused += 1
        else:  # the change is in bytes that no reader needs
            assert found.key == given.key
    assert refused > 150


@pytest.mark.parametrize(
    ("given", "start", "most"),
    [
        (piece(kind="video"), 0, MOST),
        (piece(), -1, MOST),
        (piece(), 0, -(1 << 20)),  # larger than allowed
        (piece(tensors=()), 0, MOST),
        (piece(tensors=(np.ones((2, 2, 3), np.float32),) * (MOST_TENSORS + 1)), 0, MOST),
        (piece(tensors=(np.ones((2, 2, 3)),)), 0, MOST),
        (piece(tensors=(np.ones((0, 2, 3), np.float32),)), 0, MOST),
        (piece(tokens=7), 0, MOST),
        (piece(tokens=0), 0, MOST),
        (piece(positions=1 << 70), 0, MOST),
        (piece(positions=1 << 24), 0, MOST),
        (piece(columns=1 << 40), 0, MOST),
        (piece(axes=None, absolute=None, tokens=1 << 40), 0, MOST),
        (piece(), 1 << 31, MOST),
        (piece(axes=np.ones((6, 4), np.int64)), 0, MOST),
        (piece(axes=None), 0, MOST),
    ],
)
def test_what_no_encoder_takes_is_refused(given: EncoderInput, start: int, most: int) -> None:
    with pytest.raises(LocalLLMError, match="arrived damaged"):
        unpack(pack(given, start), KINDS, most)


def test_a_prompt_is_the_same_in_the_replica(model: localllm.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = model.media("a <__media__> b <__media__>", [png(seed=1), png(seed=2)])
    prompt = [each for chunk in chunks for each in chunk.prompt]
    ask = Ask.of("front", 1, Request(prompt, SamplingOptions()), routed(prompt), (7, 8), packed(prompt))
    assert ask.tokens == sum(chunk.count for chunk in chunks) + 2 > len(ask.request.prompt) + 2
    assert all(isinstance(each, int) for each in ask.request.prompt)
    found = unpacked(ask.request.prompt, ask.media, model.multimodal)
    assert found == prompt  # spans are equal if their keys and layouts are
    assert len(routed(prompt)) == sum(chunk.count for chunk in chunks)
    other = model.media("a <__media__> b <__media__>", [png(seed=3), png(seed=2)])
    hashes = [
        chunks_of(routed([each for chunk in one for each in chunk.prompt] * 9)) for one in (chunks, chunks, other)
    ]
    assert hashes[0] == hashes[1] != hashes[2]
    check_media(prompt)
    with pytest.raises(LocalLLMError, match="no encoders of pictures and sound"):
        unpacked(ask.request.prompt, ask.media, None)
    with pytest.raises(LocalLLMError, match="arrived damaged"):
        unpacked(ask.request.prompt, ((len(prompt), ask.media[0][1]),), model.multimodal)
    span = next(each for each in prompt if isinstance(each, MediaSpan))
    with pytest.raises(LocalLLMError, match="take no finished embeddings"):
        check_media([replace(span, source=None)])
    monkeypatch.setattr(media, "MOST_BYTES", 100)
    with pytest.raises(LocalLLMError, match="send fewer or smaller ones, or set image_max_tokens"):
        check_media(prompt)
    assert packed([1, 2]) == ()


def test_an_mmproj_file_is_fetched_like_a_model(pair: Path, tmp_path: Path) -> None:
    """As `replica.py` does it: the header first, then the rest."""
    with open_gguf(pair.parent / "mmproj-tiny-F16.gguf") as file:
        home = Home.of(file, "node")
        server = FileServer(home.paths)

        def read(shard: int, ranges: Any) -> Iterator[tuple[bytes, bytes]]:
            return (server.read(shard, start, stop) for start, stop in ranges)

        with open_gguf(fetch(tmp_path, home.header, read)) as header:
            path = fetch(tmp_path, needed(header, home.source.identity, None), read)
        with open_gguf(path) as copy:
            assert identity(copy) == identity(file)
            for name, tensor in file.tensors.items():
                np.testing.assert_array_equal(copy.tensors[name].rows, tensor.rows)
    with localllm.load(pair, mmproj=path, **USUAL) as model:
        assert model.reads == ("image",)


# -- on a cluster --------------------------------------------------------------------------------------------------


def asked(seed: int) -> dict[str, Any]:
    picture = {"type": "image_url", "image_url": {"url": data_url(png(seed=seed))}}
    content = [picture, {"type": "text", "text": "what?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}


def test_a_replica_answers_about_pictures(
    cluster: TwoNodes, pair: Path, model: localllm.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then its machine seems to be gone, and the other one, which was left out as slower, takes the replica."""
    from localllm.distributed.front import open_front

    seeds, told = (1, 2, 1), list[str]()
    pictures = [[{"type": "image", "image": png(seed=seed)}, {"type": "text", "text": "what?"}] for seed in seeds]
    expected = [model.chat([{"role": "user", "content": each}], max_tokens=8, temperature=0).text for each in pictures]

    def opened(path: Path) -> Served:
        limits = SchedulerLimits(2)
        return open_front(
            path, (1, 1), 1, LoadOptions().changed(USUAL), limits, Metrics(), {}, told.append, lambda made: None
        )

    registry = ModelRegistry(only("tiny", pair), opened)
    service = Service(registry)
    try:
        asyncio.run(registry.load("tiny"))
        shown = call(service, "/api/show", {"model": "tiny"}).json()
        assert "vision" in shown["capabilities"]
        answers = [call(service, "/v1/chat/completions", asked(n)).json() for n in seeds]
        assert [each["choices"][0]["message"]["content"] for each in answers] == expected
        assert len({each["usage"]["prompt_tokens"] for each in answers}) == 1
        # the replica has the picture, and not only the text before it, in its cache
        first, last = (answers[n]["usage"]["prompt_tokens_details"]["cached_tokens"] for n in (1, 2))
        assert last > first + 4
        served = registry.loaded("tiny")
        assert served is not None
        scheduler: Any = served.scheduler
        deployment, [before] = scheduler._wire, scheduler.fleet.names
        layout, other = deployment._layout, cluster.nodes[1]
        deployment._layout = replace(layout, allowed=(), excluded=cluster.nodes, slower={other: 1 << 30})
        with monkeypatch.context() as changed:
            alive = [each for each in cluster.ray.nodes() if each["NodeID"] == other]
            changed.setattr(cluster.ray, "nodes", lambda: alive)
            assert "takes them" in deployment.revive()
            assert deployment.revive() == ""
        until(lambda: scheduler.origins.keys() - {before})
        answer = call(service, "/v1/chat/completions", asked(seeds[0])).json()
        assert answer["choices"][0]["message"]["content"] == expected[0]
        until(lambda: [each.node for each in scheduler.origins.values()] == [other])
    finally:
        registry.end()


def test_stages_answer_about_pictures(cluster: TwoNodes, pair: Path, model: localllm.Model) -> None:
    from localllm.distributed.stages import RayStages

    said = [{"role": "user", "content": [{"type": "image", "image": png(seed=1)}, {"type": "text", "text": "what?"}]}]
    expected = model.chat(said, max_tokens=8, temperature=0, ignore_eos=True).tokens
    with closing(RayStages(cluster.ray, 2)) as split, localllm.load(pair, split=split, threads=1, spec="off") as staged:
        assert staged.reads == ("image",)
        assert staged.multimodal is not None
        assert split._needs[0] > staged.multimodal.needed_bytes(1) > 100_000 > split._needs[1]
        assert staged.chat(said, max_tokens=8, temperature=0, ignore_eos=True).tokens == expected
